"""What is sent next, and when: by schedule (open loop), or when a caller got its reply (closed loop)."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns

from plait_loadtest.mix import RequestMix
from plait_loadtest.plan import Share
from plait_loadtest.run.ledger import Ledger
from plait_loadtest.values import PreparedRequest, RequestOutcome
from plait_loadtest.wire.dial import RequestWriter
from plait_loadtest.wire.http1 import HttpConnection
from plait_loadtest.wire.pool import ConnectionPool, SendJob

# The least time between two looks at the schedule: a wake-up costs as much as a request. It grows with the rate, 0.1 us
# for each request per second of this process, from exact at DLRM's rates per process to 1 ms, a fifth of the lag limit;
# measured at 2 x 10,000/s on two busy cores: 54, 45, 35 us of CPU a request at 0.2, 0.5, 1 ms.
_QUANTUM_NS, _MAX_QUANTUM_NS, _QUANTUM_NS_PER_RATE = 100_000, 1_000_000, 100
# Connections for so much of the load are open before it starts. Opening one costs as much as ten requests, so that at
# 10,000/s per process the first tenth of a second would be late for want of them.
_AHEAD_S = 0.005
# So many sends in one go, then replies are read: a generator that fell behind must not stop listening.
_BURST = 64
# Requests are built in idle moments of at least this length.
_IDLE_NS = 2_000_000
# A caller of the closed loop that could not connect asks again after this, as a person would; else it would spin.
_PAUSE_S = 0.1
BUDGET_BYTES = 256 << 20
"""The budget of all processes together: a minute of image requests with control images at 50/s, or an hour of small
ones."""
_SLOT_BYTES = 64  # of a request that shares its bytes with the one before it


def quantum_ns(due_ns: Sequence[int]) -> int:
    """Return the least time between two checks of a schedule; see the constants."""
    return int(min(_MAX_QUANTUM_NS, max(_QUANTUM_NS, _QUANTUM_NS_PER_RATE * _mean_rate_per_s(due_ns))))


def first_connections(due_ns: Sequence[int]) -> int:
    """Return how many connections to open before the start, at least one; see the constant."""
    return 1 + int(_AHEAD_S * _mean_rate_per_s(due_ns))


def _mean_rate_per_s(due_ns: Sequence[int]) -> float:
    if len(due_ns) < 2 or due_ns[-1] == due_ns[0]:
        return 0.0
    return 1e9 * (len(due_ns) - 1) / (due_ns[-1] - due_ns[0])


class RequestFeed:
    """Hands out the bytes of requests in order of their slots, ready before they are due: building one (JSON, tensors,
    control images) takes time.

    A window of finished requests is filled before the run, up to a memory budget, and topped up in idle moments.
    """

    def __init__(self, mix: RequestMix, writer: RequestWriter, indices: Iterator[int], *, budget_bytes: int) -> None:
        self._mix = mix
        self._writer = writer
        self._indices = indices
        self._budget_bytes = budget_bytes
        self._ready: deque[bytes] = deque()
        self._ready_bytes = 0
        self._is_complete = False
        self._last: tuple[PreparedRequest, bytes] | None = None

    def next(self) -> bytes:
        """Return the next request, built now if it is not ready. Raises StopIteration after the last."""
        if not self._ready:
            self.build()
        if not self._ready:
            raise StopIteration
        request = self._ready.popleft()
        self._ready_bytes -= len(request) + _SLOT_BYTES
        return request

    def wants_more(self) -> bool:
        """Return whether there is something left to build and room for it."""
        return not self._is_complete and self._ready_bytes < self._budget_bytes

    def build(self) -> None:
        """Prepare one more request, if there is one."""
        index = next(self._indices, None)
        if index is None:
            self._is_complete = True
            return
        prepared = self._mix.build(index)
        if self._last is None or self._last[0] != prepared:
            self._last = (prepared, self._writer.bytes_of(prepared))
        request = self._last[1]
        self._ready.append(request)
        self._ready_bytes += len(request) + _SLOT_BYTES

    def fill(self, is_stopped: Callable[[], bool]) -> None:
        """Fill the window, calling `is_stopped` periodically."""
        built = 0
        while self.wants_more() and not (built % 256 == 0 and is_stopped()):
            self.build()
            built += 1


class OpenLoop:
    """Sends every request of the schedule at its time, whatever happened to the others.

    `finished` is set when all have ended. The pool calls `ended`.
    """

    def __init__(self, ledger: Ledger, requests: RequestFeed, cancels: bytes) -> None:
        """Set up the loop. `cancels`: one byte for each slot, non-zero for requests that are cancelled on purpose."""
        self.finished = asyncio.Event()
        self.handed = 0  # requests that were due and went to the pool
        self._ledger = ledger
        self._requests = requests
        self._cancels = cancels
        self._due_ns = ledger.scheduled_ns
        self._quantum_ns = quantum_ns(self._due_ns)
        self._pool: ConnectionPool | None = None
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._send_due)
        self._is_building = False

    def start(self, pool: ConnectionPool) -> None:
        """Start sending what is due."""
        self._pool = pool
        if self._due_ns:
            self._alarm.set(self._due_ns[0])
        else:
            self.finished.set()

    def stop(self) -> None:
        """Stop sending. Idempotent."""
        self._alarm.close()

    def ended(self, slot: int, outcome: RequestOutcome, now_ns: int, connection: HttpConnection | str) -> None:
        """Record the end of a request."""
        self._ledger.close(slot, outcome, now_ns, connection)
        if self._ledger.done == len(self._due_ns):
            self.finished.set()

    def _send_due(self) -> None:
        assert self._pool is not None
        due_ns, slot, now_ns = self._due_ns, self.handed, perf_counter_ns()
        stop = min(len(due_ns), slot + _BURST)
        while slot < stop and due_ns[slot] <= now_ns:
            self._pool.submit(SendJob(slot, self._requests.next(), self._cancels[slot] != 0))
            slot += 1
        self.handed = slot
        if slot == len(due_ns):
            self._alarm.stop()
            return
        self._alarm.set(max(due_ns[slot], now_ns + self._quantum_ns))
        if not self._is_building and self._requests.wants_more():
            self._is_building = True
            self._loop.call_soon(self._build_ahead)

    def _build_ahead(self) -> None:
        """Build one request at a time, and only while the next is not due soon; replies are read in between."""
        self._is_building = False
        if self.handed == len(self._due_ns) or not self._requests.wants_more():
            return
        if self._due_ns[self.handed] - perf_counter_ns() > _IDLE_NS:
            self._requests.build()
            self._is_building = True
            self._loop.call_soon(self._build_ahead)


class ClosedLoop:
    """A share's callers: each sends, waits for the reply, and sends again, until the count is reached or, without one,
    the time is over."""

    def __init__(self, ledger: Ledger, requests: RequestFeed, share: Share, *, start_ns: int) -> None:
        self.finished = asyncio.Event()
        self.handed = 0
        self._ledger = ledger
        self._requests = requests
        self._callers = share.callers
        self._start_ns = start_ns
        self._measured_ns = start_ns + int(share.scenario.warm_up_s * 1e9)
        end_ns = self._measured_ns + int(share.scenario.duration_s * 1e9)
        self._until_ns = math.inf if share.count is not None else end_ns
        self._left = share.count
        self._pool: ConnectionPool | None = None
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._loop, self._start_all)
        self._is_stopped = False

    def start(self, pool: ConnectionPool) -> None:
        """Start all callers when it is time."""
        self._pool = pool
        self._alarm.set(self._start_ns)

    def stop(self) -> None:
        """Stop sending. Idempotent."""
        self._is_stopped = True
        self._alarm.close()

    def ended(self, slot: int, outcome: RequestOutcome, now_ns: int, connection: HttpConnection | str) -> None:
        """Record the end of a request and send the next."""
        self._ledger.close(slot, outcome, now_ns, connection)
        if isinstance(connection, str):
            self._loop.call_later(_PAUSE_S, self._ask)
        else:
            self._loop.call_soon(self._ask)

    def _start_all(self) -> None:
        self._alarm.stop()
        for _ in range(self._callers):
            self._ask()

    def _ask(self) -> None:
        now_ns = perf_counter_ns()
        if self._is_stopped or now_ns >= self._until_ns or self._left == 0:
            self._callers -= 1
            if self._callers == 0:
                self.finished.set()
            return
        assert self._pool is not None
        self.handed += 1
        if self._left is not None and now_ns >= self._measured_ns:
            self._left -= 1
        self._pool.submit(SendJob(self._ledger.open(now_ns), self._requests.next()))


# <linux/timerfd.h>, <linux/time.h>
_CLOCK_MONOTONIC, _TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 1, 0o4000, 0o2000000, 1
_NS_PER_S = 1_000_000_000


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


class Alarm:
    """Calls `ring` once, on the loop, when `time.perf_counter_ns` has reached the instant that was set last.

    Exact to about 50 microseconds: a Linux timerfd that the loop watches.

    libuv's timers count whole milliseconds and asyncio's own round up to them: at 1,000 requests/s either would be
    wrong by the gap between two requests. Spinning would be as exact, but occupies a core that the server may need.

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
