"""The search space: knobs, constraints between them, and the cells, i.e. the configurations that may be proposed: all
that satisfy the constraints, or the candidates that somebody lists. What may be learned from is any configuration of
the knobs.

A designer evaluates all cells at once, so there are at most `MAX_CELLS`. A larger or continuous space is represented
by `MAX_SAMPLED` cells of a Sobol sequence with a fixed seed: every designer, in every process, sees the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait_autoconfig.constraints import KNOB_NAME, Constraint
from plait_autoconfig.errors import EmptySpace, OutsideSpace, SpaceError, hint
from plait_autoconfig.knobs import ChoiceKnob, Knob
from plait_autoconfig.values import Config, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

MAX_CELLS = 20_000
MAX_SAMPLED = 4_096
MAX_DRAWN = 1 << 17  # draws in search of sampled cells: at 1 valid cell in 32 the sample is still complete
_MAX_VISITS = 1_000_000  # steps in the tree of partial configurations: about a second


@dataclass(frozen=True)
class Space:
    """Knobs in a fixed order and constraints as strings (`Constraint`).

    Raises `SpaceError` naming the knob or the constraint that is wrong, `EmptySpace` when no configuration is valid,
    `OutsideSpace` for a candidate that is none. A conditional knob comes after the knobs that it depends on.
    """

    knobs: tuple[Knob, ...]
    constraints: tuple[str, ...] = ()
    candidates: tuple[Config, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        _check_knobs(self.knobs)
        if not self.cells():
            raise EmptySpace(self._what_binds())

    @cached_property
    def by_name(self) -> dict[str, Knob]:
        """The knobs by name, in order."""
        return {knob.name: knob for knob in self.knobs}

    @cached_property
    def parsed(self) -> tuple[Constraint, ...]:
        """The parsed constraints."""
        return tuple(Constraint.parse(text, tuple(self.by_name)) for text in self.constraints)

    @property
    def exhaustive(self) -> bool:
        """Whether `cells` are all the cells there are; otherwise they are a sample."""
        return bool(self.candidates) or self._all_cells is not None

    def cells(self) -> tuple[Config, ...]:
        """Return the candidates, if there are any; else all valid configurations in a fixed order (the first knob
        varies slowest), or the sample of them."""
        if self.candidates:
            return self._checked_candidates
        return self._sampled_cells if self._all_cells is None else self._all_cells

    def check(self, config: Config, *, constrained: bool = True) -> Config:
        """Return the configuration with the knobs in order and each value in the knob's own form, without knobs that
        are inactive in it. It need not be a candidate; `constrained`: it must satisfy the constraints.

        Raises `OutsideSpace` naming the knob that is unknown, missing or out of range, or the constraint.
        """
        for name in config:
            if name not in self.by_name:
                raise OutsideSpace(f"{name} is no knob of this space; {hint(name, self.by_name)}")
        checked: dict[str, Value] = {}
        for knob in self.knobs:
            if is_active(knob, checked):
                if knob.name not in config:
                    raise OutsideSpace(f"{knob.name} is missing")
                checked[knob.name] = knob.canonical(config[knob.name])
        for constraint in self.parsed if constrained else ():
            if not constraint.holds(checked):
                values = ", ".join(f"{name} = {checked[name]}" for name in sorted(constraint.names))
                raise OutsideSpace(f"`{constraint.text}` does not hold for {values}")
        return checked

    def includes(self, config: Config) -> bool:
        """Return whether `check` passes."""
        try:
            self.check(config)
        except OutsideSpace:
            return False
        return True

    def key(self, config: Config) -> Hashable:
        """Return a key that is the same for equal configurations; None stands for an inactive knob."""
        return tuple(config.get(name) for name in self.by_name)

    def encode(self, configs: Sequence[Config]) -> NDArray[np.float64]:
        """Return the configurations as numbers in [0, 1], float64 of shape (N, D).

        Ranges and ordered choices have one column (rank or value, on the knob's scale), unordered ones with three or
        more values have a column per value; one more says whether a conditional knob is active. An inactive one is at
        the middle (0.5).
        """
        rows = [[number for knob in self.knobs for number in _encoded(knob, each)] for each in (*configs, {})]
        return np.array(rows, np.float64)[:-1]  # with one more, which gives none its width

    def configuration_at(self, point: Sequence[float]) -> Config:
        """Return the configuration at a point of [0, 1)^knobs, constraints unchecked; inactive knobs ignore theirs."""
        config: dict[str, Value] = {}
        for knob, u in zip(self.knobs, point, strict=True):
            if is_active(knob, config):
                config[knob.name] = knob.draw(u)
        return config

    def distributions(self) -> dict[str, BaseDistribution]:
        """Return the knobs as Optuna distributions, which lack conditions and constraints: `check` covers those."""
        from plait_autoconfig.optuna_forms import distribution_of

        return {knob.name: distribution_of(knob) for knob in self.knobs}

    @cached_property
    def _checked_candidates(self) -> tuple[Config, ...]:
        """Return the candidates, each once and in the knobs' own form."""
        found: dict[Hashable, Config] = {}
        for number, config in enumerate(self.candidates, 1):
            try:
                checked = self.check(config)
            except OutsideSpace as error:
                raise OutsideSpace(f"candidate {number} is outside of the space: {error}") from error
            found.setdefault(self.key(checked), checked)
        if len(found) > MAX_CELLS:
            raise SpaceError(f"there are {len(found)} candidates; at most {MAX_CELLS} can be compared")
        return tuple(found.values())

    @cached_property
    def _all_cells(self) -> tuple[Config, ...] | None:
        """Every cell, or None when there are too many to enumerate."""
        return self._listed(self.parsed)

    def _listed(self, constraints: Sequence[Constraint]) -> tuple[Config, ...] | None:
        try:
            cells = tuple(itertools.islice(self._search(constraints), MAX_CELLS + 1))
        except _TooLarge:
            return None
        return cells if len(cells) <= MAX_CELLS else None

    @cached_property
    def _sampled_cells(self) -> tuple[Config, ...]:
        found: dict[Hashable, Config] = {}
        for config in itertools.islice(self._drawn(), MAX_DRAWN):
            if all(constraint.holds(config) for constraint in self.parsed):
                found.setdefault(self.key(config), config)
            if len(found) == MAX_SAMPLED:
                break
        return tuple(found.values())

    def _drawn(self) -> Iterator[Config]:
        """Yield configurations of a Sobol sequence, constraints not yet checked."""
        for row in sobol_points(len(self.knobs), seed=0):
            yield self.configuration_at(row)

    def _search(self, constraints: Sequence[Constraint]) -> Iterator[Config]:
        """Yield all cells, depth first; a partial configuration that violates a constraint is not extended.

        Raises `_TooLarge` at a continuous knob or after `_MAX_VISITS` steps.
        """
        names = list(self.by_name)
        due: list[list[Constraint]] = [[] for _ in names]  # each constraint as soon as its last knob has a value
        for constraint in constraints:
            due[max(map(names.index, constraint.names))].append(constraint)
        visits = itertools.count()

        def extend(at: int, config: dict[str, Value]) -> Iterator[Config]:
            if at == len(self.knobs):
                yield dict(config)
                return
            knob = self.knobs[at]
            if not is_active(knob, config):
                yield from extend(at + 1, config)
                return
            if knob.count is None:
                raise _TooLarge
            for index in range(knob.count):
                if next(visits) > _MAX_VISITS:
                    raise _TooLarge
                config[knob.name] = knob.value_at(index)
                if all(constraint.holds(config) for constraint in due[at]):
                    yield from extend(at + 1, config)
            config.pop(knob.name, None)

        return extend(0, {})

    def _what_binds(self) -> str:
        """Return the smallest set of constraints (up to three, else all) that leaves no cell, and what each leaves."""
        everything = self._listed(())
        drawn = list(itertools.islice(self._drawn(), MAX_CELLS)) if everything is None else everything
        what = "drawn from its knobs" if everything is None else "of its knobs"
        kept = np.array([[constraint.holds(config) for config in drawn] for constraint in self.parsed])
        if kept.all(axis=0).any():
            return f"no valid configuration was found among {MAX_DRAWN} drawn"
        everyone = range(len(kept))
        sets = itertools.chain(*(itertools.combinations(everyone, size) for size in (1, 2, 3)), [tuple(everyone)])
        binding = next(some for some in sets if not kept[list(some)].all(axis=0).any())
        said = ", ".join(f"`{self.constraints[each]}` leaves {kept[each].sum()}" for each in binding)
        together = "" if len(binding) == 1 else ", together they leave none"
        return f"the space is empty: of {len(drawn)} configurations {what}, {said}{together}"


class _TooLarge(Exception):
    """The cells cannot be listed."""


def is_active(knob: Knob, config: Config) -> bool:
    """Return whether the knob is active in this (possibly partial) configuration."""
    return all(name in config and config[name] in allowed for name, allowed in knob.when.items())


def _check_knobs(knobs: Sequence[Knob]) -> None:
    if not knobs:
        raise SpaceError("the space has no knob")
    known: dict[str, Knob] = {}
    for knob in knobs:
        if not KNOB_NAME.fullmatch(knob.name):
            msg = f"{knob.name!r} cannot be the name of a knob: a letter or _ first, then also digits, - and ."
            raise SpaceError(msg)
        if knob.name in known:
            raise SpaceError(f"{knob.name} is the name of two knobs")
        for name, allowed in knob.when.items():
            _check_condition(knob.name, known.get(name), name, allowed)
        known[knob.name] = knob


def _check_condition(owner: str, parent: Knob | None, name: str, allowed: Sequence[Value]) -> None:
    if parent is None:
        raise SpaceError(f"{owner}: depends on {name}, which is no knob before it")
    try:
        for value in allowed:
            parent.canonical(value)
    except OutsideSpace as error:
        raise SpaceError(f"{owner}: its condition can never hold: {error}") from error


def _one_hot(knob: Knob) -> tuple[Value, ...]:
    """Return the values that get a column each; empty for a knob with one column."""
    return knob.values if isinstance(knob, ChoiceKnob) and not knob.ordered and len(knob.values) > 2 else ()


def _encoded(knob: Knob, config: Config) -> list[float]:
    active, values = knob.name in config, _one_hot(knob)
    if values:
        numbers = [float(active and config[knob.name] == value) for value in values]
    else:
        numbers = [knob.place(config[knob.name]) if active else 0.5]
    return [*numbers, float(active)] if knob.when else numbers


def sobol_points(dimensions: int, *, seed: int) -> Iterator[list[float]]:
    """Yield an endless scrambled Sobol sequence in [0, 1)^dimensions (Owen scrambling, `scipy.stats.qmc`)."""
    from scipy.stats import qmc  # takes most of a second to import

    sequence = qmc.Sobol(dimensions, scramble=True, rng=seed)
    while True:
        yield from sequence.random(512).clip(0.0, 1.0 - 1e-12).tolist()
