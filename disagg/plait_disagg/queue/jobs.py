"""A request on its way through a process: where it came from, and how its outcome gets back there.

A *core* (`WholeCore`, `CnCore`, `RemoteCore`) takes jobs; a *face* brings them: an event loop (`ranker.py`) or a fabric
channel (`front.py`). Any core works behind any face.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from plait_disagg.errors import BadInput, RankError
from plait_disagg.tables.protocols import BadId
from plait_disagg.values import ModelCard, RankAnswer, RankRequest
from plait_fabric import FabricError

__all__ = ["Core", "Outcome", "RankJob", "Sink", "as_rank_error", "settle"]

_log = logging.getLogger(__name__)

Outcome: TypeAlias = RankAnswer | RankError


class Sink(Protocol):
    """Where outcomes go."""

    def deliver(self, outcomes: Sequence[tuple[RankJob, Outcome]]) -> None:
        """Takes the outcomes of some of its jobs, each once. From any thread; never raises, hardly ever waits."""


@dataclass(slots=True, eq=False, kw_only=True)
class RankJob:
    """One request. ``ticket`` is its sink's own mark for it. ``gone``: nobody waits for it any more.

    ``alone``: it must not share a batch (again). ``tries`` counts how often it was lost with a worker.
    """

    request: RankRequest
    sink: Sink
    ticket: object
    came_s: float = field(default_factory=time.monotonic)
    alone: bool = False
    tries: int = 0
    gone: bool = False

    @property
    def rows(self) -> int:
        """How much of a batch it fills."""
        return self.request.candidates

    @property
    def due_s(self) -> float | None:
        """A moment of ``time.monotonic()``: its deadline."""
        return self.request.deadline_s

    @property
    def lost_s(self) -> float | None:
        """The same: it needs no work after its deadline."""
        return self.request.deadline_s

    def fail(self, error: RankError) -> None:
        """Tells its sink."""
        settle([(self, error)])


class Core(Protocol):
    """What ranks. All methods may be called from any thread."""

    @property
    def card(self) -> ModelCard:
        """What it takes and gives. Raises `Unavailable` while that is not known yet."""

    @property
    def alive(self) -> bool:
        """False when it must be replaced."""

    def submit(self, job: RankJob) -> None:
        """Takes the job: its sink hears of it once, unless it is gone. Raises `RankError` if it was not taken."""

    def cancel(self, job: RankJob) -> None:
        """Nobody waits for the job any more."""

    def ready(self) -> str | None:
        """None when a request would be answered now; else what is missing."""

    def metrics(self) -> Mapping[str, float]:
        """Counters and gauges by name."""

    def stop(self, *, drain_s: float) -> None:
        """Refuses new jobs, gives the accepted ones ``drain_s``, fails the rest. Blocks. Idempotent."""


def settle(outcomes: Iterable[tuple[RankJob, Outcome]]) -> None:
    """Brings each job's outcome to its sink: one delivery per sink."""
    by_sink: dict[Sink, list[tuple[RankJob, Outcome]]] = {}
    for job, outcome in outcomes:
        if not job.gone:
            by_sink.setdefault(job.sink, []).append((job, outcome))
    for sink, mine in by_sink.items():
        sink.deliver(mine)


def as_rank_error(error: Exception) -> RankError:
    """What a failure inside a half means to the caller. What nobody foresaw is logged, and told without its details."""
    if isinstance(error, RankError):
        return error
    if isinstance(error, BadId):
        return BadInput(str(error), param=error.table)
    if isinstance(error, FabricError):
        return RankError(f"the request does not fit the fabric: {error}")
    _log.error("a batch failed unexpectedly", exc_info=error)
    return RankError(f"internal error ({type(error).__name__}); the worker's log has the details")
