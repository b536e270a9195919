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
from collections.abc import Callable, Mapping
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


def compare(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    *,
    alpha: float = ALPHA,
    least_change: float = MIN_CHANGE,
    seed: int = 0,
) -> Comparison:
    """Compare two reports; see the module docstring. Raises `ReportError` if one is damaged, or its run invalid."""
    try:
        return _compare(before, after, alpha=alpha, least_change=least_change, rng=np.random.default_rng(seed))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(f"one of the reports is damaged or of another version: {error!r}") from error


def _compare(
    before: Mapping[str, Any], after: Mapping[str, Any], *, alpha: float, least_change: float, rng: np.random.Generator
) -> Comparison:
    for name, report in (("A", before), ("B", after)):
        if not report["valid"]:
            reasons = "; ".join(reason["text"] for reason in report["reasons"])
            raise ReportError(f"{name} is an invalid run ({reasons}): comparing it would mean nothing")
    pairs = _pairs(before, after)
    metrics = len(pairs) * (len(PERCENTS) + 2)
    changes = tuple(
        change
        for kind, (a, b) in pairs.items()
        for change in _changes(kind, a, b, level=alpha / max(metrics, 1), least_change=least_change, rng=rng)
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
    weights_a, weights_b = _resampled(a, rng), _resampled(b, rng)
    whole_a, whole_b = np.ones((1, a.judged.size)), np.ones((1, b.judged.size))

    def ratio(metric: str, of: Callable[[_ClassParts, Floats], Floats], *, more_is_better: bool) -> MetricChange:
        (x,), (y,) = of(a, whole_a), of(b, whole_b)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = of(b, weights_b) / of(a, weights_a) - 1.0
            change = float(np.float64(y) / x - 1.0)
        low, high = _interval(spread, level)
        sign = 1.0 if more_is_better else -1.0
        verdict = _verdict(change, low, high, least_change, sign)
        return MetricChange(kind=kind, metric=metric, before=float(x), after=float(y), change=change, low=low,
                      high=high, verdict=verdict)  # fmt: skip

    changes = [
        ratio(f"p{percent:g}_ms", lambda parts, w, p=percent: _percentile_ms(parts, w, p), more_is_better=False)  # type: ignore[misc]
        for percent in PERCENTS
        if min(a.counts.sum(), b.counts.sum()) * (1.0 - percent / 100.0) >= 1.0
    ]
    weights = (weights_a, weights_b)
    shares = (
        _share("attainment", kind, (a.good, b.good), (a, b), weights, level, min_change=0.01, sign=1.0),
        _share("error_rate", kind, (a.failed, b.failed), (a, b), weights, level, min_change=0.001, sign=-1.0),
    )
    return [*changes, *shares]


def _share(  # noqa: PLR0917 - a row of a table
    metric: str,
    kind: str,
    counts: tuple[Floats, Floats],
    parts: tuple[_ClassParts, _ClassParts],
    weights: tuple[Floats, Floats],
    level: float,
    *,
    min_change: float,
    sign: float,
) -> MetricChange:
    """Compare shares of the judged requests by difference, at least `min_change`: a ratio to zero is undefined."""
    x, y = (float(count.sum() / each.judged.sum()) for count, each in zip(counts, parts, strict=True))
    drawn_a, drawn_b = (
        weight @ count / np.maximum(weight @ each.judged, 1.0)
        for count, each, weight in zip(counts, parts, weights, strict=True)
    )
    low, high = _interval(drawn_b - drawn_a, level)
    verdict = _verdict(y - x, low, high, min_change, sign)
    return MetricChange(kind=kind, metric=metric, before=x, after=y, change=y - x, low=low, high=high, verdict=verdict)


def _verdict(change: float, low: float, high: float, min_change: float, sign: float) -> Verdict:
    if not (low > 0.0 or high < 0.0) or abs(change) < min_change:
        return "same"
    return "better" if change * sign > 0 else "worse"


def _resampled(parts: _ClassParts, rng: np.random.Generator) -> Floats:
    """Return how often each part is drawn, (RESAMPLES, S)."""
    n = parts.judged.size
    return rng.multinomial(n, np.full(n, 1.0 / n), size=RESAMPLES).astype(np.float64)


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
