"""What a worker records, in plain arrays while it runs: storing into a numpy record costs five times as much."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from plait_loadtest.failures import FailureLog
from plait_loadtest.values import NO_ERROR, RECORD, Records, RequestOutcome
from plait_loadtest.wire.answers import Judge
from plait_loadtest.wire.http1 import HttpConnection

_RECENT = 512
_MAX = 2**32 - 1  # of the byte counts
_MAX_IMAGES = 2**16 - 1
_FIRST_OPEN = 1024


class Ledger:
    """One line per slot; a slot is a request's number within its process. Times are absolute, -1: never.

    An open slot reads as interrupted until `close` records its end. `asked`: how many images or outputs a slot's
    request asks for.
    """

    def __init__(
        self, judge: Judge, failures: FailureLog, scheduled_ns: Sequence[int], asked: Callable[[int], int]
    ) -> None:
        self.scheduled_ns = array("q", scheduled_ns)
        self.done = 0
        self.counts = [0] * len(RequestOutcome)
        self.recent: deque[int] = deque(maxlen=_RECENT)
        self._judge = judge
        self.failures = failures
        self._asked = asked
        self._size = 0
        self._outcome = array("B")
        self._status = array("H")
        self._sent_ns, self._first_byte_ns, self._first_part_ns, self._done_ns = (array("q") for _ in range(4))
        self._sent_bytes, self._received_bytes = array("I"), array("I")
        self._server_ms = array("f")
        self._images, self._why = array("H"), array("H")
        self._grow(len(self.scheduled_ns))

    def open(self, scheduled_ns: int) -> int:
        """Append and return a new slot, for callers that have no schedule."""
        slot = len(self.scheduled_ns)
        self.scheduled_ns.append(scheduled_ns)
        if slot >= self._size:
            self._grow(max(_FIRST_OPEN, self._size))
        return slot

    def close(self, slot: int, outcome: RequestOutcome, now_ns: int, connection: HttpConnection | str) -> None:
        """Record the end of a request; `connection`: why it never had one."""
        if isinstance(connection, str):
            self._why[slot] = self.failures.number(connection)
        else:
            self._sent_ns[slot] = connection.sent_ns
            self._first_byte_ns[slot] = connection.first_byte_ns
            self._status[slot] = connection.head.status
            self._sent_bytes[slot] = len(connection.request)
            self._received_bytes[slot] = min(connection.received_bytes, _MAX)
            if outcome is RequestOutcome.OK:
                outcome = self._look_closer(slot, connection)
            else:
                self._why[slot] = self.failures.of_connection(outcome, connection)
        self._outcome[slot] = outcome
        self._done_ns[slot] = now_ns
        self.counts[outcome] += 1
        self.done += 1
        self.recent.append(now_ns - self.scheduled_ns[slot])

    @property
    def errors(self) -> int:
        """The number of requests that failed."""
        return self.done - sum(self.counts[outcome] for outcome in NO_ERROR)

    def records(self, *, rank: int, processes: int, start_ns: int, kinds: Sequence[int], warm_up: int) -> Records:
        """Return all slots, times counted from `start_ns`; a slot's index is `rank + slot * processes`."""
        count = len(self.scheduled_ns)
        records = np.zeros(count, dtype=RECORD)
        records["index"] = rank + processes * np.arange(count)
        records["kind"] = kinds
        records["warm_up"] = records["index"] < warm_up
        records["scheduled_ns"] = np.frombuffer(self.scheduled_ns, np.int64) - start_ns
        for name in ("outcome", "status", "sent_bytes", "received_bytes", "server_ms", "images", "why"):
            records[name] = getattr(self, f"_{name}")[:count]
        for name in ("sent_ns", "first_byte_ns", "first_part_ns", "done_ns"):
            times = np.frombuffer(getattr(self, f"_{name}"), np.int64)[:count]
            records[name] = np.where(times < 0, -1, times - start_ns)
        return records

    def _look_closer(self, slot: int, connection: HttpConnection) -> RequestOutcome:
        self._first_part_ns[slot] = connection.first_part_ns
        head = connection.head
        if head.is_plain and not self._judge.keeps_body:
            self._server_ms[slot] = head.server_ms
            return RequestOutcome.OK
        body = connection.body
        facts = self._judge.look(head, body, self._asked(slot))
        self._server_ms[slot] = facts.server_ms
        self._images[slot] = min(facts.images, _MAX_IMAGES)
        if not facts.why:
            return RequestOutcome.OK
        self._why[slot] = self.failures.of_answer(facts.why, facts.said)
        return RequestOutcome.CHECK

    def _grow(self, by: int) -> None:
        self._size += by
        self._outcome.extend([RequestOutcome.INTERRUPTED] * by)
        for times in (self._sent_ns, self._first_byte_ns, self._first_part_ns, self._done_ns):
            times.extend([-1] * by)
        for numbers in (self._status, self._sent_bytes, self._received_bytes, self._images, self._why):
            numbers.extend([0] * by)
        self._server_ms.extend([math.nan] * by)
