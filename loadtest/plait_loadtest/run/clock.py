"""Waking at an instant, to about 50 microseconds: a Linux timerfd that the event loop watches. All its calls are here.

libuv's timers count whole milliseconds and asyncio's own round up to them: at 1,000 requests/s either would be wrong
by the gap between two requests. Spinning for the last fraction would be as exact, but occupies the core that the
server may need.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

# <linux/timerfd.h>, <linux/time.h>
_CLOCK_MONOTONIC, _TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 1, 0o4000, 0o2000000, 1
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Alarm:
    """Calls `ring` once, on the loop, when `time.perf_counter_ns` has reached the instant that was set last.

    `ring` must set or stop the alarm each time, otherwise it is called again at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._spec = _Itimerspec()
        self._value = self._spec.it_value
        self._settime = self._libc.timerfd_settime
        self._at = ctypes.byref(self._spec)
        self._loop = loop
        loop.add_reader(self._fd, ring)

    def set(self, at_ns: int) -> None:
        """Ring at `at_ns`, or at once if that has passed. Setting also cancels a ring that was not delivered yet."""
        self._value.tv_sec, self._value.tv_nsec = divmod(at_ns, _NS_PER_S)
        self._settime(self._fd, _TFD_TIMER_ABSTIME, self._at, None)

    def stop(self) -> None:
        """Cancel the alarm."""
        self.set(0)  # what the system call takes for "disarm"

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
