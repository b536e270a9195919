"""From past services to a `Background`: what they have in common, and how each of them differed.

Every source is first brought to one scale (an offset and a spread of its own: services share shapes, not levels).
Where a source did not measure a cell of the space, the value comes from a forest over all sources, plus a Gaussian
process over this source's own results. If services come with features (`PastSource.context`), a forest may predict a
new one better than the plain mean; which of the two is used is decided by treating past services as if they were
new.

Symbols: N cells, D features of a cell, S sources, n trials of a source, F features of a service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor

from plait_autoconfig.objective import ATTAINMENT, COST_PER_HOUR, Limit, Objective
from plait_autoconfig.space import Space
from plait_autoconfig.surrogate.posterior import (
    FREE_OFFSET_SD,
    MARGIN_OFFSET_SD,
    SIZE,
    Background,
    Floats,
    Hypotheses,
    Scales,
    TrialData,
    log_evidence,
    matern_between,
    no_background,
    usual_scales,
)
from plait_autoconfig.values import Cell, TrialOutcome

_TREES, _LEAF = 60, 2
_MAX_ROWS = 6_000  # that a forest learns from
_MAX_OWN = 200  # of a source's trials, for its own Gaussian process
_OWN_SD, _OWN_NOISE = 0.5, 0.2  # of that process, in units
_HELD_OUT, _PROBES = 6, 40  # sources that are treated as new, and how many of their cells are looked at
_HELPS = 0.05  # share of a service's variance that a mean must explain to count as a help


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSource:
    """One past service: the `features` (n, D) of its cells, their `values` (n,), its `context` (F,) and its weight."""

    features: Floats
    values: Floats
    context: Floats
    weight: float = 1.0


def pool(
    sources: Sequence[PastSource], cells: Floats, context: Floats, rng: np.random.Generator, *, absolute: bool = False
) -> Background:
    """Return what the sources imply for a service with this `context` (F,) on `cells` (N, D).

    `absolute`: levels and spreads carry over from service to service, as those of a margin to a limit do.
    """
    useful = [source for source in sources if len(source.values) >= 2]
    if not useful:
        return no_background(cells)
    levels, spreads = _levels(useful, absolute=absolute)
    shapes = _shapes(useful, levels, spreads, cells, rng)
    if not absolute:
        shapes -= shapes.mean(1, keepdims=True)
    weights = np.array([source.weight for source in useful])
    contexts = np.array([source.context for source in useful])
    common = weights @ shapes / weights.sum()
    mean, gain = common, _gain(shapes, weights)
    if contexts.shape[1] and np.ptp(contexts, axis=0).any():
        predicted, gains = _by_context(shapes, contexts, cells, context, rng)
        if gains.mean() > gain.mean():
            mean, gain = predicted, gains
    return Background(
        cells=cells,
        mean=mean if absolute else mean - mean.mean(),
        deviations=shapes - common,
        unit=1.0 if absolute else float(np.median(spreads)),
        trust=float((np.sum(gain > _HELPS) + 1.0) / (len(gain) + 2.0)),  # the rule of succession
        scales=_learn_scales(shapes, weights, cells, rng),
        cold=usual_scales(cells.shape[1]),
        offset_sd=MARGIN_OFFSET_SD if absolute else FREE_OFFSET_SD,
    )


def _levels(sources: Sequence[PastSource], *, absolute: bool) -> tuple[Floats, Floats]:
    """Return what to subtract from each source's values, and what to divide them by (S,)."""
    if absolute:
        return np.zeros(len(sources)), np.ones(len(sources))
    spreads = np.array([source.values.std() for source in sources])
    unit = float(np.median(spreads)) or 1.0
    return np.array([source.values.mean() for source in sources]), np.clip(spreads, unit / 3.0, unit * 3.0)


def _shapes(
    sources: Sequence[PastSource], levels: Floats, spreads: Floats, cells: Floats, rng: np.random.Generator
) -> Floats:
    """Return every source's values on all cells (S, N), minus its level, in units of its spread."""
    scaled = [(each.values - level) / spread for each, level, spread in zip(sources, levels, spreads, strict=True)]
    place = {row.tobytes(): index for index, row in enumerate(np.round(cells, 9) + 0.0)}
    found = [[place.get(row.tobytes(), -1) for row in np.round(each.features, 9) + 0.0] for each in sources]
    shapes = np.full((len(sources), len(cells)), np.nan)
    for shape, index, values in zip(shapes, found, scaled, strict=True):
        known = np.array(index) >= 0
        shape[np.array(index)[known]] = values[known]
    if np.isnan(shapes).any():
        shapes = np.where(np.isnan(shapes), _filled(sources, scaled, cells, rng), shapes)
    return shapes


def _filled(sources: Sequence[PastSource], scaled: Sequence[Floats], cells: Floats, rng: np.random.Generator) -> Floats:
    """Return a forest over all sources, corrected by each one's own results (S, N)."""
    rows = np.concatenate([_with(each.features, each.context) for each in sources])
    values = np.concatenate(scaled)
    owner = np.repeat(np.arange(len(sources)), [len(each) for each in scaled])
    offsets = np.zeros(len(sources))
    for _ in range(2):  # sources measured different cells: the second forest knows where each one's level is
        forest = _forest(rows, values - offsets[owner], rng)
        residual = values - forest.predict(rows)
        offsets = np.array([residual[owner == s].mean() for s in range(len(sources))])
    length = np.exp(usual_scales(cells.shape[1]).center[3:])
    filled = []
    for s, source in enumerate(sources):
        own = rng.permutation(np.flatnonzero(owner == s))[:_MAX_OWN]
        seen = source.features[own - np.flatnonzero(owner == s)[0]] / length
        matrix = _OWN_SD**2 * matern_between(seen, seen) + _OWN_NOISE**2 * np.eye(len(own))
        cross = _OWN_SD**2 * matern_between(cells / length, seen)
        pull = cross @ np.linalg.solve(matrix, residual[own] - offsets[s])
        filled.append(forest.predict(_with(cells, source.context)) + offsets[s] + pull)
    return np.array(filled)


def _gain(shapes: Floats, weights: Floats) -> Floats:
    """Return the share of each source's variance explained by the mean of the others (S,); 0 if there are none."""
    if len(shapes) < 2:
        return np.zeros(len(shapes))
    others = (weights @ shapes - weights[:, None] * shapes) / (weights.sum() - weights)[:, None]
    return _explained(shapes, others)


def _explained(shapes: Floats, guesses: Floats) -> Floats:
    return np.asarray(1.0 - (shapes - guesses).var(-1) / np.maximum(shapes.var(-1), 1e-12))


def _by_context(
    shapes: Floats, contexts: Floats, cells: Floats, context: Floats, rng: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return what a forest from a cell and a service's features predicts for a service with this `context` (N,), and
    what such forests explain of held-out sources, as in `_gain`."""

    def predicted(some: NDArray[np.bool_], at: Floats) -> Floats:
        rows = np.concatenate([_with(cells, each) for each in contexts[some]])
        return np.asarray(_forest(rows, shapes[some].ravel(), rng).predict(_with(cells, at)))

    sources = np.arange(len(shapes))
    mean = predicted(sources >= 0, context)
    held_out = rng.permutation(len(shapes))[:_HELD_OUT]
    return mean, np.array([_explained(shapes[s], predicted(sources != s, contexts[s])) for s in held_out])


def _forest(rows: Floats, values: Floats, rng: np.random.Generator) -> ExtraTreesRegressor:
    some = rng.permutation(len(rows))[:_MAX_ROWS]
    seed = int(rng.integers(1 << 31))
    forest = ExtraTreesRegressor(n_estimators=_TREES, min_samples_leaf=_LEAF, random_state=seed, n_jobs=1)
    return forest.fit(rows[some], values[some])


def _with(features: Floats, context: Floats) -> Floats:
    return np.hstack([features, np.broadcast_to(context, (len(features), len(context)))])


def _learn_scales(shapes: Floats, weights: Floats, cells: Floats, rng: np.random.Generator) -> Scales:
    """Return the scales that best explain, jointly, how past services differed from the mean of the others."""
    usual = usual_scales(cells.shape[1], smooth=0.3, own=0.2, spread=0.7)
    if len(shapes) < 3:
        return usual
    tasks = []
    for s in rng.permutation(len(shapes))[:_HELD_OUT]:
        rest = np.arange(len(shapes)) != s
        mean = weights[rest] @ shapes[rest] / weights[rest].sum()
        background = Background(
            cells=cells, mean=mean, deviations=shapes[rest] - mean, unit=1.0, trust=1.0, scales=usual, cold=usual
        )
        probes = rng.permutation(len(cells))[:_PROBES]
        data = TrialData(index=probes, values=shapes[s, probes], repeats=np.ones(len(probes)), noise=0.0)
        tasks.append((background, data))

    def evidence(theta: Floats) -> Floats:
        return np.asarray(sum(log_evidence(background, data, theta) for background, data in tasks))

    best = Hypotheses.drawn(evidence, usual, SIZE, rng).refined(rng).theta[0]
    return Scales(center=best, spread=0.5)


# ---- from trials to numbers ----------------------------------------------------------------------------------------


def context_names(past: Sequence[Mapping[str, float]], own: Mapping[str, float]) -> tuple[str, ...]:
    """Return the features that this service and all past ones have, and that differ somewhere."""
    names = sorted(name for name in own if all(name in each for each in past))
    return tuple(name for name in names if len({each[name] for each in past} | {own[name]}) > 1)


def context_row(features: Mapping[str, float], names: Sequence[str]) -> Floats:
    """Return the named features (F,)."""
    return np.array([features[name] for name in names], np.float64)


def log_costs(outcomes: Sequence[TrialOutcome]) -> Floats:
    """Return the logarithms of the hourly cost of the outcomes; NaN where it was not measured."""
    costs = np.array([each.metrics.get(COST_PER_HOUR, np.nan) for each in outcomes], np.float64)
    return np.log(np.where(costs > 0.0, costs, np.nan))


def margins(objective: Objective, outcomes: Sequence[TrialOutcome]) -> Floats:
    """Return how far inside all limits each outcome is, from -1 (failed, or half beyond one) to 1 (half is left)."""
    return np.array(
        [
            -1.0 if each.failure is not None else min((_margin(limit, each) for limit in objective.limits), default=1.0)
            for each in outcomes
        ],
        np.float64,
    )


def _margin(limit: Limit, outcome: TrialOutcome) -> float:
    if limit.metric == ATTAINMENT and limit.bound == "at_least" and 0.0 < limit.value < 1.0:
        # It is what is missing that tells configurations apart: 0.97 is three times too bad for 0.99, and not 2 %.
        missed, allowed = 1.0 - outcome.metrics[ATTAINMENT], 1.0 - limit.value
        return (allowed - missed) / (allowed + missed)
    return float(np.clip(-2.0 * limit.excess(outcome.metrics), -1.0, 1.0))


def source_of(space: Space, cells: Sequence[Cell], values: Floats, context: Floats, weight: float) -> PastSource:
    """Return the cells of a past service for `pool`; those with NaN are left out."""
    known = np.isfinite(values)
    features = space.encode([cell.config for cell, keep in zip(cells, known, strict=True) if keep])
    return PastSource(features=features, values=values[known], context=context, weight=weight)
