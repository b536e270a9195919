"""The figures of the report: from a job's state to the numbers in its charts (which dots there are, what was best when,
how certain it is, and which knobs made the difference), and the charts."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.state import Interval, JobState, MeasurementRow
from plait_autoconfig.jobs.uncertainty import Noise
from plait_autoconfig.objective import Goal, Objective, beats
from plait_autoconfig.report.formatting import config_text, signed_percent, with_unit
from plait_autoconfig.space import Space
from plait_autoconfig.values import Cell, Config, Trial, TrialOutcome, cells_of, config_key, pooled
from plait_report.charts import SMALL, Chart, Frame

FEWEST_CELLS = 10
"""The number of configurations below which no importance is computed: too few for a surface over several knobs."""

Kind = Literal["ok", "over", "failed", "reference", "confirm"]
"""In this order: kept every limit; exceeded one; gave no measurement; the reference configuration; a candidate
measured again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A trial. `y` None: it has no measurement, and is drawn as a cross on the floor. `text` is shown on hover."""

    x: float
    y: float | None
    kind: Kind
    text: str
    chosen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The titles of the axes, and a sentence that describes the drawing to those who cannot see it."""

    x: str
    y: str
    label: str


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


def _kind(row: MeasurementRow, default: Hashable) -> Kind:
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
    return frozenset(config_key(each.config) for each in state.answers or state.bests)


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
    losses = designer.beliefs().loss.mean()[: len(space.cells())]
    effects = []
    for name in space.by_name:
        values = [cell.get(name) for cell in space.cells()]
        means = {own: losses[[value == own for value in values]].mean() for own in set(values)}
        effects.append(np.var([means[value] for value in values]))
    return np.where(np.array(effects) > 1e-12, effects, 0.0)


# ---- the charts ------------------------------------------------------------------------------------------------------


def best_so_far(
    dots: Sequence[Dot], steps: Sequence[tuple[float, Interval]], axes: Axes, *, default: float | None, frame: Frame
) -> str:
    """Draw every trial over time, the best known value as a staircase with its interval, and the default's value.

    `steps`: from where on the best is known to be what."""
    last = max((dot.x for dot in dots), default=1.0)
    bands = [tuple(best.value if edge is None else edge for edge in (best.low, best.high)) for _, best in steps]
    values = [*_measured(dots), *(edge for band in bands for edge in band)]
    chart = Chart(frame, frame.x(0.4, last + 0.6), frame.y_around(values if default is None else [*values, default]))
    chart.axis_y(name=axes.y)
    chart.axis_x(name=axes.x, whole=True)
    ends = [*(x for x, _ in steps[1:]), last + 0.5][: len(steps)]
    for (x, _), end, (low, high) in zip(steps, ends, bands, strict=True):
        chart.box((x, end), (low, high), "band")
    if default is not None:
        chart.level(default, "default")
    chart.line([(at, best.value) for (x, best), end in zip(steps, ends, strict=True) for at in (x, end)])
    return _drawn(chart, dots, axes)


def trade_off(
    dots: Sequence[Dot], front: Sequence[tuple[float, float]], axes: Axes, *, limit: tuple[str, float, bool] | None,
    frame: Frame,
) -> str:  # fmt: skip
    """Draw one metric against another: all trials, the front as a line, and a limit of the x metric.

    `front`: corners in the order of x. `limit`: its text, its value, and whether what lies to its right is
    infeasible.
    """
    measured = [dot for dot in dots if dot.y is not None]
    xs = [dot.x for dot in measured] + ([] if limit is None else [limit[1]])
    chart = Chart(frame, frame.x_around(xs), frame.y_around(_measured(dots)))
    chart.axis_y(name=axes.y)
    chart.axis_x(name=axes.x)
    if limit is not None:
        chart.region(limit[1], limit[0], right=limit[2])
    chart.line(front)
    return _drawn(chart, measured, axes)


def drift(points: Sequence[tuple[float, float, str]], axes: Axes, *, bound: float, frame: Frame) -> str:
    """Draw the reference over time, as (minutes, ratio to its first measurement, text), and the noise band."""
    edges = [1.0 - bound, 1.0 + bound]
    x = frame.x(0.0, max((at for at, _, _ in points), default=1.0) * 1.02)
    chart = Chart(frame, x, frame.y_around([*(ratio for _, ratio, _ in points), *edges]))
    chart.axis_y(signed_percent, axes.y)
    chart.axis_x(name=axes.x)
    for edge in edges:
        chart.level(edge, "slo")
    chart.line((at, ratio) for at, ratio, _ in points)
    return _drawn(chart, [Dot(x=at, y=ratio, kind="reference", text=text) for at, ratio, text in points], axes)


def knob_slice(dots: Sequence[Dot], axes: Axes, *, names: Sequence[str] = (), frame: Frame = SMALL) -> str:
    """Draw the goal over one knob. `names`: of a knob with few values, whose dots then have their indices as `x`."""
    x = frame.x(-0.6, len(names) - 0.4) if names else frame.x_around([dot.x for dot in dots])
    chart = Chart(frame, x, frame.y_around(_measured(dots)))
    chart.axis_y(name=axes.y)
    if names:
        # Only every n-th name where not all fit.
        room_px, widest_px = (frame.end - frame.left) / len(names), 7.0 * max(map(len, names)) + 8.0
        every = max(1, round(widest_px / room_px + 0.49))
        chart.axis_x_at([(float(i), text) for i, text in enumerate(names) if i % every == 0], axes.x)
    else:
        chart.axis_x(name=axes.x)
    return _drawn(chart, dots, axes)


def _measured(dots: Sequence[Dot]) -> list[float]:
    return [dot.y for dot in dots if dot.y is not None]


def _drawn(chart: Chart, dots: Sequence[Dot], axes: Axes) -> str:
    """Return the drawing with the dots on top."""
    for dot in dots:
        if dot.y is None:
            chart.cross(dot.x, "dot failed", title=dot.text)
        else:
            chosen, radius = (" chosen", 6.5) if dot.chosen else ("", 4.5)
            chart.dot(dot.x, dot.y, f"dot {dot.kind}{chosen}", radius=radius, title=dot.text)
    return chart.svg(axes.label)
