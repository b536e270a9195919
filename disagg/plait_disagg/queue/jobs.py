"""A request on its way through a process: where it came from, and how its outcome gets back there.

A *core* (`WholeCore`, `CnCore`, `RemoteCore`) takes jobs; a *face* brings them: an event loop (`ranker.py`) or a
fabric channel (`core_server.py`). Any core works behind any face.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from plait_disagg.errors import BadInput, RankError, WorkerUnavailable
from plait_disagg.tables.protocols import BadId, ShardLost
from plait_disagg.values import ModelCard, RankAnswer, RankRequest
from plait_fabric import FrameTooLarge, PoolExhausted

_log = logging.getLogger(__name__)

Outcome: TypeAlias = RankAnswer | RankError


class Sink(Protocol):
    """The receiver of outcomes."""

    def deliver(self, outcomes: Sequence[tuple[RankJob, Outcome]]) -> None:
        """Take the outcomes of some of its jobs, each once. Thread-safe; never raises, hardly ever waits."""


@dataclass(slots=True, eq=False, kw_only=True)
class RankJob:
    """One request. `ticket` is its sink's own mark for it; `gone` means that nobody is waiting for it any more.

    `alone`: it must not share a batch (again). `tries` counts how often it was lost with a worker.
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
    def request_ids(self) -> tuple[str, ...]:
        """Its request's id."""
        return (self.request.request_id,)

    @property
    def due_s(self) -> float | None:
        """Its deadline, in `time.monotonic()` seconds."""
        return self.request.deadline_s

    @property
    def lost_s(self) -> float | None:
        """The same as `due_s`: it needs no work after its deadline."""
        return self.request.deadline_s

    def fail(self, error: RankError) -> None:
        """Report the error to its sink."""
        deliver_all([(self, error)])


class Core(Protocol):
    """What ranks. All methods may be called from any thread."""

    @property
    def card(self) -> ModelCard:
        """What it takes and returns. Raises `WorkerUnavailable` while that is not yet known."""

    @property
    def alive(self) -> bool:
        """False when it must be replaced."""

    def submit(self, job: RankJob) -> None:
        """Accept the job; its sink receives one outcome, unless it is cancelled. Raises `RankError` if it was not
        accepted."""

    def cancel(self, job: RankJob) -> None:
        """Cancel a job that nobody is waiting for any more."""

    def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""

    def metrics(self) -> Mapping[str, float]:
        """Return counters and gauges by name."""

    def stop(self, *, drain_s: float) -> None:
        """Reject new jobs, give the accepted ones `drain_s`, and fail the rest. Blocks. Idempotent."""


def deliver_all(outcomes: Iterable[tuple[RankJob, Outcome]]) -> None:
    """Deliver each job's outcome to its sink, with one delivery per sink."""
    by_sink: dict[Sink, list[tuple[RankJob, Outcome]]] = {}
    for job, outcome in outcomes:
        if not job.gone:
            by_sink.setdefault(job.sink, []).append((job, outcome))
    for sink, mine in by_sink.items():
        sink.deliver(mine)


def as_rank_error(error: Exception) -> RankError:
    """Return what a failure inside a half means to the caller. Unexpected errors are logged and reported without
    details."""
    if isinstance(error, RankError):
        return error
    if isinstance(error, BadId):
        return BadInput(str(error), param=error.table)
    if isinstance(error, ShardLost):
        return WorkerUnavailable(f"part of the model's tables is away: {error}", retry_after_s=error.back_in_s)
    if isinstance(error, FrameTooLarge | PoolExhausted):
        _log.error("a request does not fit the fabric: %s", error)
        return RankError(f"the request cannot be passed on to a worker: {error}")
    _log.error("a batch failed unexpectedly", exc_info=error)
    return RankError(f"internal error ({type(error).__name__}); the worker's log has the details")
