"""The `--json` document: everything about a run that a program may ask for. Numbers keep five significant digits.

Milliseconds end in `_ms`, rates in `_per_s`; what was not measured is null. `histograms` are HDR histograms
(HdrHistogram V2, base64) of the latency of successes in nanoseconds, whole and in parts by time: `compare` needs
nothing else. `failures`: the commonest reasons of each of the `errors`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from plait_loadtest import host
from plait_loadtest.histogram import encoded
from plait_loadtest.measure import ClassSummary, Percentiles
from plait_loadtest.scenario import Scenario
from plait_loadtest.thresholds import Verdict

if TYPE_CHECKING:
    from plait_loadtest.capacity import Capacity
    from plait_loadtest.session import FinishedRun

FORMAT = "plait-loadtest/1"
_DIGITS = 5  # significant: one more than three, so that rounding stays far below the histogram's 0.05 %

_NUMBERS = (
    "requests", "judged", "succeeded", "good", "offered_per_s", "achieved_per_s", "goodput_per_s", "error_rate",
)  # fmt: skip
_LATENCIES = ("latency_ms", "latency_all_ms", "first_byte_ms", "first_part_ms", "service_ms", "server_ms")


def report(session: FinishedRun, capacity: Capacity | None = None) -> dict[str, Any]:
    """Return the document of a session, and of the search that it confirmed, ready for `json.dumps`."""
    result, summary, scenario = session.result, session.summary, session.scenario
    total = summary.total
    found: dict[str, Any] = {
        "format": FORMAT,
        "tool": {"name": "plait loadtest", "version": host.tool_version(), "commit": host.commit()},
        "started": host.utc(result.started_unix_s),
        "host": host.facts(),
        "scenario": shown(scenario),
        "seed": scenario.seed,
        "valid": summary.valid,
        "reasons": [{"code": reason.code, "text": reason.text} for reason in summary.reasons],
        "interrupted": result.interrupted,
        "measured_s": rounded(summary.seconds),
        "wall_s": rounded(result.wall_s),
        "cpu_s": rounded(result.cpu_s),
        **_class(total),
        "images_per_s": rounded(summary.images_per_s),
        "send_lag_ms": percentiles(summary.send_lag_ms) | {"limit": rounded(summary.lag_limit_ms)},
        "echo_ms": percentiles(summary.echo_ms) | {"limit": rounded(summary.lag_limit_ms)},
        "thresholds": [_verdict(verdict) for verdict in session.verdicts],
        "classes": {each.name: _class(each) for each in summary.classes},
        "histograms": {
            "unit": "ns",
            "total": _histograms(total),
            "classes": {each.name: _histograms(each) for each in summary.classes},
        },
        "reconnects": result.reconnects,
        "part": str(session.part),
    }
    if capacity is not None:
        found["capacity"] = json.loads(json.dumps(asdict(capacity)), parse_float=lambda text: rounded(float(text)))
    return found


def shown(scenario: Scenario) -> dict[str, Any]:
    """Return the scenario as plain values, without header values: keys and cookies do not belong in reports."""
    settings = scenario.model_dump(mode="json")
    for part in (settings["target"], *settings["mix"]):
        part["headers"] = dict.fromkeys(part["headers"], "(not shown)")
    return settings


def percentiles(values: Percentiles) -> dict[str, Any]:
    """Return `n p50 p90 p95 p99 p99.9 max mean`."""
    return {item.name.replace("_", "."): rounded(getattr(values, item.name)) for item in fields(values)}


def rounded(value: float | None) -> float | int | None:
    """Round to five significant digits; integers are unchanged, nan and None become null."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _class(each: ClassSummary) -> dict[str, Any]:
    return {
        **{name: rounded(getattr(each, name)) for name in _NUMBERS},
        "errors": dict(each.errors),
        "failures": {name: [asdict(one) for one in failures] for name, failures in each.failures.items()},
        "slo": _slo(each),
        **{name: percentiles(getattr(each, name)) for name in _LATENCIES},
    }


def _slo(each: ClassSummary) -> dict[str, Any]:
    return {
        "latency_ms": None if each.slo is None else each.slo.latency_ms,
        "percentile": each.slo_percentile,
        "attainment": rounded(each.attainment),
        "met": each.slo_met,
    }


def _verdict(verdict: Verdict) -> Mapping[str, Any]:
    return {
        "threshold": verdict.threshold.text,
        "value": rounded(verdict.value),
        "held": verdict.held,
        "why": verdict.why,
    }


def _histograms(each: ClassSummary) -> dict[str, Any]:
    parts = each.slices
    return {
        "latency": encoded(each.histogram),
        "parts": [encoded(part.histogram) if part.histogram.n else "" for part in parts],
        **{name: [getattr(part, name) for part in parts] for name in ("judged", "good", "failed")},
    }
