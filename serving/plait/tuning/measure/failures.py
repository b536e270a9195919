"""Classifies what went wrong in a trial, as the kind that a designer learns from. Pure: texts and counts in,
`TrialOutcome` out."""

from __future__ import annotations

from collections.abc import Collection

from plait.tuning.measure.load import LoadResult
from plait_autoconfig.jobs.exit_status import mentions_out_of_memory
from plait_autoconfig.values import FailureKind, TrialOutcome

_LOST = ("connect", "reset", "truncated")
"""Outcomes of requests whose server went away."""


def of_start(reason: str, *, oom_kills: int = 0) -> TrialOutcome:
    """Return the outcome of a configuration that Serve could not bring up."""
    kind = FailureKind.OUT_OF_MEMORY if oom_kills or mentions_out_of_memory(reason) else FailureKind.REFUSED_START
    return TrialOutcome.failed(kind, reason)


def of_load(
    loaded: LoadResult, *, died: Collection[str] = (), oom_kills: int = 0, log: str = ""
) -> TrialOutcome | None:
    """Return why a completed load is not a valid measurement, or None if it is.

    What happened to the replicas meanwhile: `died`, the deployments of processes that have ended; `oom_kills`, how many
    processes the kernel killed for lack of memory; `log`, what was logged.
    """
    errors = ", ".join(f"{count} {kind}" for kind, count in loaded.errors.items())
    if died:
        kind, fate = FailureKind.CRASH, "died"
        if oom_kills or mentions_out_of_memory(log):
            kind, fate = FailureKind.OUT_OF_MEMORY, "was killed for memory"
        who = ", ".join(sorted(set(died)))
        return TrialOutcome.failed(kind, f"a replica of {who} {fate} under load ({errors or 'no request failed'})")
    if loaded.guarded:
        kind = FailureKind.CRASH if "requests failed" in loaded.ended_early else FailureKind.TIME_OUT
        return TrialOutcome.failed(kind, loaded.ended_early)
    if loaded.timed_out:
        return TrialOutcome.failed(FailureKind.TIME_OUT, loaded.ended_early)
    if loaded.invalid:
        return TrialOutcome.failed(FailureKind.INVALID, loaded.invalid)
    if not loaded.metrics:
        kind = FailureKind.CRASH if any(name in loaded.errors for name in _LOST) else FailureKind.TIME_OUT
        return TrialOutcome.failed(kind, f"not one request was answered ({errors or 'nothing was sent'})")
    return None
