"""The sections of the report: what to change and its effect, which limit binds, the charts, every trial, and the facts
at its end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

import yaml

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.state import JobState, MeasurementRow, Recommendation
from plait_autoconfig.knobs import Knob
from plait_autoconfig.objective import Goal, Limit
from plait_autoconfig.report import figures
from plait_autoconfig.report.figures import Axes, Dot, Kind
from plait_autoconfig.report.formatting import (
    change_text,
    config_text,
    duration_text,
    facts_text,
    metric_title,
    metric_words,
    sentence,
    signed_percent,
    value_text,
    with_unit,
)
from plait_autoconfig.values import Value, config_key
from plait_report.charts import NARROW, WIDE, figure
from plait_report.page import cell, details, number, row_head, section, table

_LEGEND: dict[Kind, str] = {
    "ok": "kept every limit",
    "over": "broke a limit",
    "failed": "gave no measurement",
    "reference": "the default, measured",
    "confirm": "measured again",
}
_MAX_NAMES = 12  # values of a knob that get a place each; more are drawn along a scale
_KINDS = {
    MeasurementKind.WARM_UP: "warm-up",
    MeasurementKind.TRIAL: "trial",
    MeasurementKind.REFERENCE: "reference",
    MeasurementKind.CONFIRM: "confirmation",
    MeasurementKind.CHECK: "check",
}
_TEXT = ("what", "verdict", "why")


# ---- the answer ------------------------------------------------------------------------------------------------------


def difference(state: JobState, answer: Recommendation) -> str:
    """Return what the recommendation changes, and its effect on every metric."""
    if not answer.changes:
        note = "The default itself is recommended: nothing tried was better beyond doubt."
        return section("What to change", note, _metrics(state, answer))
    default = state.spec.default
    rows = []
    for name in state.spec.knobs:
        before, after = default.get(name), answer.config.get(name)
        changed = name in answer.changes
        rows.append(
            [
                row_head(_knob_title(state, name)),
                cell(_setting(before), "quiet" if changed else ""),
                cell(_setting(after), "changed" if changed else ""),
                cell(state.spec.knobs[name].sets or name, "text quiet"),
            ]
        )
    note = state.spec.reference.why and f"The default: {sentence(state.spec.reference.why)}"
    knobs = table(("knob", "default", "recommended", "sets"), rows, text=("sets",))
    return section("What to change", note, knobs + _metrics(state, answer))


def _metrics(state: JobState, answer: Recommendation) -> str:
    """Return the default's metrics against those of the recommended configuration; those of the objective first."""
    before = figures.metrics_of(state, state.spec.default, confirmed=answer.confirmed)
    broken = figures.default_breaks(state, confirmed=answer.confirmed)
    names = dict.fromkeys([*state.spec.goal.metrics, *answer.metrics])
    limits = {limit.metric: str(limit).removeprefix(limit.metric).strip() for limit in state.spec.goal.limits}
    rows = [
        [
            row_head(metric_title(name)),
            cell(number(before.get(name)), "bad" if name in broken else ""),
            cell(number(answer.metrics[name])),
            cell(change_text(before.get(name, 0.0), answer.metrics[name]), "quiet"),
            cell(limits.get(name, ""), "quiet"),
        ]
        for name in names
        if name in answer.metrics
    ]
    return table(("metric", "default", "recommended", "change", "limit"), rows)


def _knob_title(state: JobState, name: str) -> str:
    unit = state.spec.knobs[name].unit
    return f"{name} ({unit})" if unit and unit not in name else name


def _setting(value: Any) -> str:
    return "not active" if value is None else value_text(value)


def choices(state: JobState) -> str:
    """Return the recommended front of several goals: a row per configuration."""
    goals, metrics = state.spec.goal.goals, state.spec.goal.metrics
    found: Sequence[Any] = state.answers or state.front
    rows = [
        [cell(number(each.metrics.get(name)), "good" if at < len(goals) else "") for at, name in enumerate(metrics)]
        + [cell(_setting(each.config.get(name))) for name in state.spec.knobs]
        for each in found
    ]
    columns = [*map(metric_title, metrics), *state.spec.knobs]
    note = "No other configuration that was tried beats one of these in one goal without losing in another."
    return section("The choice", note, table(columns, rows)) if rows else ""


# ---- nothing feasible ------------------------------------------------------------------------------------------------


def limits(state: JobState) -> str:
    """Return every limit: how many configurations kept it, and which came nearest."""
    cells = [each for each in figures.cells(state) if each.outcome.failure is None]
    rows = [_limit_row(limit, cells) for limit in state.spec.goal.limits] if cells else []
    failed = [row for row in figures.finished(state) if row.outcome and row.outcome.failure]
    note = f"{len(failed)} of {len(figures.finished(state))} measurements failed." if failed else ""
    if not rows:
        return section("The limits", note or "Nothing was measured.")
    columns = ("limit", "kept by", "nearest", "beyond", "at", "the configuration")
    return section("The limits", note, table(columns, rows, text=("the configuration",)))


def _limit_row(limit: Limit, cells: Sequence[Any]) -> list[str]:
    excesses = [limit.excess(each.outcome.metrics) for each in cells]
    kept = sum(excess <= 0.0 for excess in excesses)
    nearest = cells[excesses.index(min(excesses))]
    beyond = f"{100.0 * min(excesses):.0f} %" if limit.value else number(min(excesses))
    return [
        row_head(str(limit)),
        cell(f"{kept} of {len(cells)}", "" if kept else "bad"),
        cell(number(nearest.outcome.metrics[limit.metric])),
        cell("kept" if min(excesses) <= 0.0 else beyond, "" if kept else "bad"),
        cell(f"trial {nearest.trials[0].number}"),
        cell(config_text(nearest.config), "text"),
    ]


# ---- charts ----------------------------------------------------------------------------------------------------------


def progress(state: JobState) -> str:
    """Return the best so far, one chart per goal."""
    rows = figures.finished(state)
    if not rows:
        return ""
    drawn = []
    for goal in state.spec.goal.goals:
        dots = figures.dots(state, goal.metric, ((row, row.number) for row in rows))
        steps = figures.best_over_time(state, goal)
        default = figures.metrics_of(state, state.spec.default).get(goal.metric)
        axes = Axes(
            x="measurement", y=metric_title(goal.metric), label=f"{goal} of every measurement, and the best so far"
        )
        level = "" if default is None else f"the default, {with_unit(goal.metric, default)}"
        drawn.append(_figure(partial(figures.best_so_far, dots, steps, axes, default=default), dots, level=level))
    note = "The line is the mean of the best configuration so far. " + _band_words(state)
    return section("Best so far", note, "".join(drawn))


def trade_offs(state: JobState) -> str:
    """Return charts: with several goals each against the first, with one goal the goal against the first limit."""
    goals, limits = state.spec.goal.goals, state.spec.goal.limits
    if len(goals) > 1:
        drawn = [_pair(state, goals[0].metric, goal, front=goals[0]) for goal in goals[1:]]
        note = "The line is the front: to get better in one goal, one must give up some of another."
        return section("What is traded for what", note, "".join(drawn)) if any(drawn) else ""
    limit = next((each for each in limits if each.metric != goals[0].metric), None)
    if limit is None:
        return ""
    drawn = [_pair(state, limit.metric, goals[0], limit=limit)]
    note = f"Configurations in the shaded part break the limit {limit}."
    return section("The goal against the limit", note, "".join(drawn)) if any(drawn) else ""


def drift(state: JobState) -> str:
    """Return how the reference drifted, and thus the machine."""
    metric = state.spec.goal.goals[0].metric
    points = [(point.at_s, point.ratios[metric], point.number) for point in state.drift if metric in point.ratios]
    if len(points) < 2:
        return ""
    first_s = points[0][0]
    drawn = [((at_s - first_s) / 60.0, ratio, f"{number}: {signed_percent(ratio)}") for at_s, ratio, number in points]
    bound = state.spec.reference.noise
    axes = Axes(
        x="minutes", y=f"change of {metric_words(metric)}", label="How the default's own result moved over time"
    )
    note = (
        "The default was measured again and again: what moves here beyond noise (usually "
        f"±{100 * bound:.0f} %) is the machine, and is divided out of later measurements."
    )
    figure = _figure(partial(figures.drift, drawn, axes, bound=bound))
    return section("Drift of the machine", note, figure)


def importance(state: JobState) -> str:
    """Return how much each knob mattered."""
    cells = figures.cells(state)
    shares = figures.knob_importance(state.spec.space, state.spec.goal, cells)
    if not shares:
        why = f"{len(cells)} configurations were measured; of fewer than {figures.FEWEST_CELLS} nothing can be said."
        if len(cells) >= figures.FEWEST_CELLS:
            why = "Nothing can be said: all configurations did equally well."
        return section("Which knobs mattered", why)
    rows = "".join(
        f'<span>{escape(name)}</span><i style="width:{100.0 * share / shares[0][1]:.1f}%"></i>'
        f"<b>{100.0 * share:.0f} %</b>"
        for name, share in shares
    )
    note = (
        f"How much the goal varies with each knob over the whole space, as a model of the {len(cells)} configurations "
        "that were measured has it. From so few it is a hint, not a proof."
    )
    return section("Which knobs mattered", note, f'<div class="bars">{rows}</div>')


def slices(state: JobState) -> str:
    """Return the goal over each knob."""
    rows, goal = figures.finished(state), state.spec.goal.goals[0]
    if not any(row.outcome is not None and row.outcome.metrics for row in rows):
        return ""
    drawn = "".join(figure(_slice(state, knob, rows, goal)) for knob in state.spec.space.knobs)
    what = metric_title(goal.metric).capitalize()
    note = f"{what} over one knob at a time; the others vary too, so a trend may belong to another knob."
    return section("Knob by knob", note, f'<div class="slices">{drawn}</div>')


def _band_words(state: JobState) -> str:
    if not figures.noise_of(state, state.spec.goal.goals[0]).known:
        return "Nothing was measured twice, so there is no interval."
    return "The band is its 95 % interval, from how much repeated measurements of a configuration differ."


def _pair(state: JobState, x: str, goal: Goal, *, front: Goal | None = None, limit: Limit | None = None) -> str:
    """Return the goal over another metric, as a figure; empty if nothing was measured."""
    measured = [(row, row.outcome.metrics) for row in figures.finished(state) if row.outcome is not None]
    dots = figures.dots(state, goal.metric, ((row, metrics[x]) for row, metrics in measured if x in metrics))
    if not dots:
        return ""
    line = figures.pareto_line(state, front, goal) if front else ()
    edge = None if limit is None else (str(limit), limit.value, limit.bound == "at_most")
    axes = Axes(x=metric_title(x), y=metric_title(goal.metric), label=f"{goal.metric} against {x}")
    return _figure(partial(figures.trade_off, dots, line, axes, limit=edge), dots)


def _slice(state: JobState, knob: Knob, rows: Sequence[MeasurementRow], goal: Goal) -> str:
    used = [(row, row.config[knob.name]) for row in rows if knob.name in row.config]
    values = _places(knob, [value for _, value in used])
    places = ((row, float(values.index(value)) if values else float(value)) for row, value in used)
    dots = figures.dots(state, goal.metric, places)
    axes = Axes(x=_knob_title(state, knob.name), y="", label=f"{goal.metric} over {knob.name}")
    return figures.knob_slice(dots, axes, names=[value_text(value) for value in values])


def _places(knob: Knob, used: Sequence[Value]) -> list[Value]:
    """Return the values in order if they are few enough for a position each; otherwise none."""
    values = list(dict.fromkeys(used))
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if len(values) > _MAX_NAMES and numbers:
        return []
    own = [knob.value_at(index) for index in range(knob.count or 0)] if (knob.count or 99) <= _MAX_NAMES else []
    missing = [value for value in values if value not in own]
    return [*own, *missing] if own else sorted(values, key=lambda value: (isinstance(value, str), value))


def _figure(draw: Callable[..., str], dots: Sequence[Dot] = (), *, level: str = "") -> str:
    """Return a chart for wide screens and one for narrow ones, and the legend."""
    keys: dict[str, str] = {kind: text for kind, text in _LEGEND.items() if any(dot.kind == kind for dot in dots)}
    keys |= {"ok chosen": "recommended"} if any(dot.chosen for dot in dots) else {}
    keys |= {"level": level} if level else {}
    return figure(draw(frame=WIDE), draw(frame=NARROW), keys=keys)


# ---- all trials ------------------------------------------------------------------------------------------------------


def all_trials(state: JobState) -> str:
    """Return every measurement with its verdict; clicking a column heading sorts by it."""
    metrics = state.spec.goal.metrics
    columns = [
        "number", "what", "verdict", *map(metric_title, metrics), "why",
        *state.spec.knobs, "seconds", "CPU cores", "GiB",
    ]  # fmt: skip
    chosen = figures.recommended_keys(state)
    rows = [_trial_row(state, row, chosen) for row in state.rows]
    note = "With the drift of the machine divided out of the metrics. Click a column's head to sort."
    return section("All measurements", note, table(columns, rows, text=_TEXT, sorts=True))


def _trial_row(state: JobState, row: MeasurementRow, chosen: frozenset[Hashable]) -> list[str]:
    metrics: Mapping[str, float] = row.outcome.metrics if row.outcome is not None else {}
    words, kind = _verdict(row)
    recommended = config_key(row.config) in chosen
    why = "; ".join(part for part in (row.reason, row.note) if part)
    return [
        row_head(str(row.number)),
        cell(_KINDS[row.kind], "plain"),
        cell(f"{words}, recommended" if recommended else words, "plain good" if recommended else kind),
        *(_sorted(metrics.get(name)) for name in state.spec.goal.metrics),
        cell(why, "text"),
        *(cell(_setting(row.config.get(name)), sort=str(row.config.get(name, ""))) for name in state.spec.knobs),
        _sorted(row.duration_s),
        _sorted(row.samples.cpu_cores or None),
        _sorted(row.samples.memory_bytes / 2**30 or None),
    ]


def _verdict(row: MeasurementRow) -> tuple[str, str]:
    """Return the text and the CSS class."""
    if row.status != "finished" or row.outcome is None:
        return row.status, "plain quiet"
    if row.outcome.failure is not None:
        return row.outcome.failure.replace("_", " "), "plain bad"
    return ("good", "plain") if row.feasible else ("broke a limit", "plain bad")


def _sorted(value: float | None) -> str:
    """Return a number that sorts by its full value."""
    return cell(number(value), sort="" if value is None else str(value))


# ---- what was measured, and on what ----------------------------------------------------------------------------------


def facts(state: JobState) -> str:
    """Return what was measured on, and how."""
    spec, subject, left = state.spec, state.subject, state.remaining
    space = f"of all {state.cells}" if state.exhaustive else "of more than can be listed"
    said = {"objective": str(spec.goal), "space": f"{state.tried} configurations measured, {space}"}
    if subject is not None:
        own, accelerator = subject.hardware, subject.hardware.accelerator
        machine = [own.name, f"{own.cpus} cores" if own.cpus else ""]
        machine += [f"{own.memory_bytes / 2**30:.0f} GiB" if own.memory_bytes else ""]
        machine += [f"{own.accelerators} x {accelerator}" if accelerator else ""]
        said |= {"service": subject.service, "machine": ", ".join(filter(None, machine))}
        said |= {"workload": facts_text(subject.workload), "versions": facts_text(subject.versions)}
    said |= {
        "load": ", ".join(each if isinstance(each, str) else "in the job" for each in spec.scenarios)
        + (" at its own rate" if spec.offered == "given" else ", at the highest rate that holds"),
        "prices": f"{spec.prices.core:g} per core, {spec.prices.gpu:g} per GPU, {spec.prices.gib:g} per GiB and hour",
        "designer": f"{spec.designer.name}, seed {spec.seed}",
        "budget": f"{left.used_trials} of {spec.budget.trials} trials, {duration_text(left.used_s)} used"
        + (f", of which load tests took {left.load_s / left.used_s:.1%}" if left.load_s else ""),
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in said.items() if text)
    return section("What was measured, and on what", "", f'<dl class="facts">{items}</dl>')


def reproduction(command: str, job_text: str) -> str:
    """Return the command and the job that it needs."""
    return section(
        "Run it again",
        "With the job below in a file of that name.",
        f'<pre class="command">{escape(command)}</pre>',
        details("The job", job_text),
    )


def job_text(state: JobState) -> str:
    """Return the job with every default written out, as YAML."""
    return yaml.safe_dump(state.spec.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
