"""Which knobs made the difference: PED-ANOVA (Watanabe et al., IJCAI 2023), as implemented in Optuna 5.

It compares the distribution of a knob's values among the best configurations with that among all tried ones, so all
it needs is an order of the configurations: first those that keep every limit, by their goals, then those that
violate one, by how far, then those that failed. Failures need no score.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plait_autoconfig.knobs import ChoiceKnob, Knob
from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Cell, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FEWEST_CELLS = 10
"""The number of configurations below which no importance is computed: their best part would be only one or two."""

_WANTED_BEST = 5  # Optuna's documentation asks for at least 5 configurations in the best part
_MIN_SHARE, _MAX_SHARE = 0.1, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Importance:
    """`shares`: importance by knob, largest first; they sum to 1. `best_share`: the part that counted as best."""

    shares: tuple[tuple[str, float], ...]
    cells: int
    best_share: float


def knob_importance(space: Space, objective: Objective, cells: Sequence[Cell]) -> Importance | None:
    """Return how much each knob contributed to being among the best; None when that cannot be determined.

    That is so with fewer than `FEWEST_CELLS`, when no knob varied, or when all configurations did equally well.
    """
    if len(cells) < FEWEST_CELLS:
        return None
    places = ranks(objective, cells)
    best_share = min(_MAX_SHARE, max(_MIN_SHARE, _WANTED_BEST / len(cells)))
    found = _ped_anova(space, [dict(cell.config) for cell in cells], places, best_share)
    total = sum(found.values())
    if total <= 0.0 or len(set(places)) == 1:
        return None
    shares = sorted(((name, value / total) for name, value in found.items()), key=lambda each: (-each[1], each[0]))
    return Importance(shares=tuple(shares), cells=len(cells), best_share=best_share)


def ranks(objective: Objective, cells: Sequence[Cell]) -> list[int]:
    """Return the rank of each cell, 0 for the best; equals share theirs. A front of several goals is one rank."""
    keys = [(*_class(objective, cell), wins) for cell, wins in zip(cells, _beaten_by(objective, cells), strict=True)]
    order = sorted(set(keys))
    return [order.index(key) for key in keys]


def _class(objective: Objective, cell: Cell) -> tuple[int, float]:
    if cell.outcome.failure is not None:
        return 2, 0.0
    if not objective.feasible(cell.outcome):
        return 1, sum(objective.violations(cell.outcome).values())
    return 0, 0.0


def _beaten_by(objective: Objective, cells: Sequence[Cell]) -> list[int]:
    """Return by how many feasible cells each feasible cell is beaten in every goal; 0 for the others."""
    losses = [objective.losses(cell.outcome) if objective.feasible(cell.outcome) else None for cell in cells]
    known = [loss for loss in losses if loss is not None]
    return [0 if own is None else sum(all(a < b for a, b in zip(o, own, strict=True)) for o in known) for own in losses]


def _ped_anova(
    space: Space, configs: Sequence[dict[str, Value]], places: Sequence[int], best_share: float
) -> dict[str, float]:
    """Return each knob's share according to Optuna; all calls to Optuna are made here."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator

    from plait_autoconfig.optuna_forms import quiet

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says so when a knob was active in one trial only
        study = optuna.create_study(direction="minimize")
        for config, place in zip(configs, places, strict=True):
            own = {name: _number(space.by_name[name], value) for name, value in config.items()}
            forms = {name: _distribution(space.by_name[name]) for name in config}
            study.add_trial(optuna.trial.create_trial(params=own, distributions=forms, value=float(place)))
        found: dict[str, float] = PedAnovaImportanceEvaluator(target_quantile=best_share).evaluate(study)
    return {name: found.get(name, 0.0) for name in space.by_name}


def _distribution(knob: Knob) -> BaseDistribution:
    """Return the knob's distribution; by rank for an ordered choice, as Optuna's categories have no order."""
    from optuna.distributions import IntDistribution

    from plait_autoconfig.optuna_forms import distribution_of

    if isinstance(knob, ChoiceKnob) and knob.ordered:
        return IntDistribution(0, len(knob.values) - 1)
    return distribution_of(knob)


def _number(knob: Knob, value: Value) -> Value:
    return knob.values.index(value) if isinstance(knob, ChoiceKnob) and knob.ordered else value
