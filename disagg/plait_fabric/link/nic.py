"""Ports and queue pairs in virtual time: NIC sharing and incast queues. Pure: no threads, no clock, no waiting.

The caller passes the time at which a message is posted and gets back when it arrives where; a discrete-event
simulator calls this in the order of its own time. A port is full duplex and serves each direction one message after
the other, in the order of the calls. So k messages for one host that are posted at once are delivered at intervals
of n / bytes_per_s: the last of them at alpha + k n / bytes_per_s, which is incast. The fabric between the ports has
room for all (what PFC does to senders is not modelled), and big messages are not interleaved packet by packet.

::

    cn, hn = Nic(), Nic()
    pair = QueuePair(link, cn, hn)
    pair.post([4_096], at_s=0.0)[0].delivered_s      # == link.one_way_s(4_096)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from plait_fabric.link.link import Link

__all__ = ["Nic", "QueuePair", "Transfer"]


class Nic:
    """One port. Not thread-safe. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._sends_until_s = self._receives_until_s = float("-inf")

    def send(self, at_s: float, busy_s: float) -> float:
        """Reserve the sending side for `busy_s` from `at_s` on, or once it is free; return when that begins."""
        begins_s = max(at_s, self._sends_until_s)
        self._sends_until_s = begins_s + busy_s
        return begins_s

    def receive(self, at_s: float, busy_s: float) -> float:
        """Reserve the receiving side in the same way."""
        begins_s = max(at_s, self._receives_until_s)
        self._receives_until_s = begins_s + busy_s
        return begins_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A message's times.

    `delivered_s`: the receiver of the data has seen its completion. `completed_s`: the poster has seen that its work
    request is done. `queued_s`: what ports and a full queue pair added to the time of an idle network.
    """

    nbytes: int
    posted_s: float
    delivered_s: float
    completed_s: float
    queued_s: float


class QueuePair:
    """A reliable connection from `source` to `target`, which keeps order. Not thread-safe."""

    def __init__(self, link: Link, source: Nic, target: Nic) -> None:
        self.link = link
        self._source = source
        self._target = target
        self._outstanding: deque[float] = deque()
        self._reads: deque[float] = deque()

    def post(self, sizes: Sequence[int], at_s: float) -> list[Transfer]:
        """Send messages of those payload bytes. They are posted one after the other and share one doorbell."""
        link = self.link
        ready_s = at_s
        found = []
        for position, nbytes in enumerate(sizes):
            ready_s = self._room(self._outstanding, link.queue_depth, ready_s) + link.post_s
            rung_s = ready_s + link.doorbell_s
            begins_s = self._source.send(rung_s, link.busy_s(nbytes))
            arrives_s = self._target.receive(begins_s + link.flight_s(nbytes), link.busy_s(nbytes))
            delivered_s = arrives_s + link.busy_s(nbytes) + link.completion_s
            self._outstanding.append(delivered_s + link.wire_s)  # the acknowledgement's way back
            idle_s = link.one_way_s(nbytes) + position * link.post_s
            found.append(_transfer(nbytes, at_s, delivered_s, delivered_s + link.wire_s, idle_s))
        return found

    def read(self, nbytes: int, at_s: float) -> Transfer:
        """Read `nbytes` from the target's memory; its processor takes no part."""
        link = self.link
        ready_s = self._room(self._outstanding, link.queue_depth, at_s)
        ready_s = self._room(self._reads, link.reads_in_flight, ready_s) + link.sender_s
        asked_s = self._source.send(ready_s, link.gap_s) + link.wire_s
        begins_s = self._target.send(asked_s, link.busy_s(nbytes))
        arrives_s = self._source.receive(begins_s + link.answer_s(nbytes), link.busy_s(nbytes))
        done_s = arrives_s + link.busy_s(nbytes) + link.completion_s
        self._reads.append(done_s)
        self._outstanding.append(done_s)
        return _transfer(nbytes, at_s, done_s, done_s, link.read_s(nbytes))

    @staticmethod
    def _room(outstanding: deque[float], depth: int, at_s: float) -> float:
        """Return when there is room for one more, at `at_s` or later."""
        while outstanding and outstanding[0] <= at_s:
            outstanding.popleft()
        return at_s if len(outstanding) < depth else max(at_s, outstanding.popleft())


def _transfer(nbytes: int, at_s: float, delivered_s: float, completed_s: float, idle_s: float) -> Transfer:
    queued_s = max(0.0, delivered_s - at_s - idle_s)
    return Transfer(nbytes=nbytes, posted_s=at_s, delivered_s=delivered_s, completed_s=completed_s, queued_s=queued_s)
