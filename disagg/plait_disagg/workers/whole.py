"""Both halves of a model in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from plait_disagg.errors import WorkerUnavailable
from plait_disagg.protocols import DenseHalf, SparseHalf
from plait_disagg.queue.batch import cut
from plait_disagg.queue.batch_boundary import BatchBoundary
from plait_disagg.queue.jobs import RankJob, deliver_all
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.queue.loop import BatchLoop
from plait_disagg.refresh.prepared_update import PreparedUpdate
from plait_disagg.values import ModelCard, RankAnswer, RankTimings
from plait_disagg.workers.ranker import CoreRanker


class WholeCore:
    """A core that computes both halves on its only thread."""

    def __init__(
        self,
        card: ModelCard,
        sparse: SparseHalf,
        dense: DenseHalf,
        *,
        knobs: WorkerKnobs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the core at once; it owns the halves from now on."""
        self._card = card
        self._sparse = sparse
        self._dense = dense
        self._clock = clock
        self._busy_s = 0.0
        self._between = BatchBoundary()
        self._loop: BatchLoop[RankJob] = BatchLoop(
            self._work, name=f"rank {card.name}", knobs=knobs or WorkerKnobs(), clock=clock
        )
        self.heartbeat = self._loop.heartbeat

    @property
    def card(self) -> ModelCard:
        """The model's card."""
        return self._card

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
        self._loop.reconfigure(knobs)

    def prepare(self, change: PreparedUpdate) -> None:
        """Do nothing: no dense version is requested from a whole worker."""

    def apply_update(self, change: PreparedUpdate) -> None:
        """Replace both halves at once, between two batches."""
        self._between.change(lambda: self._apply_update(change))

    def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        return None if self._loop.alive else "the compute thread has died"

    def metrics(self) -> Mapping[str, float]:
        """Return `requests`, `batches` and `rows` so far, `waiting` now, seconds of computing, and the dense half's."""
        loop = self._loop
        return {
            "requests_total": loop.items,
            "batches_total": loop.batches,
            "rows_total": loop.rows,
            "waiting": loop.waiting,
            "refused_total": loop.refused,
            "queued_seconds_total": loop.queued_s,
            "busy_seconds_total": self._busy_s,
            **self._dense.metrics(),
        }

    def stop(self, *, drain_s: float) -> None:
        """Reject new jobs, wait `drain_s` for the accepted ones, and fail the rest."""
        self._loop.close()
        if not self._loop.join(drain_s):
            self._loop.abandon(WorkerUnavailable("the worker was stopped"))

    def _apply_update(self, change: PreparedUpdate) -> None:
        change.write()
        self._sparse = change.sparse or self._sparse
        self._dense = change.dense or self._dense
        self._card = replace(self._card, version=change.version)

    def _work(self, jobs: list[RankJob]) -> None:
        with self._between.batch():
            self._rank(jobs)

    def _rank(self, jobs: list[RankJob]) -> None:
        clock = self._clock
        candidates = [job.request.candidates for job in jobs]
        began_s = clock()
        crossing = self._sparse.run([job.request for job in jobs])
        looked_up_s = clock()
        outputs = self._dense.run(crossing, candidates)
        ended_s = clock()
        self._busy_s += ended_s - began_s
        self._loop.saw_ends(jobs)
        deliver_all(
            (
                job,
                RankAnswer(
                    outputs=mine,
                    timings=RankTimings(
                        queued_ms=(began_s - job.came_s) * 1e3,
                        lookup_ms=(looked_up_s - began_s) * 1e3,
                        dense_ms=(ended_s - looked_up_s) * 1e3,
                    ),
                    version=self._card.version,
                ),
            )
            for job, mine in zip(jobs, cut(outputs, candidates), strict=True)
        )


class WholeRanker(CoreRanker):
    """A `Ranker` that computes in this process."""

    def __init__(
        self, card: ModelCard, sparse: SparseHalf, dense: DenseHalf, *, knobs: WorkerKnobs | None = None
    ) -> None:
        """Start a `WholeCore` with these arguments."""
        super().__init__(WholeCore(card, sparse, dense, knobs=knobs))
