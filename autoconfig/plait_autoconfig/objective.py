"""What the tuner optimises: goals to maximise or minimise, and limits that a configuration must keep.

A limit is never traded against a goal: an outcome that violates one is infeasible, however good its goal. A failed
trial has no loss at all. `losses` are what designers minimise.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from plait_autoconfig.errors import ObjectiveError
from plait_autoconfig.values import Cell, Trial, TrialOutcome, cells_of

GOODPUT_PER_COST = "goodput_per_cost"
"""Goodput (responses per second inside the SLO) divided by the price per hour."""
GOODPUT_PER_S = "goodput_per_s"
COST_PER_HOUR = "cost_per_hour"
P99_MS = "p99_ms"
ATTAINMENT = "attainment"
"""The share of responses that are inside the SLO."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A metric to make as large or as small as possible."""

    metric: str
    direction: Literal["max", "min"]

    def loss(self, metrics: Mapping[str, float]) -> float:
        """Return the loss, lower is better: the metric or its negative. Raises `ObjectiveError` if not measured."""
        value = _metric(metrics, self.metric)
        return value if self.direction == "min" else -value

    @property
    def has_cost(self) -> bool:
        """Whether the metric contains the cost: then its log loss is the log cost plus something unknown."""
        return (self.metric, self.direction) in {(GOODPUT_PER_COST, "max"), (COST_PER_HOUR, "min")}

    def __str__(self) -> str:
        return f"{self.direction} {self.metric}"


@dataclass(frozen=True, slots=True)
class Limit:
    """A metric that must stay on one side of a value (inclusive)."""

    metric: str
    bound: Literal["at_most", "at_least"]
    value: float

    def excess(self, metrics: Mapping[str, float]) -> float:
        """Return how far beyond the limit, relative to it (absolute for a limit of 0); negative: that room is left."""
        over = _metric(metrics, self.metric) - self.value
        return (over if self.bound == "at_most" else -over) / (abs(self.value) or 1.0)

    def metric_at(self, excess: float) -> float:
        """Return the metric that has this excess."""
        over = excess * (abs(self.value) or 1.0)
        return self.value + (over if self.bound == "at_most" else -over)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.bound == 'at_most' else '>='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Objective:
    """One goal, or several (then the answer is a Pareto front), and limits."""

    goals: tuple[Goal, ...]
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        if not self.goals:
            raise ObjectiveError("the objective has no goal")
        for name, count in Counter(goal.metric for goal in self.goals).items():
            if count > 1:
                raise ObjectiveError(f"{name} is the metric of {count} goals")
        _check_limits(self.limits)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that a trial must measure."""
        return tuple(dict.fromkeys([*(goal.metric for goal in self.goals), *(limit.metric for limit in self.limits)]))

    @property
    def costs(self) -> tuple[str, ...]:
        """Those of its metrics that contain the cost."""
        return tuple(name for name in self.metrics if name in (GOODPUT_PER_COST, COST_PER_HOUR))

    def losses(self, outcome: TrialOutcome) -> tuple[float, ...] | None:
        """Return one number per goal, lower is better; None for a failed trial."""
        return None if outcome.failure is not None else tuple(goal.loss(outcome.metrics) for goal in self.goals)

    def require_one_goal(self) -> Goal:
        """Return the goal. Raises `ObjectiveError` if there are several."""
        if len(self.goals) > 1:
            msg = f"this needs one goal, but the objective has {len(self.goals)}: {', '.join(map(str, self.goals))}"
            raise ObjectiveError(msg)
        return self.goals[0]

    def excesses(self, outcome: TrialOutcome) -> dict[str, float]:
        """Return how far beyond each limit (`Limit.excess`; negative: room is left). Empty for a failed trial."""
        return {} if outcome.failure is not None else {str(each): each.excess(outcome.metrics) for each in self.limits}

    def feasible(self, outcome: TrialOutcome) -> bool:
        """Return whether the trial ran and keeps every limit."""
        return outcome.failure is None and all(excess <= 0.0 for excess in self.excesses(outcome).values())

    def best(self, trials: Iterable[Trial]) -> Cell | None:
        """Return the feasible cell with the lowest loss (trials averaged), the earliest of equals; None without one."""
        self.require_one_goal()
        return min(self._feasible_cells(trials), key=lambda cell: self.losses(cell.outcome) or (), default=None)

    def front(self, trials: Iterable[Trial]) -> tuple[Cell, ...]:
        """Return the feasible cells that no other beats in one goal without losing in another. Equals are all kept."""
        cells = self._feasible_cells(trials)
        losses = [self.losses(cell.outcome) or () for cell in cells]
        return tuple(cell for cell, own in zip(cells, losses, strict=True) if not any(beats(o, own) for o in losses))

    def why_none(self, trials: Sequence[Trial]) -> str:
        """Return which limit binds and by how much, in a sentence or two; empty if some trial is feasible."""
        cells = cells_of(trials)
        if not cells:
            return f"none of {len(trials)} trials gave a valid measurement" if trials else "nothing was measured yet"
        if any(self.feasible(cell.outcome) for cell in cells):
            return ""
        failed = Counter(cell.outcome.failure for cell in cells if cell.outcome.failure is not None)
        parts = [f"{count} ended with {kind.replace('_', ' ')}" for kind, count in failed.most_common() if kind]
        ran = [cell for cell in cells if cell.outcome.failure is None]
        parts += self._missed(ran)
        return f"none of {len(cells)} configurations is feasible: {'; '.join(parts)}"

    def _missed(self, cells: Sequence[Cell]) -> list[str]:
        """Return a sentence per violated limit, the one most often violated first."""
        said = []
        for limit in self.limits:
            excesses = [limit.excess(cell.outcome.metrics) for cell in cells]
            broken = sum(excess > 0.0 for excess in excesses)
            if broken == len(cells) > 0:
                nearest = cells[excesses.index(min(excesses))]
                value, percent = nearest.outcome.metrics[limit.metric], 100.0 * min(excesses)
                beyond = f"{percent:.3g} % beyond" if limit.value else f"{min(excesses):.3g} beyond"
                said.append(
                    (broken, f"{limit} was missed by all {broken} that ran, the nearest had {value:.6g} ({beyond})")
                )
            elif broken:
                said.append((broken, f"{limit} was missed by {broken} of the {len(cells)} that ran"))
        return [text for _, text in sorted(said, key=lambda each: -each[0])]

    def _feasible_cells(self, trials: Iterable[Trial]) -> list[Cell]:
        return [cell for cell in cells_of(trials) if self.feasible(cell.outcome)]

    def __str__(self) -> str:
        wanted = " and ".join(map(str, self.goals))
        return f"{wanted} with {', '.join(map(str, self.limits))}" if self.limits else wanted


_GOAL = re.compile(r"(max|min)\s+(\w+)(?:\s+at\s+rate\s+([0-9.eE+-]+))?")
_LIMIT = re.compile(r"(\w+)\s*(<=|>=)\s*([0-9.eE+-]+)")


def parse_objective(text: str, limits: Sequence[str] = ()) -> Objective:
    """Parse an objective: `max goodput_per_cost`, `min cost at rate 20`, `min p99_ms, min cost_per_hour`.

    `cost` and `p99` are short for `cost_per_hour` and `p99_ms`. Limits: `p99_ms <= 50`. Raises
    `ObjectiveError`, which quotes the part that cannot be parsed.
    """
    short, goals, found = {"cost": COST_PER_HOUR, "p99": P99_MS}, [], []
    for part in text.split(","):
        match = _GOAL.fullmatch(part.strip())
        if match is None:
            raise ObjectiveError(f"the goal {part.strip()!r} cannot be read; it should be like `max goodput_per_cost`")
        goals.append(Goal(short.get(match[2], match[2]), "max" if match[1] == "max" else "min"))
        if match[3]:
            rate_per_s = _number(match[3])
            if rate_per_s <= 0.0:
                raise ObjectiveError(f"the goal {part.strip()!r} needs a rate above 0")
            found.append(Limit(GOODPUT_PER_S, "at_least", rate_per_s))
    for each in limits:
        match = _LIMIT.fullmatch(each.strip())
        if match is None:
            raise ObjectiveError(f"the limit {each!r} cannot be read; it should be like `p99_ms <= 50`")
        found.append(Limit(match[1], "at_most" if match[2] == "<=" else "at_least", _number(match[3])))
    return Objective(tuple(goals), tuple(found))


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.inf
    if not math.isfinite(number):
        raise ObjectiveError(f"{text!r} is no number")
    return number


def _check_limits(limits: Sequence[Limit]) -> None:
    """Check that two limits of one metric leave some room between them."""
    highs = [limit for limit in limits if limit.bound == "at_most"]
    lows = [limit for limit in limits if limit.bound == "at_least"]
    for high, low in itertools.product(highs, lows):
        if high.metric == low.metric and high.value < low.value:
            raise ObjectiveError(f"the limits {low} and {high} contradict each other")


def beats(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether one is at least as good in all losses and better in one."""
    return all(a <= b for a, b in zip(one, other, strict=True)) and any(a < b for a, b in zip(one, other, strict=True))


def _metric(metrics: Mapping[str, float], name: str) -> float:
    try:
        return metrics[name]
    except KeyError:
        raise ObjectiveError(f"the objective needs {name}, but a trial measured only {', '.join(metrics)}") from None
