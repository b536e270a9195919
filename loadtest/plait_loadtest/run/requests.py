"""The bytes of requests, ready before they are due: building one (JSON, tensors, control images) takes time.

A window of finished requests is filled before the run, up to a memory budget, and topped up in idle moments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from plait_loadtest.mix import RequestMix
from plait_loadtest.values import PreparedRequest
from plait_loadtest.wire.dial import RequestWriter

BUDGET_BYTES = 256 << 20
"""The budget of all processes together: a minute of image requests with control images at 50/s, or an hour of small
ones."""

_SLOT_BYTES = 64  # of a request that shares its bytes with the one before it


class RequestFeed:
    """Hands out the bytes of requests in order of their slots."""

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
