"""The judgement of every record: whether it is measured, its latency from the scheduled time, whether it was good.

What counts. The *measured* requests are those scheduled after the warm-up and, if the run was interrupted, before
that.
* Latency runs from the scheduled time to the last byte, for every measured request that got an answer, good or bad
  (`ANSWERED`), and for what never ended to the moment it was given up. Connections refused or reset have no latency.
* A request is *good* if it succeeded within its class's SLO. Without an SLO every success is good.
* *Judged* are all except those whose end is unknown: cancelled on purpose, or in flight when the run was ended early.
  The latter are judged, and missed, if they had already waited longer than their SLO. What had not ended when the drain
  time was over is an error like any other.

Symbols: N = records of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plait_loadtest.scenario import MixClass, Scenario, Slo
from plait_loadtest.values import Records, RequestOutcome, RunResult

ANSWERED = (
    RequestOutcome.OK, RequestOutcome.TIMEOUT, RequestOutcome.TRUNCATED, RequestOutcome.GARBLED,
    RequestOutcome.HTTP_4XX, RequestOutcome.HTTP_5XX, RequestOutcome.HTTP_OTHER, RequestOutcome.CHECK,
    RequestOutcome.UNFINISHED,
)  # fmt: skip

Mask = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredWindow:
    """The measured time, in nanoseconds of the run."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """The length of the window in seconds."""
        return max(self.end_ns - self.start_ns, 1) / 1e9

    def holds(self, instants_ns: Ints) -> Mask:
        """Return which instants fall into it, bool (N,)."""
        return np.asarray((instants_ns >= self.start_ns) & (instants_ns < self.end_ns))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Judged:
    """The judged records; see the module docstring. All arrays are (N,), in order of the records' `index`; masks hold
    measured ones only.

    `waited_ns` is meaningful where `answered`. `failed`: judged, and no success. `blamed`: judged, and not good even
    when counted from the time of sending, so that the generator has no part in it.
    """

    records: Records
    window: MeasuredWindow
    waited_ns: Ints
    measured: Mask
    answered: Mask
    ok: Mask
    good: Mask
    judged: Mask
    failed: Mask
    blamed: Mask
    whys: tuple[str, ...]


def judge_records(result: RunResult, scenario: Scenario) -> Judged:
    """Judge every record of a run."""
    records = np.sort(result.records, order="index")
    window = window_of(records, scenario, result)
    outcome, ended = records["outcome"], records["done_ns"] >= 0
    waited_ns = records["done_ns"] - records["scheduled_ns"]
    latest_ns = _latest_ns(scenario)[records["kind"]]
    measured = np.asarray(~records["warm_up"])
    unknown = outcome == RequestOutcome.INTERRUPTED
    if result.interrupted:
        measured &= ~(unknown & (records["scheduled_ns"] >= window.end_ns))
    ok = measured & (outcome == RequestOutcome.OK)
    already_late = unknown & ended & (waited_ns > latest_ns)
    judged = measured & (outcome != RequestOutcome.CANCELLED) & (~unknown | already_late)
    served_ns = records["done_ns"] - np.maximum(records["sent_ns"], records["scheduled_ns"])
    in_time = np.isin(outcome, (RequestOutcome.OK, RequestOutcome.INTERRUPTED)) & (served_ns <= latest_ns)
    return Judged(
        records=records,
        window=window,
        waited_ns=waited_ns,
        measured=measured,
        answered=measured & np.isin(outcome, ANSWERED) & ended,
        ok=ok,
        good=ok & (waited_ns <= latest_ns),
        judged=judged,
        failed=judged & ~ok,
        blamed=judged & ~in_time & (outcome != RequestOutcome.NOT_SENT),
        whys=result.whys,
    )


def window_of(records: Records, scenario: Scenario, result: RunResult) -> MeasuredWindow:
    """Return the measured time: after the warm-up, for the scenario's duration or until its last scheduled request.

    A run of `count` requests ends a mean gap after its last one, so that N requests at R per second take N / R.
    An interrupted run ends when it was interrupted.
    """
    start_ns = int(scenario.warm_up_s * 1e9)
    end_ns = start_ns + int(scenario.duration_s * 1e9)
    own = records["scheduled_ns"][~records["warm_up"]]
    if scenario.count is not None and own.size > 1 and own.max() > own.min():
        start_ns, last_ns = int(own.min()), int(own.max())
        end_ns = last_ns + (last_ns - start_ns) // (own.size - 1)
    if result.interrupted:
        end_ns = min(end_ns, max(int(result.wall_s * 1e9), start_ns))
    return MeasuredWindow(start_ns=start_ns, end_ns=end_ns)


def slo_of(scenario: Scenario, name: str) -> Slo | None:
    """Return the SLO of a class: its own, or the scenario's."""
    return scenario.slos.get(name, scenario.slo)


def slos_of(scenario: Scenario) -> list[tuple[MixClass, Slo]]:
    """Return the classes that have an SLO, each with it."""
    return [(item, slo) for item in scenario.mix if (slo := slo_of(scenario, item.name)) is not None]


def percentile_of(slo: Slo, api: str) -> float:
    """Return the percentage of a class that must be good; images default to 95 (99 % confidence in a p99 needs 459)."""
    if slo.percentile is not None:
        return slo.percentile
    return 95.0 if api == "images" else 99.0


def _latest_ns(scenario: Scenario) -> npt.NDArray[np.float64]:
    slos = [slo_of(scenario, item.name) for item in scenario.mix]
    return np.array([np.inf if slo is None else slo.latency_ms * 1e6 for slo in slos])
