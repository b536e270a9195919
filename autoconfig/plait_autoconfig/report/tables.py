"""The tables of the report: what to change, its effect, which limit binds, and every trial."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.state import JobState, MeasurementRow, Recommendation
from plait_autoconfig.objective import Limit
from plait_autoconfig.report import figures
from plait_autoconfig.report.formatting import change_text, config_text, metric_title, sentence, value_text
from plait_autoconfig.values import config_key
from plait_report.page import cell, number, row_head, section, table

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
