"""Assignment of connections: idle ones last in first out, a limit, and a first-in first-out queue.

HTTP/1.1 carries one request per connection, so the limits on connections and on requests in flight are one number,
`room`. A request that finds no room waits; its latency still counts from its scheduled time.

A server may have closed a kept-alive connection by the time when a request is written to it. That is an artefact of
keeping connections, not the server's answer: if the connection's end shows that the server never had the request, it
leaves once more, on a new connection, and is counted in `reconnects`. What may have been read is never sent again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from time import perf_counter_ns
from typing import NamedTuple

from plait_loadtest.failures import ROOM
from plait_loadtest.scenario import Scenario
from plait_loadtest.values import Failure, RequestOutcome
from plait_loadtest.wire.http1 import HttpConnection


class SendJob(NamedTuple):
    """A request for the pool. `cancels`: whether it is cancelled some time after it was sent."""

    slot: int
    request: bytes
    cancels: bool = False


Dial = Callable[[Callable[[], asyncio.Protocol]], Awaitable[asyncio.Protocol | Failure]]
"""Opens a connection, or returns why there is none; never raises."""

OnEnd = Callable[[int, RequestOutcome, int, HttpConnection | str], None]
"""`(slot, outcome, now_ns, connection)`; a text in place of the connection says why the request never got one. The
details are on the connection."""


class ConnectionPool:
    """Implements `http1.Owner`. Must live on one running loop. `room`: of connections, hence of requests in flight."""

    def __init__(self, dial: Dial, scenario: Scenario, on_end: OnEnd, *, room: int, keeps_body: bool) -> None:
        self.reconnects = 0
        self.limits: Counter[str] = Counter()  # requests that each limit of the generator held up
        self._dial = dial
        self._scenario, self._room, self._keeps_body = scenario, room, keeps_body
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._idle: deque[HttpConnection] = deque()
        self._next_idle = self._idle.pop
        self._in_flight: dict[HttpConnection, SendJob] = {}  # oldest first
        self._waiting: deque[SendJob] = deque()
        self._open = 0  # connections, those being opened included
        self._opening = 0  # for whoever waits longest
        self._dials: dict[asyncio.Task[None], SendJob | None] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def in_flight(self) -> int:
        """The number of requests that were sent and have not ended."""
        return len(self._in_flight)

    @property
    def waiting(self) -> int:
        """The number of requests without a connection."""
        return len(self._waiting)

    def submit(self, job: SendJob) -> None:
        """Send the request now if there is room, else as soon as there is. Never reports its end before returning."""
        if self._idle:
            self._send(self._next_idle(), job)
            return
        self._waiting.append(job)
        self._grow()
        if self._opening < len(self._waiting):
            self.limits[ROOM] += 1

    def open_ahead(self, count: int) -> None:
        """Open connections for the first requests; a failure to open one is not an error of any request."""
        for _ in range(min(count, self._room) - self._open):
            self._open_for_anyone()

    def spread(self, addresses: int) -> None:
        """Use idle connections in turn, and have one open for each address, which take turns too."""
        if addresses > 1:
            self._next_idle = self._idle.popleft
            self.open_ahead(addresses)

    def close(self) -> None:
        """End the run: requests in flight or waiting for a connect are interrupted, the others are not sent."""
        self._is_closed = True
        now_ns = perf_counter_ns()
        if self._watch is not None:
            self._watch.cancel()
        opening = len(self._dials)
        for task, job in self._dials.items():
            task.cancel()
            if job is not None:
                self._waiting.appendleft(job)
        for place, job in enumerate(self._waiting):
            outcome, why = (RequestOutcome.INTERRUPTED, "") if place < opening else (RequestOutcome.NOT_SENT, ROOM)
            self._on_end(job.slot, outcome, now_ns, why)
        self._waiting.clear()
        for connection in list(self._in_flight):
            connection.give_up(RequestOutcome.INTERRUPTED, now_ns)
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    # ---- told by connections

    def ended(self, connection: HttpConnection, slot: int, outcome: RequestOutcome, now_ns: int) -> None:
        """Report the end of the request and reuse the connection; one that nobody can have read is sent again."""
        job = self._in_flight.pop(connection)
        if outcome is RequestOutcome.RESET and connection.is_kept and connection.is_unread and not self._is_closed:
            self.reconnects += 1
            self._start_dial(job, connection.sent_ns)  # in the place of the one that closed
            return
        self._on_end(slot, outcome, now_ns, connection)
        if not connection.is_reusable or self._is_closed:
            self._drop(connection)
            return
        connection.is_kept = True
        if self._waiting:
            self._send(connection, self._waiting.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: HttpConnection) -> None:
        """Remove the connection from the idle ones."""
        if connection in self._idle:
            self._idle.remove(connection)
            self._open -= 1

    def _drop(self, connection: HttpConnection) -> None:
        connection.close()
        self._open -= 1
        self._grow()

    # ---- sending

    def _send(self, connection: HttpConnection, job: SendJob) -> None:
        self._in_flight[connection] = job
        connection.send(job.slot, job.request)
        if job.cancels:
            self._loop.call_later(self._scenario.limits.cancel_after_s, self._cancel, connection, job.slot)
        if self._watch is None:
            self._watch = self._loop.call_later(self._scenario.target.timeout_s, self._give_up_old)

    def _cancel(self, connection: HttpConnection, slot: int) -> None:
        if connection.slot == slot:
            connection.give_up(RequestOutcome.CANCELLED, perf_counter_ns())

    def _give_up_old(self) -> None:
        """Time out requests. All have the same timeout, so only the oldest is watched: no timer per request."""
        now_ns = perf_counter_ns()
        self._watch = None
        while self._in_flight:
            oldest = next(iter(self._in_flight))
            left_ns = oldest.sent_ns + int(self._scenario.target.timeout_s * 1e9) - now_ns
            if left_ns > 0:
                # The loop counts in whole milliseconds and may be a little early.
                self._watch = self._loop.call_later(left_ns / 1e9 + 0.001, self._give_up_old)
                return
            oldest.give_up(RequestOutcome.TIMEOUT, now_ns)

    # ---- opening

    def _grow(self) -> None:
        """Open as many connections as requests wait, within the room."""
        while self._opening < len(self._waiting) and self._open < self._room and not self._is_closed:
            self._open_for_anyone()

    def _open_for_anyone(self) -> None:
        self._open += 1
        self._opening += 1
        self._start_dial(None)

    def _start_dial(self, job: SendJob | None, sent_ns: int = -1) -> None:
        """Start opening a connection; if `job` is None, it goes to the longest-waiting request once it is open.
        `sent_ns`: when the job left first."""
        task = self._loop.create_task(self._open_one(job, sent_ns))
        self._dials[task] = job
        task.add_done_callback(self._dialled)

    def _dialled(self, task: asyncio.Task[None]) -> None:
        del self._dials[task]
        if not task.cancelled():
            task.result()  # raises what should never be, for the loop's exception handler

    async def _open_one(self, job: SendJob | None, sent_ns: int) -> None:
        opened = await self._dial(self._connection)
        if isinstance(opened, HttpConnection) and not opened.is_open:  # the server ended it at once
            opened = Failure(RequestOutcome.RESET, "the connection ended before the request was sent")
        if job is None:
            self._opening -= 1
            job = self._waiting.popleft() if self._waiting else None
        if isinstance(opened, HttpConnection):
            if job is not None:
                self._send(opened, job)
                opened.sent_ns = opened.sent_ns if sent_ns < 0 else sent_ns
            else:
                opened.is_kept = True
                self._idle.append(opened)
            return
        assert isinstance(opened, Failure)
        self._open -= 1
        if job is not None:
            if opened.outcome is RequestOutcome.NOT_SENT:
                self.limits[opened.why] += 1
            self._on_end(job.slot, opened.outcome, perf_counter_ns(), opened.why)
        self._grow()

    def _connection(self) -> HttpConnection:
        limit_bytes = self._scenario.limits.response_bytes
        return HttpConnection(self, keeps_body=self._keeps_body, limit_bytes=limit_bytes)
