"""Thresholds: `p99_ms < 250`, `error_rate <= 0.01`, `images.p95_ms < 500`. A missed one results in exit code 99.

An invalid run passes no threshold: its numbers prove nothing, and a gate that accepts them would hide that. Nor does
a threshold pass on a number that does not exist (no answers: no p99), or on a percentile of so few answers that it
is only their maximum (fewer than 100 for a p99).
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

OF_A_CLASS: dict[str, Callable[[ClassSummary], float | None]] = {
    "p50_ms": lambda each: each.latency_ms.p50,
    "p90_ms": lambda each: each.latency_ms.p90,
    "p95_ms": lambda each: each.latency_ms.p95,
    "p99_ms": lambda each: each.latency_ms.p99,
    "p99.9_ms": lambda each: each.latency_ms.p99_9,
    "max_ms": lambda each: each.latency_ms.max,
    "mean_ms": lambda each: each.latency_ms.mean,
    "first_byte_p95_ms": lambda each: each.first_byte_ms.p95,
    "first_byte_p99_ms": lambda each: each.first_byte_ms.p99,
    "first_part_p95_ms": lambda each: each.first_part_ms.p95,
    "first_part_p99_ms": lambda each: each.first_part_ms.p99,
    "server_p99_ms": lambda each: each.server_ms.p99,
    "offered_per_s": lambda each: each.offered_per_s,
    "achieved_per_s": lambda each: each.achieved_per_s,
    "goodput_per_s": lambda each: each.goodput_per_s,
    "error_rate": lambda each: each.error_rate if each.judged else None,
    "attainment": lambda each: each.attainment,
    "requests": lambda each: float(each.requests),
}
OF_THE_RUN: dict[str, Callable[[RunSummary], float | None]] = {
    "send_lag_p99_ms": lambda run: run.send_lag_ms.p99,
    "echo_p99_ms": lambda run: run.echo_ms.p99,
    "images_per_s": lambda run: run.images_per_s,
}
_PERCENTILE = re.compile(r"p([\d.]+)_ms$")
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
    """`value`: what was measured, None: nothing was. `why`: why a threshold that looks met is not, else empty."""

    threshold: Threshold
    value: float | None
    held: bool
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
    value = _value(threshold, summary)
    if value is None:
        return Verdict(threshold=threshold, value=None, held=False, why="nothing was measured")
    holds = OPERATORS[threshold.sign](value, threshold.bound)
    why = _doubt(threshold, summary) if holds else ""
    return Verdict(threshold=threshold, value=value, held=holds and not why, why=why)


def _doubt(threshold: Threshold, summary: RunSummary) -> str:
    """Return why a number on the right side of its threshold proves nothing; empty if it does."""
    if not summary.valid:
        return "the run is invalid"
    percentile = _PERCENTILE.search(threshold.metric)
    if percentile is None or threshold.metric in OF_THE_RUN:
        return ""
    needed, answers = min_requests(float(percentile[1])), _class(threshold, summary).latency_ms.n
    return f"{answers} answers are too few, {needed} are needed" if answers < needed else ""


def _value(threshold: Threshold, summary: RunSummary) -> float | None:
    if threshold.metric in OF_THE_RUN:
        value = OF_THE_RUN[threshold.metric](summary)
    else:
        value = OF_A_CLASS[threshold.metric](_class(threshold, summary))
    return None if value is None or math.isnan(value) else value


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
