"""What workers have in common: cores a compute thread, and changes between its batches; others a server."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from plait_disagg.errors import WorkerUnavailable
from plait_disagg.protocols import SparseHalf
from plait_disagg.queue.batch import cut
from plait_disagg.queue.jobs import RankJob, deliver_all
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.loop import BatchLoop
from plait_disagg.queue.order import Downstream
from plait_disagg.refresh.prepared_update import PreparedUpdate
from plait_disagg.tables.protocols import OtherVersion
from plait_disagg.values import ModelCard, RankAnswer, RankTimings
from plait_fabric import Listener
from plait_fabric.rpc.server import Server, ServerProtocol
from plait_kernels.threads import set_threads

_AGREE_S = 5.0
"""How long a batch waits for CN and shards to serve one version: a refresh reaches them within milliseconds."""
_AGAIN_S = 0.003


class BatchBoundary:
    """What a batch, and a change, holds: no two of them overlap.

    Whoever is next waits behind the door, and all others before it: a worker whose batches follow each other without a
    pause would never let another thread in.
    """

    def __init__(self) -> None:
        self._door, self._held = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._held.acquire()

    def __exit__(self, *error: object) -> None:
        self._held.release()

    def run_agreed(self, batch: Callable[[], None], clock: Callable[[], float]) -> None:
        """Run a batch; while shards have other rows than it asks for, run it again, with room for a change in between:
        who must switch may be the CN. Raises `WorkerUnavailable` if they do not agree in time, and what `batch`
        raises."""
        until_s = clock() + _AGREE_S
        while True:
            try:
                with self:
                    batch()
                return
            except OtherVersion as error:
                if clock() > until_s:
                    raise WorkerUnavailable(f"a refresh is on its way: {error}", retry_after_s=1.0) from error
            time.sleep(_AGAIN_S)


class ServedWorker:
    """What is reached over the listeners of a server, which it owns."""

    def _serve(self, protocol: ServerProtocol, listeners: Sequence[Listener], *, name: str) -> None:
        self._server = Server(protocol, listeners, name=name, on_thread=partial(set_threads, 1))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses on which it listens."""
        return self._server.addresses

    @property
    def alive(self) -> bool:
        """False when the process must be replaced."""
        return self._server.alive

    def leave(self, timeout_s: float) -> None:
        """Serve on until clients have found another worker, or looked for one in vain; `timeout_s` at most."""
        self._server.leave(timeout_s)

    @property
    def channels(self) -> int:
        """Number of clients connected now."""
        return self._server.peers


class LocalCore(ABC):
    """A core with a compute thread, which calls `_work` and, between two batches, `_change`.

    A subclass sets its own fields between `super().__init__` and `_start`, which starts the thread.
    """

    def __init__(
        self, card: ModelCard, sparse: SparseHalf, *, knobs: WorkerKnobs | None, clock: Callable[[], float]
    ) -> None:
        self.card = card
        self._sparse = sparse
        self._knobs = knobs or WorkerKnobs()
        self._clock = clock
        self._busy_s = 0.0
        self._between = BatchBoundary()

    def _start(
        self,
        name: str,
        *,
        wait_for_room: Callable[[], None] = lambda: None,
        downstream: Callable[[], Downstream] = Downstream,
    ) -> None:
        """Start the thread; see `BatchLoop`."""
        self._loop: BatchLoop[RankJob] = BatchLoop(
            self._work,
            name=name,
            knobs=self._knobs,
            clock=self._clock,
            wait_for_room=wait_for_room,
            downstream=downstream,
        )
        self.heartbeat = self._loop.heartbeat

    @abstractmethod
    def _work(self, jobs: list[RankJob]) -> None:
        """Run a batch."""

    @property
    def alive(self) -> bool:
        """Whether the compute thread is running."""
        return self._loop.alive

    def submit(self, job: RankJob) -> None:
        """Queue the job for the next batch."""
        self._loop.put(job)

    def cancel(self, job: RankJob) -> None:
        """Mark the job as abandoned."""
        job.gone = True

    def reconfigure(self, knobs: WorkerKnobs) -> None:
        """Apply new knobs from the next batch on."""
        self._knobs = knobs
        self._loop.reconfigure(knobs)

    def prepare(self, change: PreparedUpdate) -> None:  # noqa: B027  # on purpose
        """Do nothing: others ask HNs for dense versions."""

    def apply_update(self, change: PreparedUpdate) -> None:
        """Apply the change between two batches."""
        with self._between:
            self._change(change)

    def _change(self, change: PreparedUpdate) -> None:
        change.write()
        self._sparse = change.sparse or self._sparse
        self.card = replace(self.card, version=change.version)

    def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        return None if self._loop.alive else "the compute thread has died"

    def metrics(self) -> Mapping[str, float]:
        """Return requests, batches and rows so far, those waiting now and refused, seconds of waiting and computing."""
        loop = self._loop
        return {
            "requests_total": loop.items,
            "batches_total": loop.batches,
            "rows_total": loop.rows,
            "waiting": loop.waiting,
            "refused_total": loop.refused,
            "queued_seconds_total": loop.queued_s,
            "busy_seconds_total": self._busy_s,
        }

    def stop(self, *, drain_s: float) -> None:
        """Reject new jobs, wait `drain_s` for the accepted ones, and fail the rest."""
        self._loop.close()
        if not self._loop.join(drain_s):
            self._loop.abandon(WorkerUnavailable("the worker was stopped"))

    def _answer(
        self,
        jobs: list[RankJob],
        outputs: Mapping[str, torch.Tensor],
        began_s: float,
        *,
        version: str,
        nbytes: int = 0,
        **timings_ms: float,
    ) -> None:
        """Deliver the outputs of a batch that began then; `nbytes` of it crossed."""
        self._loop.saw_ends(jobs)
        candidates = [job.request.candidates for job in jobs]
        total = sum(candidates)
        deliver_all(
            (
                job,
                RankAnswer(
                    outputs=mine,
                    timings=RankTimings(queued_ms=(began_s - job.came_s) * 1e3, **timings_ms),
                    bytes_crossed=nbytes * job.request.candidates // total,
                    version=version,
                ),
            )
            for job, mine in zip(jobs, cut(outputs, candidates), strict=True)
        )
