"""What a text in Prometheus' format says, and promtool's rules for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from plait_serving.replica_metrics import exposition

_BASE_UNITS = ("seconds", "bytes")
_OTHER_UNITS = ("minutes", "hours", "days", "weeks", "bits")
_ABBREVIATED = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}


def lint(text: str) -> Iterator[str]:
    """What `promtool check metrics` has against a text (client_golang's promlint, rule by rule)."""
    heads = re.findall(r"^# (HELP|TYPE) (\S+) ?(.*)$", text, re.MULTILINE)
    helps = {name for kind, name, said in heads if kind == "HELP" and said}
    types = {name: said for kind, name, said in heads if kind == "TYPE"}
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    if len({line.rpartition(" ")[0] for line in lines}) < len(lines):
        yield "a series is there twice"
    for line in lines:
        name, labels = re.match(r"([^{ ]+)(?:\{(.*)\})? ", line).groups()  # type: ignore[union-attr]
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        family = base if types.get(base) == "histogram" else name
        kind = types.get(family)
        keys = re.findall(r'(\w+)="(?:[^"\\]|\\.)*"', labels or "")
        if family not in helps:
            yield f"{family}: no help text"
        if kind is None:
            yield f"{family}: no type"
        if kind == "counter" and not family.endswith("_total"):
            yield f'{family}: counter metrics should have "_total" suffix'
        if kind != "counter" and family.endswith("_total"):
            yield f'{family}: non-counter metrics should not have "_total" suffix'
        if kind != "histogram" and (family.endswith(("_bucket", "_count", "_sum")) or "le" in keys):
            yield f"{family}: what histograms have alone"
        for part in family.split("_"):
            if part in ("gauge", "counter", "histogram", "summary"):
                yield f"{family}: the metric's type is in its name"
            if part in _ABBREVIATED:
                yield f"{family}: an abbreviated unit"
            if part in _OTHER_UNITS or (part.endswith(_BASE_UNITS) and part not in _BASE_UNITS):
                yield f"{family}: {part} is no base unit"
        for word in (family, *keys):
            if re.search(r"[a-z][A-Z]", word):
                yield f"{word}: snake_case, not camelCase"


def found(metrics: str | list[Metric], name: str, /, **labels: str) -> list[float]:
    """The values of the samples of that name with at least these labels."""
    text = metrics if isinstance(metrics, str) else exposition(metrics)
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return [it.value for it in samples if it.name == name and labels.items() <= it.labels.items()]


def total(metrics: str | list[Metric], name: str, /, **labels: str) -> float:
    """Their sum; there must be one."""
    values = found(metrics, name, **labels)
    assert values, f"no {name} with {labels}"
    return sum(values)
