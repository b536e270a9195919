"""The kinds of knobs: which values a knob takes, in which unit, and where a value lies between 0 and 1.

All kinds have the same methods. `count` is the number of values (None: a continuous range), `value_at` the n-th of
them, `canonical` the knob's own form of a value; `place` and `draw` map to and from the unit interval (on a
logarithmic scale with `log`). `when` makes a knob conditional: it is active only while each knob named there is
active and has one of the values listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TypeAlias

from plait_autoconfig.errors import OutsideSpace, SpaceError
from plait_autoconfig.values import Value

_ON_GRID = 1e-5  # of a step: a value that went through a text file with seven digits still counts
When: TypeAlias = Mapping[str, tuple[Value, ...]]


@dataclass(frozen=True, kw_only=True)
class _Range:
    """What ranges have in common."""

    name: str
    low: float
    high: float
    step: float | None = None
    log: bool = False
    unit: str = ""
    when: When = field(default_factory=dict)

    def __post_init__(self) -> None:
        low, high, step = self.low, self.high, self.step
        _require(bool(self.name), "a knob", "has no name")
        _require(math.isfinite(low) and math.isfinite(high), self.name, f"has no finite range ({low} to {high})")
        _require(low <= high, self.name, f"has an empty range: low {low:g} is above high {high:g}")
        is_step = step is None or (math.isfinite(step) and step > 0)
        _require(is_step, self.name, f"step is {step}, but must be above 0")
        _require(not self.log or low > 0, self.name, f"log needs a low above 0, not {low:g}")

    def place(self, value: Value) -> float:
        """Return the position of the value in [0, 1]."""
        low, high, at = self.low, self.high, float(value)
        if low == high:
            return 0.0
        return math.log(at / low) / math.log(high / low) if self.log else (at - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class IntKnob(_Range):
    """`low`, `low + step`, ... up to `high`. `log` requires `step` 1; powers of two are an ordered choice."""

    low: int
    high: int
    step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(not self.log or self.step == 1, self.name, "log needs step 1; give powers of two as an ordered choice")

    @property
    def count(self) -> int | None:
        """The number of values."""
        return (self.high - self.low) // self.step + 1

    def value_at(self, index: int) -> Value:
        """Return the value with this index."""
        return self.low + index * self.step

    def canonical(self, value: object) -> Value:
        """Return the value as an int of the range. Raises `OutsideSpace` if it is not one."""
        inside = isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high
        if not isinstance(value, int) or not inside or (value - self.low) % self.step:
            steps = f" in steps of {self.step}" if self.step != 1 else ""
            raise _outside(self.name, value, f"a whole number from {self.low} to {self.high}{steps}{_of(self.unit)}")
        return value

    def draw(self, u: float) -> Value:
        """Return the value at `u` in [0, 1); every value has the same share, or every octave with `log`."""
        if self.log:
            return min(self.high, int(self.low * math.pow((self.high + 1) / self.low, u)))
        return self.value_at(int(u * ((self.high - self.low) // self.step + 1)))


@dataclass(frozen=True, kw_only=True)
class FloatKnob(_Range):
    """`low` to `high`, in increments of `step` if given (exact in decimal: 0.1, 0.2, 0.3)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(not self.log or self.step is None, self.name, "log and step exclude each other; use an ordered choice")

    @property
    def count(self) -> int | None:
        """The number of values; None: a continuous range."""
        if self.step is None:
            return 1 if self.low == self.high else None
        return int((Decimal(str(self.high)) - Decimal(str(self.low))) / Decimal(str(self.step))) + 1

    def value_at(self, index: int) -> Value:
        """Return the value with this index."""
        step = 0.0 if self.step is None else self.step
        return float(Decimal(str(self.low)) + index * Decimal(str(step)))

    def canonical(self, value: object) -> Value:
        """Return the value as a float on the grid. Raises `OutsideSpace` if it is not on it."""
        wanted = f"a number from {self.low:g} to {self.high:g}"
        wanted += f" in steps of {self.step:g}{_of(self.unit)}" if self.step else _of(self.unit)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _outside(self.name, value, wanted)
        if self.step is None:
            known: Value | None = float(value) if self.low <= value <= self.high else None
        else:
            steps = (value - self.low) / self.step
            is_known = abs(steps - round(steps)) <= _ON_GRID and 0 <= round(steps) < (self.count or 0)
            known = self.value_at(round(steps)) if is_known else None
        if known is None:
            raise _outside(self.name, value, wanted)
        return known

    def draw(self, u: float) -> Value:
        """Return the value at `u` in [0, 1)."""
        count = self.count
        if count is not None:
            return self.value_at(int(u * count))
        if self.log:
            return min(self.high, self.low * math.pow(self.high / self.low, u))
        return self.low + u * (self.high - self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceKnob:
    """One of the `values`. `ordered`: they form a scale (1, 2, 4, 8), so that neighbours are similar."""

    name: str
    values: tuple[Value, ...]
    unit: str = ""
    ordered: bool = False
    when: When = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(bool(self.name), "a knob", "has no name")
        _require(bool(self.values), self.name, "has no values")
        twice = [value for index, value in enumerate(self.values) if value in self.values[:index]]
        _require(not twice, self.name, f"has the value {twice[0] if twice else ''!r} twice (True equals 1)")
        numbers = [value for value in self.values if isinstance(value, float)]
        _require(all(map(math.isfinite, numbers)), self.name, "has a value that is not a finite number")

    @property
    def count(self) -> int | None:
        """The number of values."""
        return len(self.values)

    def value_at(self, index: int) -> Value:
        """Return the value with this index."""
        return self.values[index]

    def canonical(self, value: object) -> Value:
        """Return the knob's own form of the value. Raises `OutsideSpace` if it is none of them."""
        for own in self.values:
            if own == value and isinstance(own, bool) == isinstance(value, bool):
                return own
        raise _outside(self.name, value, f"one of {', '.join(map(repr, self.values))}{_of(self.unit)}")

    def place(self, value: Value) -> float:
        """Return its rank among the values, in [0, 1]."""
        return self.values.index(value) / max(1, len(self.values) - 1)

    def draw(self, u: float) -> Value:
        """Return the value at `u` in [0, 1)."""
        return self.values[int(u * len(self.values))]


Knob: TypeAlias = IntKnob | FloatKnob | ChoiceKnob


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise SpaceError(f"{name}: {problem}")


def _outside(name: str, value: object, wanted: str) -> OutsideSpace:
    return OutsideSpace(f"{name} is {value!r}, but must be {wanted}")


def _of(unit: str) -> str:
    return f" ({unit})" if unit else ""
