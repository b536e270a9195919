"""Both halves of a model in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping

from plait_disagg.protocols import DenseHalf, SparseHalf
from plait_disagg.queue.jobs import RankJob
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.refresh.prepared_update import PreparedUpdate
from plait_disagg.values import ModelCard
from plait_disagg.workers.base import LocalCore


class WholeCore(LocalCore):
    """A core that computes both halves on its only thread."""

    def __init__(
        self, card: ModelCard, sparse: SparseHalf, dense: DenseHalf, *, knobs: WorkerKnobs | None = None
    ) -> None:
        """Start the core at once; it owns the halves from now on."""
        super().__init__(card, sparse, knobs=knobs, clock=time.monotonic)
        self._dense = dense
        self._start(f"rank {card.name}")

    def metrics(self) -> Mapping[str, float]:
        """Return the dense half's, too."""
        return {**super().metrics(), **self._dense.metrics()}

    def _change(self, change: PreparedUpdate) -> None:
        super()._change(change)
        self._dense = change.dense or self._dense

    def _work(self, jobs: list[RankJob]) -> None:
        with self._between:
            began_s = self._clock()
            crossing = self._sparse.run([job.request for job in jobs])
            looked_up_s = self._clock()
            outputs = self._dense.run(crossing, [job.request.candidates for job in jobs])
            ended_s = self._clock()
            self._busy_s += ended_s - began_s
            lookup_ms, dense_ms = (looked_up_s - began_s) * 1e3, (ended_s - looked_up_s) * 1e3
            self._answer(jobs, outputs, began_s, version=self.card.version, lookup_ms=lookup_ms, dense_ms=dense_ms)
