"""Which knobs made the difference: the variance of a goal over the whole space, by the knob that explains it.

A search tries mostly what is good, so what was tried says little about a knob that is always well set. The surrogate
of our designer, without a library, fills in the rest of the space; a knob's share is the variance of the mean log
loss over its values (the main effects of a functional ANOVA, Hutter et al., ICML 2014). Failures and limits are left
out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from plait_autoconfig.objective import Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Cell

FEWEST_CELLS = 10
"""The number of configurations below which no importance is computed: too few for a surface over several knobs."""


def knob_importance(space: Space, objective: Objective, cells: Sequence[Cell]) -> list[tuple[str, float]]:
    """Return how much each knob matters, the largest share first; they sum to 1, and with several goals are the means
    over these. Empty with fewer than `FEWEST_CELLS`, or when all configurations did equally well."""
    if len(cells) < FEWEST_CELLS:
        return []
    each = [_effects(space, Objective((goal,), objective.limits), cells) for goal in objective.goals]
    found = np.mean([effects / effects.sum() for effects in each if effects.sum() > 0.0] or [np.zeros(1)], axis=0)
    if not found.any():
        return []
    return sorted(zip(space.by_name, found.tolist(), strict=True), key=lambda share: (-share[1], share[0]))


def _effects(space: Space, objective: Objective, cells: Sequence[Cell]) -> np.ndarray:
    """Return the variance of a goal's mean log loss over the values of each knob."""
    from plait_autoconfig.designers.plait_designer import PlaitDesigner  # SciPy takes a second to import

    designer = PlaitDesigner(space, objective, seed=0)
    for trial in (trial for cell in cells for trial in cell.trials):
        designer.tell(trial)
    losses = designer.beliefs().loss.mean()[: len(designer.cells)]
    effects = []
    for name in space.by_name:
        values = [cell.get(name) for cell in designer.cells]
        means = {own: losses[[value == own for value in values]].mean() for own in set(values)}
        effects.append(np.var([means[value] for value in values]))
    return np.where(np.array(effects) > 1e-12, effects, 0.0)
