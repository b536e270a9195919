"""The CN's core: the sparse half here, the dense half at an HN over the fabric.

The compute thread runs the sparse half of a batch, sends what crosses and continues with the next batch while the HN
computes. A window bounds how many batches are at an HN at once (`window.py`), and while all windows are full,
requests collect into larger batches. Batches in flight at an HN that is lost are sent once more, to another one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from plait_disagg.errors import Busy, DeadlinePassed, RankError, WorkerUnavailable
from plait_disagg.messages.flow import Flow, due_of, flow_field, parse_queued_s
from plait_disagg.messages.hot_rows import HotRows, RowSavings, RowSender
from plait_disagg.messages.layout import layouts_of
from plait_disagg.messages.wire import (
    VERSION,
    dense_message,
    parse_card,
    parse_crossing,
    parse_done,
    role_payload,
)
from plait_disagg.protocols import RowSource, SparseHalf
from plait_disagg.queue.batch import cut
from plait_disagg.queue.batch_boundary import BatchBoundary, run_agreed
from plait_disagg.queue.jobs import RankJob, deliver_all
from plait_disagg.queue.knobs import WireFormat, WorkerKnobs
from plait_disagg.queue.loop import BatchLoop
from plait_disagg.queue.order import Downstream
from plait_disagg.queue.window import Window
from plait_disagg.refresh.prepared_update import PreparedUpdate
from plait_disagg.values import ModelCard, RankAnswer, RankTimings
from plait_fabric import Buffer, Message, Pool
from plait_fabric.layouts import Layout
from plait_fabric.rpc.client import Client, Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost
from plait_fabric.rpc.fields import Header, WireError
from plait_fabric.rpc.outages import Backoff
from plait_kernels.threads import set_threads

_SenderKey: TypeAlias = tuple[Pool, int, str, str]
"""The channel and the knobs that a cache belongs to."""

_Crossing: TypeAlias = Callable[[Pool], tuple[Mapping[str, torch.Tensor], HotRows | None]]
"""Builds what crosses, once the channel is known."""

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


class CnCore:
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
        self._card = card
        self._sparse = sparse
        self._source = _row_source(sparse)
        self._dense_version = dense_version
        self._between = BatchBoundary()
        self._senders: dict[Connection[_SentBatch], tuple[_SenderKey, RowSender]] = {}
        self._savings = RowSavings()
        self._more_metrics = more_metrics
        self._knobs = knobs or WorkerKnobs()
        self._clock = clock
        self._stopping = False
        self._room = threading.Condition()
        self._windows: WeakKeyDictionary[Connection[_SentBatch], Window] = WeakKeyDictionary()
        self._crossing: WeakKeyDictionary[Connection[_SentBatch], Layout] = WeakKeyDictionary()
        self._outputs = layouts_of(card).outputs
        self._lookup_s = self._bytes = self._lost = self._late = 0.0
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
        self._loop: BatchLoop[RankJob] = BatchLoop(
            self._work,
            name=f"cn {card.name}",
            knobs=self._knobs,
            clock=clock,
            wait_for_room=self._wait_for_room,
            downstream=self._downstream,
        )
        self.heartbeat = self._loop.heartbeat

    @property
    def card(self) -> ModelCard:
        """The model's card."""
        return self._card

    @property
    def alive(self) -> bool:
        """Whether the core can go on. A lost HN is no reason to replace the CN."""
        return self._loop.alive

    def submit(self, job: RankJob) -> None:
        """Queue the job for the next batch."""
        if self._stopping:
            raise WorkerUnavailable("the worker is stopping")
        self._loop.put(job)

    def cancel(self, job: RankJob) -> None:
        """Mark the job as abandoned."""
        job.gone = True

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Apply new knobs from the next batch on."""
        self._knobs = knobs
        self._loop.reconfigure(knobs)

    def prepare(self, change: PreparedUpdate) -> None:
        """Do nothing: a CN serves no dense version."""

    def apply_update(self, change: PreparedUpdate) -> None:
        """Apply the change between two batches. Batches at an HN by then are answered by the old version, or sent
        again for the new one."""
        self._between.change(lambda: self._apply_update(change))

    def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        if not self._loop.alive:
            return "the compute thread has died"
        return None if self._client.up else _NO_HN

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of a whole worker, plus those of the wire, the caches and the tables: bytes and lost
        batches so far; HNs connected and batches there now; if rows cross, what their caches count."""
        loop = self._loop
        return {
            "requests_total": loop.items,
            "batches_total": loop.batches,
            "rows_total": loop.rows,
            "waiting": loop.waiting,
            "refused_total": loop.refused,
            "queued_seconds_total": loop.queued_s,
            "busy_seconds_total": self._lookup_s,
            "crossed_bytes_total": self._bytes,
            "lost_batches_total": self._lost,
            "hns": self._client.up,
            "at_hns": self._client.open_calls,
            "window": sum(connection.window for connection in self._client.connections if connection.up),
            "late_answers_total": self._late,
            **(self._savings.metrics() if self._source is not None else {}),
            **self._more_metrics(),
        }

    def stop(self, *, drain_s: float) -> None:
        """Stop the core, its compute thread and its HN connections."""
        until_s = time.monotonic() + drain_s
        self._stopping = True
        self._loop.close()
        if not self._loop.join(drain_s):
            self._loop.abandon(WorkerUnavailable("the worker was stopped"))
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

    def _apply_update(self, change: PreparedUpdate) -> None:
        change.write()
        if change.sparse is not None:
            self._sparse = change.sparse
            self._source = _row_source(change.sparse)
        self._dense_version = change.dense_version
        self._card = replace(self._card, version=change.version)
        for _, sender in list(self._senders.values()):
            sender.invalidate(change.row_ids)

    def _wait_for_room(self) -> None:
        """Wait until a window has room, or until there is no HN at all: then requests fail at once."""
        client = self._client
        if client.best() is not None or not client.up:
            return
        with self._room:
            while client.up and client.best() is None:
                self._room.wait(_LOOK_S)

    def _work(self, jobs: list[RankJob]) -> None:
        run_agreed(self._between, lambda: self._ask_hn(jobs), self._clock)

    def _ask_hn(self, jobs: list[RankJob]) -> None:
        connection = self._client.best(full=True)
        if connection is None:
            raise WorkerUnavailable(_NO_HN, retry_after_s=self._client.back_in_s)
        knobs = self._knobs
        batch = _SentBatch(jobs=jobs, began_s=self._clock(), wire=knobs.wire, version=self._card.version)
        try:
            self._send(connection, batch, knobs)
        except ConnectionLost:  # since it was chosen
            connection.rest()
            self._ask_another(batch, WorkerUnavailable(_NO_HN))

    def _send(self, connection: Connection[_SentBatch], batch: _SentBatch, knobs: WorkerKnobs) -> None:
        requests = [job.request for job in batch.jobs]
        if self._source is None or not knobs.cache_rows:
            crossing = self._sparse.run(requests)
            connection.call(batch, partial(self._pack, connection, batch, lambda _: (crossing, None)))
            return
        ids = self._source.run_ids(requests)
        try:
            crossing_ids: _Crossing = lambda pool: self._sender(connection, pool, knobs).encode(ids)  # noqa: E731
            connection.call(batch, partial(self._pack, connection, batch, crossing_ids))
        except BaseException:
            self._senders.pop(connection, None)  # whether the HN has seen the batch is not known
            raise

    def _sender(self, connection: Connection[_SentBatch], pool: Pool, knobs: WorkerKnobs) -> RowSender:
        """Return the connection's row sender, which starts afresh on every new channel and when its knobs change."""
        assert self._source is not None
        key = (pool, knobs.cache_rows, knobs.cache, knobs.wire)
        found = self._senders.get(connection)
        if found is None or found[0] != key:
            found = self._senders[connection] = key, RowSender(self._source, knobs, self._savings)
        return found[1]

    def _pack(
        self, connection: Connection[_SentBatch], batch: _SentBatch, crossing: _Crossing, number: int, pool: Pool
    ) -> tuple[Mapping[str, Any], list[Buffer]]:
        tensors, hot = crossing(pool)
        batch.looked_up_s = self._clock()
        self._lookup_s += batch.looked_up_s - batch.began_s
        candidates = [job.request.candidates for job in batch.jobs]
        header, buffers = dense_message(
            number,
            self._crossing[connection],
            tensors,
            candidates,
            pool,
            wire=batch.wire,
            hot=hot,
            dense_version=self._dense_version,
        )
        batch.nbytes = sum(len(it) if isinstance(it, bytes | bytearray) else it.nbytes for it in buffers)
        self._bytes += batch.nbytes
        due_s, lost_s = due_of(job.due_s for job in batch.jobs)
        flow = Flow(window=connection.window, open=connection.open_calls, due_s=due_s, lost_s=lost_s)
        batch.packed_s = self._clock()
        header["flow"] = flow_field(flow, batch.packed_s)
        return header, buffers

    # On a connection's thread.

    def _on_welcome(self, connection: Connection[_SentBatch], payload: Header) -> None:
        card = parse_card(payload)
        mine = self._card.name, self._card.packaged or self._card.version
        theirs = card.name, card.packaged or card.version
        if mine != theirs:  # refreshes are the batches' business: each names the dense version that it wants
            raise WireError(f"the HN has {' '.join(theirs)}, not {' '.join(mine)}")
        self._crossing[connection] = parse_crossing(payload)
        window = self._windows[connection] = Window(max_size=self._knobs.window, adapts=self._knobs.adapt_window)
        connection.window = window.size

    def _on_message(self, connection: Connection[_SentBatch], message: Message) -> None:
        with message:
            number, outcome = parse_done(message.header, message.keep(), self._outputs)
            queued_s = parse_queued_s(message.header)
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
            self._adapt(connection, batch, queued_s=queued_s, dense_s=outcome[1] / 1e3, open_now=open_now)
            self._wake()
            self._answered(batch, *outcome)

    def _adapt(self, connection: Connection[_SentBatch], batch: _SentBatch, **at_hn: Any) -> None:
        window, knobs = self._windows[connection], self._knobs
        window.max_size, window.adapts = knobs.window, knobs.adapt_window
        made_s, away_s = batch.packed_s - batch.began_s, self._clock() - batch.packed_s
        window.answered(made_s=made_s, away_s=away_s, **at_hn)
        connection.window = window.size

    def _answered(self, batch: _SentBatch, outputs: dict[str, torch.Tensor], dense_ms: float) -> None:
        jobs = batch.jobs
        candidates = [job.request.candidates for job in jobs]
        total = sum(candidates)
        if any(output.shape[0] != total for output in outputs.values()):
            self._ask_another(batch, WorkerUnavailable(_NO_HN))  # it is open no more: nobody else would
            raise WireError(f"outputs of {[tuple(it.shape) for it in outputs.values()]} for {total} candidates")
        lookup_ms = (batch.looked_up_s - batch.began_s) * 1e3
        at_hn_s = self._clock() - batch.looked_up_s
        self._loop.pace.saw_answer(at_hn_s)
        self._loop.saw_ends(jobs)
        wire_ms = at_hn_s * 1e3 - dense_ms
        deliver_all(
            (
                job,
                RankAnswer(
                    outputs=mine,
                    timings=RankTimings(
                        queued_ms=(batch.began_s - job.came_s) * 1e3,
                        lookup_ms=lookup_ms,
                        wire_ms=wire_ms,
                        dense_ms=dense_ms,
                    ),
                    bytes_crossed=batch.nbytes * job.request.candidates // total,
                    version=batch.version,
                ),
            )
            for job, mine in zip(jobs, cut(outputs, candidates), strict=True)
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
        self._senders.pop(connection, None)  # frees it; the next channel would not use it anyway
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


def _row_source(sparse: SparseHalf) -> RowSource | None:
    """Return the half if bare rows of it cross."""
    return sparse if isinstance(sparse, RowSource) and sparse.row_ports else None
