"""From a job's state to the numbers in its charts: which dots there are, what was best when, how certain it is, and
which knobs made the difference."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.state import Interval, JobState, MeasurementRow
from plait_autoconfig.jobs.uncertainty import Noise
from plait_autoconfig.objective import Goal, Objective, beats
from plait_autoconfig.report import charts
from plait_autoconfig.report.charts import Dot
from plait_autoconfig.report.formatting import config_text, with_unit
from plait_autoconfig.space import Space
from plait_autoconfig.values import Cell, Config, Trial, TrialOutcome, cells_of, config_key, pooled

FEWEST_CELLS = 10
"""The number of configurations below which no importance is computed: too few for a surface over several knobs."""


def finished(state: JobState) -> tuple[MeasurementRow, ...]:
    """Return the rows with an outcome, warm-ups and checks left out, in order of their numbers."""
    return tuple(row for row in state.rows if row.outcome is not None and row.kind.compares)


def trials(state: JobState) -> tuple[Trial, ...]:
    """Return the finished rows as trials, drift divided out."""
    return tuple(
        Trial(number=row.number, config=row.config, outcome=row.outcome, duration_s=row.duration_s)
        for row in finished(state)
        if row.outcome is not None
    )


def cells(state: JobState) -> tuple[Cell, ...]:
    """Return the results of each configuration of the space; a reference outside the space is left out."""
    return tuple(cell for cell in cells_of(trials(state)) if state.spec.space.includes(cell.config))


def metrics_of(state: JobState, config: Config, *, confirmed: bool = False) -> Mapping[str, float]:
    """Return the mean of each metric over the measurements of the configuration, or over the confirming ones alone;
    empty if there are none."""
    wanted = config_key(config)
    rows = [row for row in finished(state) if row.kind is MeasurementKind.CONFIRM or not confirmed]
    found = pooled(row.outcome for row in rows if config_key(row.config) == wanted and row.outcome is not None)
    return {} if found is None else found.metrics


def default_breaks(state: JobState, *, confirmed: bool) -> frozenset[str]:
    """Return the metrics in which the default violates a limit, by the mean of its measurements."""
    metrics = metrics_of(state, state.spec.default, confirmed=confirmed)
    limits = [limit for limit in state.spec.goal.limits if limit.metric in metrics]
    return frozenset(limit.metric for limit in limits if limit.excess(metrics) > 0.0)


def best_over_time(state: JobState, goal: Goal) -> list[tuple[int, Interval]]:
    """Return the number of each measurement that changed the mean of the best feasible configuration, and that mean.

    It can get worse: when the best is measured again and was luckier the first time.
    """
    objective, noise = Objective((goal,), state.spec.goal.limits), noise_of(state, goal)
    seen: dict[Hashable, list[TrialOutcome]] = {}
    losses: dict[Hashable, float] = {}
    steps: list[tuple[int, Interval]] = []
    for row in finished(state):
        key, outcome = config_key(row.config), row.outcome
        if outcome is None or outcome.invalid:
            continue
        seen.setdefault(key, []).append(outcome)
        mean = pooled(seen[key])
        losses.pop(key, None)
        if mean is not None and objective.feasible(mean):
            losses[key] = goal.loss(mean.metrics)
        if losses:
            best = min(losses, key=losses.__getitem__)
            steps.append((row.number, noise.mean([each.metrics[goal.metric] for each in seen[best]])))
    return [next(alike) for _, alike in itertools.groupby(steps, key=lambda step: step[1])]


def noise_of(state: JobState, goal: Goal) -> Noise:
    """Return the scatter of measurements of one configuration; it includes the drift, so it is rather too large."""
    return Noise.of(goal.metric, ((row.config, row.raw) for row in finished(state)), seed=state.spec.seed)


def dots(state: JobState, metric: str, places: Iterable[tuple[MeasurementRow, float]]) -> list[Dot]:
    """Return rows as dots, each at its place on the x axis; their height is `metric`."""
    default, chosen = config_key(state.spec.default), recommended_keys(state)
    return [
        Dot(
            x=x,
            y=None if row.outcome is None else row.outcome.metrics.get(metric),
            kind=_kind(row, default),
            text=dot_text(row, metric),
            chosen=config_key(row.config) in chosen,
        )
        for row, x in places
    ]


def _kind(row: MeasurementRow, default: Hashable) -> charts.Kind:
    if row.outcome is None or row.outcome.failure is not None:
        return "failed"
    if config_key(row.config) == default:
        return "reference"
    if not row.feasible:
        return "over"
    return "confirm" if row.kind is MeasurementKind.CONFIRM else "ok"


def dot_text(row: MeasurementRow, metric: str) -> str:
    """Return `trial 7: 12.3 /s; replicas=2; p99_ms <= 50 missed by 12 %`."""
    outcome = row.outcome
    value = outcome.metrics.get(metric) if outcome is not None else None
    said = [] if value is None else [f"{metric} {with_unit(metric, value)}"]
    return f"{row.number}: {'; '.join([*said, config_text(row.config), *([row.reason] if row.reason else [])])}"


def recommended_keys(state: JobState) -> frozenset[Hashable]:
    """Return the keys of the recommended configurations, or of the best so far."""
    chosen = [each.config for each in state.answers] or [each.config for each in state.front]
    if not chosen and state.best is not None:
        chosen = [state.best.config]
    return frozenset(config_key(config) for config in chosen)


def pareto_line(state: JobState, x: Goal, y: Goal) -> tuple[tuple[float, float], ...]:
    """Return the recommended front (or the one so far) projected onto two of its goals: the corners of a staircase, in
    the order of the first goal's metric."""
    known = [each.metrics for each in state.answers or state.front]
    losses = [(x.loss(each), y.loss(each)) for each in known]
    best = [each for each, own in zip(known, losses, strict=True) if not any(beats(other, own) for other in losses)]
    points = sorted({(each[x.metric], each[y.metric]) for each in best})
    corners: list[tuple[float, float]] = []
    for point in points:
        if corners:
            before = corners[-1]
            # What is between two points of a front is known to be reachable no better than the worse of both.
            corners.append((point[0], before[1]) if x.direction == "min" else (before[0], point[1]))
        corners.append(point)
    return tuple(corners)


def knob_importance(space: Space, objective: Objective, cells: Sequence[Cell]) -> list[tuple[str, float]]:
    """Return how much each knob matters, the largest share first; they sum to 1, and with several goals are the means
    over these. Empty with fewer than `FEWEST_CELLS`, or when all configurations did equally well.

    The variance of a goal over the whole space, by the knob that explains it. A search tries mostly what is good, so
    what was tried says little about a knob that is always well set. The surrogate of our designer, without a library,
    fills in the rest of the space; a knob's share is the variance of the mean log loss over its values (the main
    effects of a functional ANOVA, Hutter et al., ICML 2014). Failures and limits are left out.
    """
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
