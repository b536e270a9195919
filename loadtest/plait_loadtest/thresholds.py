"""Thresholds: `p99_ms < 250`, `error_rate <= 0.01`, `images.p95_ms < 500`. A missed one results in exit code 99.

Latencies are of successful requests, unless `latency_all_ms.p99` and the like are named. There is no verdict (exit
code 1) on an invalid run, whose numbers prove nothing; on a number that does not exist (no successes: no p99); and on a
percentile of so few values that it is only their maximum (fewer than 100 for a p99).
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plait_loadtest.errors import ScenarioError
from plait_loadtest.measure import ClassSummary, RunSummary, min_requests

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

_PERCENTS = ("p50", "p90", "p95", "p99", "p99_9", "max", "mean")  # fields of `Percentiles`

# By name: the field of a `ClassSummary` or of the `RunSummary`, and what of its percentiles; a number has none.
OF_A_CLASS: dict[str, tuple[str, str]] = {
    **{f"{each.replace('_', '.')}_ms": ("latency_ms", each) for each in _PERCENTS},
    **{f"latency_all_ms.{each.replace('_', '.')}": ("latency_all_ms", each) for each in _PERCENTS},
    **{f"{of}_{each}_ms": (f"{of}_ms", each) for of in ("first_byte", "first_part") for each in ("p95", "p99")},
    "server_p99_ms": ("server_ms", "p99"),
    **{
        each: (each, "")
        for each in ("offered_per_s", "achieved_per_s", "goodput_per_s", "error_rate", "attainment", "requests")
    },
}
OF_THE_RUN: dict[str, tuple[str, str]] = {
    "send_lag_p99_ms": ("send_lag_ms", "p99"),
    "echo_p99_ms": ("echo_ms", "p99"),
    "images_per_s": ("images_per_s", ""),
}
_NAMES = "|".join(re.escape(name) for name in sorted([*OF_A_CLASS, *OF_THE_RUN], key=len, reverse=True))
_PATTERN = re.compile(
    rf"\s*(?:(?P<kind>[A-Za-z0-9][A-Za-z0-9._-]*)\.)?(?P<metric>{_NAMES})\s*(?P<sign><=|>=|<|>)\s*(?P<bound>\S+)\s*"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """A parsed threshold. `text`: as written. `kind`: name of a request class, None: the whole run."""

    text: str
    metric: str
    sign: str
    bound: float
    kind: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`value`: what was measured, None: nothing was. `held`: None if the run cannot tell; `why`, else empty."""

    threshold: Threshold
    value: float | None
    held: bool | None
    why: str = ""


def parse(text: str, *, kinds: Sequence[str]) -> Threshold:
    """Parse one threshold. `kinds`: the request classes. Raises `ScenarioError` that lists the valid names."""
    found = _PATTERN.fullmatch(text)
    bound = None if found is None else _number(found["bound"])
    if found is None or bound is None:
        raise ScenarioError(
            f"threshold {text!r}: write METRIC < NUMBER with <, <=, > or >=, where METRIC is one of "
            f"{', '.join([*OF_A_CLASS, *OF_THE_RUN])}, or CLASS.METRIC"
        )
    kind, metric = found["kind"], found["metric"]
    if kind is not None and kind not in kinds:
        raise ScenarioError(f"threshold {text!r}: there is no class {kind!r}; there is: {', '.join(kinds)}")
    if kind is not None and metric in OF_THE_RUN:
        raise ScenarioError(f"threshold {text!r}: {metric} is measured for the whole run only")
    return Threshold(text=text.strip(), metric=metric, sign=found["sign"], bound=bound, kind=kind)


def parse_all(texts: Iterable[str], *, kinds: Sequence[str]) -> tuple[Threshold, ...]:
    """Parse several thresholds; see `parse`."""
    return tuple(parse(text, kinds=kinds) for text in texts)


def check(thresholds: Iterable[Threshold], summary: RunSummary) -> tuple[Verdict, ...]:
    """Check the thresholds against a run; see the module docstring for invalid runs."""
    return tuple(_check(threshold, summary) for threshold in thresholds)


def _check(threshold: Threshold, summary: RunSummary) -> Verdict:
    holder: object = summary if threshold.metric in OF_THE_RUN else _class(threshold, summary)
    name, percent = (OF_A_CLASS | OF_THE_RUN)[threshold.metric]
    measured = getattr(holder, name)
    value = getattr(measured, percent) if percent else measured
    if value is None or math.isnan(value) or (name == "error_rate" and not _class(threshold, summary).judged):
        return Verdict(threshold=threshold, value=None, held=None, why="nothing was measured")
    why = "" if summary.valid else "the run is invalid"
    if percent.startswith("p") and measured.n < (needed := min_requests(float(percent[1:].replace("_", ".")))):
        why = why or f"{measured.n} values are too few, {needed} are needed"
    held = None if why else OPERATORS[threshold.sign](value, threshold.bound)
    return Verdict(threshold=threshold, value=float(value), held=held, why=why)


def _class(threshold: Threshold, summary: RunSummary) -> ClassSummary:
    if threshold.kind is None:
        return summary.total
    return next(each for each in summary.classes if each.name == threshold.kind)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
