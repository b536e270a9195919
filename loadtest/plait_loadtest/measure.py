"""From a run's records to what is reported. Pure: numpy in, frozen values out. `judging` defines what counts.

* `errors` counts outcomes by name. `not_sent` and `unfinished` are errors; `cancelled` and `interrupted` are listed,
  but are not errors and are excluded from the denominators.
* All latencies are of successes, but for `latency_all_ms`: a server that fails fast is not quick.
* Goodput is good responses per second of the measured time; attainment is good / judged.
* `offered_per_s` is what the schedule requested; `achieved_per_s` counts successes that arrived in the measured time.

Symbols: N = records of the run. Times are nanoseconds inside, milliseconds in results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from plait_loadtest import histogram
from plait_loadtest.confidence import is_refuted
from plait_loadtest.histogram import Histogram
from plait_loadtest.judging import Ints, Judged, Mask, MeasuredWindow, judge_records, percentile_of, slo_of, slos_of
from plait_loadtest.scenario import Scenario, Slo
from plait_loadtest.values import Records, RequestOutcome, RunResult

TOTAL = "total"
SLICES = 32  # parts of the measured time whose histograms are kept: what `compare` resamples
COMMONEST = 3  # reasons of each class of errors that are reported
PERCENTS = (50.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds of `n` values; nan where there are none. `max` and `mean` are exact, others within 0.05 %."""

    n: int
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """How many requests failed for one reason."""

    count: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimeSlice:
    """A part of the measured time, by scheduled time."""

    histogram: Histogram
    judged: int
    good: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassSummary:
    """A class of requests, or all of them (`name` is `TOTAL`). The module docstring defines what is counted.

    `requests` were scheduled, `judged` of them count for attainment and `error_rate`. `slo_met`: None if there is no
    SLO or too few requests to tell. `failures`: the commonest reasons of each of the `errors`. `service_ms` counts from
    sending and hides queueing: for comparison only. `blamed`: judged, and not good by that account either.
    """

    name: str
    requests: int
    judged: int
    succeeded: int
    good: int
    blamed: int
    offered_per_s: float
    achieved_per_s: float
    goodput_per_s: float
    error_rate: float
    errors: Mapping[str, int]
    failures: Mapping[str, tuple[FailureCount, ...]]
    slo: Slo | None
    slo_percentile: float | None
    attainment: float | None
    slo_met: bool | None
    latency_ms: Percentiles
    latency_all_ms: Percentiles
    first_byte_ms: Percentiles
    first_part_ms: Percentiles
    service_ms: Percentiles
    server_ms: Percentiles
    histogram: Histogram
    slices: tuple[TimeSlice, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunSummary:
    """A whole run. `seconds`: the measured time."""

    total: ClassSummary
    classes: tuple[ClassSummary, ...]
    send_lag_ms: Percentiles
    echo_ms: Percentiles
    lag_limit_ms: float
    reasons: tuple[Reason, ...]
    seconds: float
    images_per_s: float | None

    @property
    def valid(self) -> bool:
        """Whether the numbers can be trusted; False: they reflect the generator, or chance, as much as the server."""
        return not self.reasons


def summarise(result: RunResult, scenario: Scenario) -> RunSummary:
    """Return everything that is reported about a run."""
    run = judge_records(result, scenario)
    kinds = run.records["kind"]
    classes = tuple(
        _class(item.name, run, run.measured & (kinds == kind), slo_of(scenario, item.name), item.api)
        for kind, item in enumerate(scenario.mix)
    )
    total = _total(run, scenario, classes)
    echo = result.echo
    lag = _between(run.records[run.measured], "scheduled_ns", "sent_ns")
    echo_ms = of_durations(echo.latency_ns[(echo.scheduled_ns >= run.window.start_ns) & (echo.latency_ns >= 0)])
    limit_ms = lag_limit(scenario)
    return RunSummary(
        total=total,
        classes=classes,
        send_lag_ms=lag,
        echo_ms=echo_ms,
        lag_limit_ms=limit_ms,
        reasons=_reasons(result, total, lag_ms=lag.p99, echo_ms=echo_ms.p99, limit_ms=limit_ms),
        seconds=run.window.seconds,
        images_per_s=_images_per_s(run) if scenario.target.api == "images" else None,
    )


def lag_limit(scenario: Scenario) -> float:
    """Return the limit of the p99 of send lag and of the control request, in ms: max(5 ms, 5 % of the tightest SLO)."""
    return max(5.0, 0.05 * min((slo.latency_ms for _, slo in slos_of(scenario)), default=0.0))


def min_requests(percentile: float) -> int:
    """Return the fewest requests for which a percentile is more than just their maximum: 1 / (1 - p), 100 for a p99."""
    return round(1.0 / (1.0 - percentile / 100.0))


def requests_to_judge(scenario: Scenario) -> int:
    """Return how many requests are enough to judge the SLO of each class, if all were of it."""
    return max((min_requests(percentile_of(slo, item.api)) for item, slo in slos_of(scenario)), default=1)


def of_durations(values_ns: Ints) -> Percentiles:
    """Return percentiles of int64 nanoseconds, any number of them."""
    return _percentiles(histogram.of_ns(values_ns), values_ns)


def _percentiles(counted: Histogram, values_ns: Ints) -> Percentiles:
    p50, p90, p95, p99, p99_9 = (value / 1e6 for value in counted.percentiles_ns(PERCENTS))
    largest, mean = (values_ns.max(), values_ns.mean()) if values_ns.size else (np.nan, np.nan)
    return Percentiles(
        n=counted.n, p50=p50, p90=p90, p95=p95, p99=p99, p99_9=p99_9, max=float(largest) / 1e6, mean=float(mean) / 1e6
    )


def _class(name: str, run: Judged, own: Mask, slo: Slo | None, api: str) -> ClassSummary:
    """Summarise a class; `own` (N,): its measured requests."""
    records, waited_ns = run.records, run.waited_ns
    answered, ok = own & run.answered, own & run.ok
    judged, good, failed = (int((own & which).sum()) for which in (run.judged, run.good, run.failed))
    counted = histogram.of_ns(waited_ns[ok])
    percentile = None if slo is None else percentile_of(slo, api)
    attainment = None if slo is None or not judged else good / judged
    seconds = run.window.seconds
    return ClassSummary(
        name=name,
        requests=int(own.sum()),
        judged=judged,
        succeeded=int(ok.sum()),
        good=good,
        blamed=int((own & run.blamed).sum()),
        offered_per_s=int(own.sum()) / seconds,
        achieved_per_s=int(_came(run, own).sum()) / seconds,
        goodput_per_s=good / seconds,
        error_rate=failed / judged if judged else 0.0,
        errors=_errors(records["outcome"][own]),
        failures=_failures(records[own & run.failed], run.whys),
        slo=slo,
        slo_percentile=percentile,
        attainment=attainment,
        slo_met=_met(attainment, percentile, judged, good),
        latency_ms=_percentiles(counted, waited_ns[ok]),
        latency_all_ms=of_durations(waited_ns[answered]),
        first_byte_ms=_between(records[ok], "scheduled_ns", "first_byte_ns"),
        first_part_ms=_between(records[ok], "scheduled_ns", "first_part_ns"),
        service_ms=_between(records[ok], "sent_ns", "done_ns"),
        server_ms=_server_ms(records[ok]),
        histogram=counted,
        slices=_slices(run, own),
    )


def _total(run: Judged, scenario: Scenario, classes: tuple[ClassSummary, ...]) -> ClassSummary:
    """Summarise all requests together: met if every class that can be judged meets its own SLO."""
    shared = {(each.slo, each.slo_percentile) for each in classes}
    slo = classes[0].slo if len(shared) == 1 else None
    total = _class(TOTAL, run, run.measured, slo, scenario.mix[0].api)
    verdicts = [each.slo_met for each in classes if each.slo_met is not None]
    if any(each.slo for each in classes):
        attainment = total.good / total.judged if total.judged else None
        return replace(total, attainment=attainment, slo_met=all(verdicts) if verdicts else total.slo_met)
    return total


def _came(run: Judged, own: Mask) -> Mask:
    """Return the successes of the same classes that arrived within the measured time, warm-up requests included."""
    records = run.records
    kinds = np.unique(records["kind"][own])
    return np.asarray(
        (records["outcome"] == RequestOutcome.OK)
        & run.window.holds(records["done_ns"])
        & np.isin(records["kind"], kinds)
    )


def _images_per_s(run: Judged) -> float:
    """Count what came within the measured time, also of answers that lack some of what was asked."""
    return float(run.records["images"][run.window.holds(run.records["done_ns"])].sum()) / run.window.seconds


def _errors(outcome: npt.NDArray[np.uint8]) -> dict[str, int]:
    counts = np.bincount(outcome, minlength=len(RequestOutcome))
    return {
        kind.name.lower(): int(counts[kind])
        for kind in RequestOutcome
        if kind is not RequestOutcome.OK and counts[kind]
    }


def _failures(failed: Records, whys: Sequence[str]) -> dict[str, tuple[FailureCount, ...]]:
    found: dict[str, tuple[FailureCount, ...]] = {}
    for outcome in np.unique(failed["outcome"]):
        numbers, counts = np.unique(failed["why"][failed["outcome"] == outcome], return_counts=True)
        known = [
            FailureCount(count=count, why=whys[number])
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
            if number
        ]
        commonest = sorted(known, key=lambda each: (-each.count, each.why))[:COMMONEST]
        if commonest:
            found[RequestOutcome(outcome).name.lower()] = tuple(commonest)
    return found


def _met(attainment: float | None, percentile: float | None, judged: int, good: int) -> bool | None:
    """Return whether the SLO was met. Too few requests cannot show that it was, but can show that it was not."""
    if attainment is None or percentile is None:
        return None
    share = percentile / 100.0
    if judged < min_requests(percentile):
        return False if is_refuted(good, judged - good, share) else None
    return attainment >= share


def _between(own: Records, start: str, end: str) -> Percentiles:
    """Return the time between two instants, of the requests that have both."""
    came = own[(own[start] >= 0) & (own[end] >= 0)]
    return of_durations(came[end] - came[start])


def _server_ms(own: Records) -> Percentiles:
    said = own["server_ms"].astype(np.float64)
    said = said[(said >= 0.0) & (said <= histogram.HIGHEST_NS / 1e6)]  # a server may say anything, or nothing: nan
    return of_durations(np.rint(said * 1e6).astype(np.int64))


def _slices(run: Judged, own: Mask) -> tuple[TimeSlice, ...]:
    which = slice_of(run.records["scheduled_ns"], run.window)
    return tuple(
        TimeSlice(
            histogram=histogram.of_ns(run.waited_ns[here & run.ok]),
            judged=int((here & run.judged).sum()),
            good=int((here & run.good).sum()),
            failed=int((here & run.failed).sum()),
        )
        for here in (own & (which == i) for i in range(SLICES))
    )


def slice_of(scheduled_ns: Ints, window: MeasuredWindow) -> Ints:
    """Return which of the `SLICES` equal parts of the measured time each instant lies in, int64 (N,)."""
    part = (scheduled_ns - window.start_ns) * SLICES // max(window.end_ns - window.start_ns, 1)
    return np.clip(part, 0, SLICES - 1)


Code = Literal["send_lag", "echo", "limit", "interrupted", "too_few", "generator", "abandoned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a run is invalid. `code`: for programs, `text`: one clause for people."""

    code: Code
    text: str


def _reasons(
    result: RunResult, total: ClassSummary, *, lag_ms: float, echo_ms: float, limit_ms: float
) -> tuple[Reason, ...]:
    """Return why the run is invalid; empty: it is valid. `lag_ms`, `echo_ms`: p99s, nan where nothing was measured."""
    more = "" if result.limits else " (more --processes may help)"
    limits = "; ".join(result.limits)
    if not_sent := total.errors.get("not_sent", 0):
        limits = limits or f"{not_sent} requests were not sent"
    machine = f"this machine was slow: the control request's p99 is {echo_ms:.3g} ms, limit {limit_ms:.3g} ms"
    found: tuple[tuple[Code, bool, str], ...] = (
        ("interrupted", result.interrupted and not result.abandoned, "it was interrupted"),
        ("abandoned", bool(result.abandoned), f"it was ended early: {result.abandoned}"),
        (
            "send_lag",
            lag_ms > limit_ms,  # false for nan
            f"requests left late: p99 send lag {lag_ms:.3g} ms, limit {limit_ms:.3g} ms{more}",
        ),
        ("echo", echo_ms > limit_ms, machine),
        ("limit", bool(limits), limits),
        ("generator", bool(result.problems), "; ".join(result.problems)),
        ("too_few", total.judged == 0, "not one request ran to its end"),
    )
    return tuple(Reason(code=code, text=text) for code, is_so, text in found if is_so)
