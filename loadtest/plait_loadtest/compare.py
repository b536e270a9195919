"""What got better or worse between two reports, beyond noise.

The reports hold the latency histograms of equal parts of the measured time. Successive requests share the same
queue, so single requests must not be resampled as if they were independent: whole parts are (a block bootstrap). A
change counts if the bootstrap interval of B / A excludes "no change" and the change is at least `least_change`.

The probability that any of the intervals of all metrics is wrong is about `ALPHA`: each has `ALPHA / metrics`. (The
bootstrap of 32 parts is approximate: of 150 pairs of runs of one simulated queue, 1 was called worse, where 0.75 are
expected.) Noise between runs that does not show within a run (another host, a warmer cache) is in no interval: that
is what `least_change` is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from plait_loadtest import histogram
from plait_loadtest.errors import ReportError
from plait_loadtest.report.document import rounded
from plait_report.page import number

ALPHA = 0.01
MIN_CHANGE = 0.05
RESAMPLES = 2000
PERCENTS = (50.0, 95.0, 99.0)
FEWEST = 30  # requests on both sides below which a class is not compared

Floats = npt.NDArray[np.float64]
Verdict = Literal["better", "worse", "same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricChange:
    """One metric of one class. `low` to `high`: interval of the change B / A - 1 (shares: B - A)."""

    kind: str
    metric: str
    before: float
    after: float
    change: float
    low: float
    high: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A comparison of two reports. `differences`: settings in which the scenarios differ, as dotted names."""

    changes: tuple[MetricChange, ...]
    differences: tuple[str, ...]

    @property
    def regressed(self) -> bool:
        """Whether anything got worse."""
        return any(change.verdict == "worse" for change in self.changes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ClassParts:
    """A class in S parts: `counts` (S, K) of requests by bucket `middle_ns` (K,); others (S,)."""

    middle_ns: Floats
    counts: Floats
    judged: Floats
    good: Floats
    failed: Floats


def read(path: Path) -> Mapping[str, Any]:
    """Read a report written by `--json`. Raises `ReportError`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{path} cannot be read as a report: {error}") from error
    if not isinstance(report, dict) or not str(report.get("format", "")).startswith("plait-loadtest/1"):
        raise ReportError(f"{path} is no report of plait loadtest run --json")
    return report


def compare(before: Mapping[str, Any], after: Mapping[str, Any], *, least_change: float = MIN_CHANGE) -> Comparison:
    """Compare two reports; see the module docstring. Raises `ReportError` if one is damaged, or its run invalid."""
    try:
        return _compare(before, after, least_change)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(f"one of the reports is damaged or of another version: {error!r}") from error


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], least_change: float) -> Comparison:
    for name, report in (("A", before), ("B", after)):
        if not report["valid"]:
            reasons = "; ".join(reason["text"] for reason in report["reasons"])
            raise ReportError(f"{name} is an invalid run ({reasons}): comparing it would mean nothing")
    pairs = _pairs(before, after)
    rng, metrics = np.random.default_rng(0), len(pairs) * (len(PERCENTS) + 2)
    changes = tuple(
        change
        for kind, (a, b) in pairs.items()
        for change in _changes(kind, a, b, level=ALPHA / max(metrics, 1), least_change=least_change, rng=rng)
    )
    return Comparison(changes=changes, differences=tuple(differences(before["scenario"], after["scenario"])))


def _pairs(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[_ClassParts, _ClassParts]]:
    """Return the classes that both have, with enough requests; the total alone if there is only one class."""
    shared = [name for name in before["classes"] if name in after["classes"]]
    found = {"total": tuple(_parts(report["histograms"]["total"]) for report in (before, after))}
    for name in shared if len(before["classes"]) > 1 or len(after["classes"]) > 1 else ():
        found[name] = tuple(_parts(report["histograms"]["classes"][name]) for report in (before, after))
    pairs = {name: (a, b) for name, (a, b) in found.items() if min(a.judged.sum(), b.judged.sum()) >= FEWEST}
    if not pairs:
        raise ReportError(f"fewer than {FEWEST} requests in every class: nothing can be compared")
    return pairs


def _parts(stored: Mapping[str, Any]) -> _ClassParts:
    parts = [histogram.decoded(text) if text else histogram.EMPTY for text in stored["parts"]]
    buckets = np.unique(np.concatenate([part.bucket for part in parts]))
    counts = np.zeros((len(parts), buckets.size))
    for row, part in enumerate(parts):
        counts[row, np.searchsorted(buckets, part.bucket)] = part.count
    return _ClassParts(
        middle_ns=histogram.middles_ns(buckets),
        counts=counts,
        judged=np.array(stored["judged"], dtype=np.float64),
        good=np.array(stored["good"], dtype=np.float64),
        failed=np.array(stored["failed"], dtype=np.float64),
    )


def _changes(
    kind: str, a: _ClassParts, b: _ClassParts, *, level: float, least_change: float, rng: np.random.Generator
) -> list[MetricChange]:
    sides = ((a, _resampled(a, rng)), (b, _resampled(b, rng)))
    changes: list[MetricChange] = []

    def note(metric: str, values: Sequence[Floats], moved: Floats, least: float, *, sign: float) -> None:
        """Note a change; `moved` (RESAMPLES + 1,): first of what was seen, then of what was drawn. `sign`: of a better
        one."""
        change, (low, high) = float(moved[0]), _interval(moved[1:], level)
        verdict: Verdict = "better" if change * sign > 0 else "worse"
        if not (low > 0.0 or high < 0.0) or abs(change) < least:
            verdict = "same"
        before, after = (float(each[0]) for each in values)
        changes.append(
            MetricChange(
                kind=kind, metric=metric, before=before, after=after, change=change, low=low, high=high, verdict=verdict
            )
        )

    for percent in PERCENTS:
        if min(a.counts.sum(), b.counts.sum()) * (1.0 - percent / 100.0) >= 1.0:
            values = [_percentile_ms(parts, weights, percent) for parts, weights in sides]
            with np.errstate(divide="ignore", invalid="ignore"):
                moved = values[1] / values[0] - 1.0
            note(f"p{percent:g}_ms", values, moved, least_change, sign=-1.0)
    # Shares of the judged requests by difference: a ratio to zero is undefined.
    for metric, count, least, sign in (("attainment", "good", 0.01, 1.0), ("error_rate", "failed", 0.001, -1.0)):
        values = [weights @ getattr(parts, count) / np.maximum(weights @ parts.judged, 1.0) for parts, weights in sides]
        note(metric, values, values[1] - values[0], least, sign=sign)
    return changes


def _resampled(parts: _ClassParts, rng: np.random.Generator) -> Floats:
    """Return how often each part counts, (RESAMPLES + 1, S): once in the first row, then as often as it is drawn."""
    n = parts.judged.size
    return np.vstack([np.ones(n), rng.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES)])


def _percentile_ms(parts: _ClassParts, weights: Floats, percent: float) -> Floats:
    """Return the nearest-rank percentile of each row of `weights` (R, S), in milliseconds, (R,)."""
    upto = np.cumsum(weights @ parts.counts, axis=1)
    rank = np.maximum(np.ceil(percent / 100.0 * upto[:, -1:]), 1.0)
    return np.asarray(parts.middle_ns[np.minimum((upto < rank).sum(axis=1), parts.middle_ns.size - 1)] / 1e6)


def _interval(values: Floats, level: float) -> tuple[float, float]:
    values = values[np.isfinite(values)]
    if not values.size:
        return float("-inf"), float("inf")
    low, high = np.quantile(values, [level / 2.0, 1.0 - level / 2.0])
    return float(low), float(high)


def differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of the leaves that differ, ignoring the report's own path and name."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = dict.fromkeys([*a, *b])
        return [found for name in names for found in differences(a.get(name), b.get(name), f"{prefix}{name}.")]
    return [] if a == b else [prefix.rstrip(".")]


# ---- as text ---------------------------------------------------------------------------------------------------------


def as_document(outcome: Comparison) -> str:
    """Return one JSON document: `regressed`, `changes`, `differences`."""
    changes = [{key: _plain(value) for key, value in asdict(change).items()} for change in outcome.changes]
    document = {"regressed": outcome.regressed, "changes": changes, "differences": list(outcome.differences)}
    return json.dumps(document, indent=1)


def as_text(outcome: Comparison) -> str:
    """Return a text: first what changed, then what did not."""
    lines = [_line(change) for change in sorted(outcome.changes, key=lambda change: change.verdict == "same")]
    if outcome.differences:
        lines.append(f"the scenarios differ in {', '.join(outcome.differences)}")
    lines.append("got worse" if outcome.regressed else "no regression beyond noise")
    return "\n".join(lines)


def _line(change: MetricChange) -> str:
    what = f"{change.kind} {change.metric}"
    values = f"{number(change.before)} -> {number(change.after)}"
    unit = "" if change.metric in ("attainment", "error_rate") else " %"
    scale = 100.0 if unit else 1.0
    moved = f"{change.change * scale:+.3g}{unit} ({change.low * scale:+.3g} to {change.high * scale:+.3g})"
    return f"{change.verdict:<7} {what:<28} {values:<24} {moved}"


def _plain(value: Any) -> Any:
    return rounded(value) if isinstance(value, float) else value
