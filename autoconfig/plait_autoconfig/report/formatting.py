"""The report's formatting of metrics, configurations, durations, and improvements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait_autoconfig.objective import Goal
from plait_autoconfig.values import Config
from plait_report.page import number

_UNITS = {"_per_s": "/s", "_ms": "ms", "_gib": "GiB", "_cores": "cores", "_s": "s"}


def metric_words(metric: str) -> str:
    """Return `goodput per cost` for `goodput_per_cost`, `p99` for `p99_ms`: the unit goes with the number."""
    unit = next((suffix for suffix in _UNITS if metric.endswith(suffix)), "")
    return metric.removesuffix(unit).replace("_", " ")


def metric_unit(metric: str) -> str:
    """Return `ms` for `p99_ms`; empty if the name does not end in a unit."""
    return next((unit for suffix, unit in _UNITS.items() if metric.endswith(suffix)), "")


def metric_title(metric: str) -> str:
    """Return `p99 (ms)`: for axes and column headings."""
    unit = metric_unit(metric)
    return f"{metric_words(metric)} ({unit})" if unit else metric_words(metric)


def with_unit(metric: str, value: float) -> str:
    """Return `12.3 ms`."""
    return f"{number(value)} {metric_unit(metric)}".strip()


def value_text(value: Any) -> str:
    """Return the text of a knob's value, a number without spurious digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def config_text(config: Config) -> str:
    """Return `replicas=2, window=4`."""
    return ", ".join(f"{name}={value_text(value)}" for name, value in config.items())


def duration_text(seconds: float) -> str:
    """Return `42 s`, `7.5 min` or `3.2 h`."""
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.1f} min" if seconds < 5400.0 else f"{seconds / 3600.0:.1f} h"


def gain_words(goal: Goal, gain: float) -> str:
    """Return `34 % higher goodput per cost` for a gain of 1.34; a gain is how many times better something is."""
    what = metric_words(goal.metric)
    if goal.direction == "max":
        if gain >= 2.0:
            return f"{gain:.2g} times the {what}"
        return f"{abs(gain - 1.0):.0%} {'higher' if gain >= 1.0 else 'lower'} {what}".replace("%", " %")
    return f"{abs(1.0 / gain - 1.0):.0%} {'lower' if gain >= 1.0 else 'higher'} {what}".replace("%", " %")


def change_text(before: float, after: float) -> str:
    """Return `+34 %` for two measurements of a metric; a dash where a ratio is meaningless."""
    return signed_percent(after / before) if before > 0.0 and after >= 0.0 else "-"


def signed_percent(ratio: float) -> str:
    """Return `+34 %` for 1.34, `0` for 1."""
    if round(100.0 * (ratio - 1.0)) == 0:
        return "0"
    return f"{100.0 * (ratio - 1.0):+.0f} %".replace("-", "−")


def sentence(text: str) -> str:
    """Return the text with a full stop."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def facts_text(facts: Mapping[str, Any]) -> str:
    """Return `torch 2.13, ray 2.60`."""
    return ", ".join(f"{name} {value_text(value)}" for name, value in facts.items())
