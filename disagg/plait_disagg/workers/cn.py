"""The CN's core: the sparse half here, the dense half at an HN over the fabric.

The compute thread runs the sparse half of a batch, sends what crosses and continues with the next batch while the HN
computes. A window bounds how many batches are at an HN at once (`window.py`), and while all windows are full,
requests collect into larger batches. Batches in flight at an HN that is lost are sent once more, to another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from plait_disagg.errors import Busy, DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.messages.hot_rows import HotRows, RowSavings, RowSender
from plait_disagg.messages.layout import layouts_of
from plait_disagg.messages.wire import VERSION, dense_message, parse_answers, parse_card, parse_crossing, role_payload
from plait_disagg.protocols import SparseHalf
from plait_disagg.queue.jobs import Outcome, RankJob, deliver_all
from plait_disagg.queue.knobs import WireFormat, WorkerKnobs
from plait_disagg.queue.order import Downstream
from plait_disagg.queue.window import Window
from plait_disagg.refresh.prepared_update import PreparedUpdate
from plait_disagg.values import ModelCard, RankAnswer, RankTimings
from plait_disagg.workers.base import LocalCore
from plait_fabric import Buffer, Message, Pool
from plait_fabric.layouts import Layout
from plait_fabric.rpc.client import Client, Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost
from plait_fabric.rpc.fields import Header, WireError
from plait_fabric.rpc.outages import Backoff
from plait_kernels.threads import set_threads

_Crossing: TypeAlias = Callable[["_Hn"], tuple[Mapping[str, torch.Tensor], HotRows | None]]
"""Builds what crosses, once it is known where to."""

_NO_HN = "no HN answers"  # at which address which one was lost is in the log

_LOOK_S = 0.5
"""How often a thread that waits for room also checks on its own; every answer wakes it anyway."""


@dataclass(slots=True, eq=False, kw_only=True)
class _SentBatch:
    """A batch in flight at an HN. Times are on the core's clock."""

    jobs: list[RankJob]
    began_s: float
    wire: WireFormat
    version: str
    looked_up_s: float = 0.0
    packed_s: float = 0.0
    nbytes: int = 0


@dataclass(slots=True, eq=False)
class _Hn:
    """What an HN said in its welcome, and what a CN keeps of its channel: `sender` belongs to `sender_knobs`."""

    crossing: Layout
    window: Window
    sender: RowSender | None = None
    sender_knobs: tuple[int, str, str] = (0, "", "")


class CnCore(LocalCore):
    """A core whose dense half is in another process."""

    def __init__(
        self,
        card: ModelCard,
        sparse: SparseHalf,
        connect: Connect,
        *,
        hns: int = 1,
        max_hns: int | None = None,
        dense_version: str = "",
        knobs: WorkerKnobs | None = None,
        answer_timeout_s: float = 30.0,
        backoff: Backoff | None = None,
        more_metrics: Callable[[], Mapping[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the core at once. `connect` reaches an HN, of which there are `hns`, or as many as are found up to
        `max_hns`; `dense_version` is the version they must compute with. `more_metrics`: those of its tables."""
        super().__init__(card, sparse, knobs=knobs, clock=clock)
        self._dense_version = dense_version
        self._savings = RowSavings()
        self._more_metrics = more_metrics
        self._stopping = False
        self._room = threading.Condition()
        self._hns: WeakKeyDictionary[Connection[_SentBatch], _Hn] = WeakKeyDictionary()
        self._outputs = layouts_of(card).outputs
        self._bytes = self._lost = self._late = 0.0
        protocol = ClientProtocol(
            version=VERSION,
            hello=role_payload("dense"),
            on_welcome=self._on_welcome,
            on_message=self._on_message,
            on_lost=self._on_lost,
            answer_timeout_s=answer_timeout_s,
        )
        self._client: Client[_SentBatch] = Client(
            connect,
            protocol,
            name=f"cn {card.name}",
            count=hns,
            max_count=max_hns,
            backoff=backoff,
            on_thread=partial(set_threads, 1),
        )
        self._start(f"cn {card.name}", wait_for_room=self._wait_for_room, downstream=self._downstream)

    def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        return super().ready() or (None if self._client.up else _NO_HN)

    def metrics(self) -> Mapping[str, float]:
        """Return those of the wire, the caches and the tables, too: bytes and lost batches so far; HNs connected and
        batches there now; if rows cross, what their caches count."""
        return {
            **super().metrics(),
            "crossed_bytes_total": self._bytes,
            "lost_batches_total": self._lost,
            "hns": self._client.up,
            "at_hns": self._client.open_calls,
            "window": sum(connection.window for connection in self._client.connections if connection.up),
            "late_answers_total": self._late,
            **(self._savings.metrics() if self._sparse.row_ports else {}),
            **self._more_metrics(),
        }

    def stop(self, *, drain_s: float) -> None:
        """Stop the compute thread, and the HN connections once nothing is open there."""
        until_s = time.monotonic() + drain_s
        self._stopping = True
        super().stop(drain_s=drain_s)
        with self._room:
            self._room.wait_for(lambda: not self._client.open_calls, max(0.0, until_s - time.monotonic()))
        self._client.close()

    def _downstream(self) -> Downstream:
        up = [(it.open_calls, it.window) for it in self._client.connections if it.up]
        return Downstream(
            open=self._client.open_calls,
            idle=sum(not asked for asked, _ in up),
            room=sum(max(0, window - asked) for asked, window in up),
        )

    # On the compute thread, or while it runs no batch.

    def _change(self, change: PreparedUpdate) -> None:
        """Batches at an HN by then are answered by the old version, or sent again for the new one."""
        super()._change(change)
        self._dense_version = change.dense_version
        for connection in self._client.connections:
            hn = self._hns.get(connection)
            if hn is not None and hn.sender is not None:
                hn.sender.invalidate(change.row_ids)

    def _wait_for_room(self) -> None:
        """Wait until a window has room, or until there is no HN at all: then requests fail at once."""
        with self._room:
            while self._client.up and self._client.best() is None:
                self._room.wait(_LOOK_S)

    def _work(self, jobs: list[RankJob]) -> None:
        self._between.run_agreed(lambda: self._ask_hn(jobs), self._clock)

    def _ask_hn(self, jobs: list[RankJob]) -> None:
        connection = self._client.best(full=True)
        if connection is None:
            raise WorkerUnavailable(_NO_HN, retry_after_s=self._client.back_in_s)
        knobs = self._knobs
        batch = _SentBatch(jobs=jobs, began_s=self._clock(), wire=knobs.wire, version=self.card.version)
        try:
            self._send(connection, batch, knobs)
        except ConnectionLost:  # since it was chosen
            connection.rest()
            self._ask_another(batch, WorkerUnavailable(_NO_HN))

    def _send(self, connection: Connection[_SentBatch], batch: _SentBatch, knobs: WorkerKnobs) -> None:
        requests = [job.request for job in batch.jobs]
        if not self._sparse.row_ports or not knobs.cache_rows:
            crossing = self._sparse.run(requests)
            connection.call(batch, partial(self._pack, connection, batch, lambda _: (crossing, None)))
            return
        ids = self._sparse.run_ids(requests)
        try:
            crossing_ids: _Crossing = lambda hn: self._sender(hn, knobs).encode(ids)  # noqa: E731
            connection.call(batch, partial(self._pack, connection, batch, crossing_ids))
        except BaseException:
            self._hns[connection].sender = None  # whether the HN has seen the batch is not known
            raise

    def _sender(self, hn: _Hn, knobs: WorkerKnobs) -> RowSender:
        """Return the channel's row sender, which starts afresh when its knobs change."""
        key, sender = (knobs.cache_rows, knobs.cache, knobs.wire), hn.sender
        if sender is None or hn.sender_knobs != key:
            sender = hn.sender = RowSender(self._sparse, knobs, self._savings)
            hn.sender_knobs = key
        return sender

    def _pack(
        self, connection: Connection[_SentBatch], batch: _SentBatch, crossing: _Crossing, number: int, pool: Pool
    ) -> tuple[Mapping[str, Any], list[Buffer]]:
        hn = self._hns[connection]
        tensors, hot = crossing(hn)
        batch.looked_up_s = self._clock()
        self._busy_s += batch.looked_up_s - batch.began_s
        candidates = [job.request.candidates for job in batch.jobs]
        header, buffers = dense_message(
            number,
            hn.crossing,
            tensors,
            candidates,
            pool,
            wire=batch.wire,
            hot=hot,
            dense_version=self._dense_version,
            window=connection.window,
            open_calls=connection.open_calls,
            deadlines=[job.due_s for job in batch.jobs],
        )
        batch.nbytes = sum(len(it) if isinstance(it, bytes | bytearray) else it.nbytes for it in buffers)
        self._bytes += batch.nbytes
        batch.packed_s = self._clock()
        return header, buffers

    # On a connection's thread.

    def _on_welcome(self, connection: Connection[_SentBatch], payload: Header) -> None:
        card = parse_card(payload)
        mine = self.card.name, self.card.packaged or self.card.version
        theirs = card.name, card.packaged or card.version
        if mine != theirs:  # refreshes are the batches' business: each names the dense version that it wants
            raise WireError(f"the HN has {' '.join(theirs)}, not {' '.join(mine)}")
        window = Window(max_size=self._knobs.window, adapts=self._knobs.adapt_window)
        self._hns[connection] = _Hn(parse_crossing(payload), window)
        connection.window = window.size

    def _on_message(self, connection: Connection[_SentBatch], message: Message) -> None:
        with message:
            outcomes = parse_answers(message.header, message.keep(), self._outputs)
        for number, outcome in outcomes:
            self._settle(connection, number, outcome)

    def _settle(self, connection: Connection[_SentBatch], number: int, outcome: Outcome) -> None:
        open_now = connection.open_calls
        batch = connection.take(number)
        if batch is None:
            if not connection.was_called(number):
                raise WireError(f"an answer to batch {number}, which was never asked")
            self._late += 1  # a second answer; whoever waited has the first
            return
        if isinstance(outcome, RankError):
            self._wake()
            self._failed(connection, batch, outcome)
        else:
            self._adapt(connection, batch, outcome.timings, open_now)
            self._wake()
            self._answered(batch, outcome)

    def _adapt(self, connection: Connection[_SentBatch], batch: _SentBatch, at_hn: RankTimings, open_now: int) -> None:
        window, knobs = self._hns[connection].window, self._knobs
        window.max_size, window.adapts = knobs.window, knobs.adapt_window
        window.answered(
            made_s=batch.packed_s - batch.began_s,
            away_s=self._clock() - batch.packed_s,
            queued_s=at_hn.queued_ms / 1e3,
            dense_s=at_hn.dense_ms / 1e3,
            open_now=open_now,
        )
        connection.window = window.size

    def _answered(self, batch: _SentBatch, answer: RankAnswer) -> None:
        outputs, dense_ms = answer.outputs, answer.timings.dense_ms
        total = sum(job.request.candidates for job in batch.jobs)
        if any(output.shape[0] != total for output in outputs.values()):
            self._ask_another(batch, WorkerUnavailable(_NO_HN))  # it is open no more: nobody else would
            raise WireError(f"outputs of {[tuple(it.shape) for it in outputs.values()]} for {total} candidates")
        at_hn_s = self._clock() - batch.looked_up_s
        self._loop.pace.saw_answer(at_hn_s)
        self._answer(
            batch.jobs,
            outputs,
            batch.began_s,
            version=batch.version,
            nbytes=batch.nbytes,
            lookup_ms=(batch.looked_up_s - batch.began_s) * 1e3,
            wire_ms=at_hn_s * 1e3 - dense_ms,
            dense_ms=dense_ms,
        )

    def _failed(self, connection: Connection[_SentBatch], batch: _SentBatch, error: RankError) -> None:
        """Handle a failed batch: a fault affects only its own request, so the others are sent again, each alone. An
        HN that is stopping is not a fault."""
        if isinstance(error, WorkerUnavailable | Busy):
            connection.rest()
            self._ask_another(batch, error)
            return
        if isinstance(error, DeadlinePassed):
            self._loop.saw_given_up(batch.jobs)
        if len(batch.jobs) == 1 or isinstance(error, DeadlinePassed):
            deliver_all((job, error) for job in batch.jobs)
            return
        for job in batch.jobs:
            job.alone = True
            self._loop.put_again(job)

    def _on_lost(self, connection: Connection[_SentBatch], batches: list[_SentBatch], why: str) -> None:  # noqa: ARG002
        self._hns[connection].sender = None  # frees it; the next channel has its own
        self._lost += len(batches)
        self._wake()
        for batch in batches:
            self._ask_another(batch, WorkerUnavailable(_NO_HN, retry_after_s=self._client.back_in_s))

    def _ask_another(self, batch: _SentBatch, error: RankError) -> None:
        """Send a lost batch once more if another HN is there: ranking has no side effects. The queue gives up requests
        whose deadline has passed meanwhile."""
        for job in batch.jobs:
            job.tries += 1
            if job.tries > 1 or self._stopping or not self._client.up:
                job.fail(error)
            else:
                self._loop.put_again(job)

    def _wake(self) -> None:
        with self._room:
            self._room.notify_all()
