"""The metrics of several replicas as one text in Prometheus' format.

Counters, histograms and most gauges (requests waiting, bytes resident) add up. What several replicas report of one
and the same thing, their host or the workers behind them, is there once: the max of what they say. A counter that is
summed falls when a replica is gone, which Prometheus takes for the restart that it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["label", "merge"]

_OF_ONE_THING = ("plait_host_", "plait_node_", "plait_engine_prepared", "plait_ranker_worker", "plait_audit_largest")
"""What the names of families begin with whose values are not added up: the max of them counts."""
_CREATED = "_created"
"""How the families end that say when a counter began."""

_Number = int | float


@dataclass(slots=True)
class _Family:
    """The comments and the samples of one metric, in the order in which they came first."""

    name: str
    comments: list[str] = field(default_factory=list)
    samples: dict[str, _Number] = field(default_factory=dict)

    def add(self, sample: str, value: _Number) -> None:
        known = self.samples.get(sample)
        self.samples[sample] = value if known is None else _combination(self.name)((known, value))


def label(value: str) -> str:
    """Return the value of a label in quotes, as the format has it."""
    for char, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        value = value.replace(char, written)
    return f'"{value}"'


def merge(texts: Sequence[str]) -> str:
    """Return the texts of replicas of one kind as one."""
    if len(texts) < 2:
        return "".join(texts)
    families: dict[str, _Family] = {}
    for text in texts:
        _read(text, families)
    return "".join(_lines(families.values()))


def _read(text: str, families: dict[str, _Family]) -> None:
    """Add a text to the families. Its samples follow the comments of their family, as the format requires."""
    current = ""
    for line in text.split("\n"):  # `splitlines` would also cut at characters that a label may hold
        if line.startswith("#"):
            parts = line.split(" ", 3)
            if len(parts) < 3:
                continue
            current = parts[2]
            family = families.setdefault(current, _Family(current))
            if line not in family.comments:
                family.comments.append(line)
        elif line:
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            if not current or not name.startswith(current):
                current = name
            families.setdefault(current, _Family(current)).add(sample, _parsed(value))


def _lines(families: Iterable[_Family]) -> Iterable[str]:
    for family in families:
        yield from (f"{comment}\n" for comment in family.comments)
        yield from (f"{sample} {_written(value)}\n" for sample, value in family.samples.items())


def _combination(family: str) -> Callable[[Iterable[_Number]], _Number]:
    if family.startswith(_OF_ONE_THING):
        return max
    return min if family.endswith(_CREATED) else sum


def _parsed(value: str) -> _Number:
    return int(value) if value.removeprefix("-").isdecimal() else float(value)


def _written(value: _Number) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)
