"""The report of a tuning job: one HTML page that opens offline, at any time during the job.

Its only script sorts the table of measurements (`plait_report.page.POLICY`).
"""

from __future__ import annotations

from datetime import UTC, datetime

from plait_autoconfig.jobs.state import Interval, JobState, Recommendation
from plait_autoconfig.report import figures, sections
from plait_autoconfig.report.formatting import duration_text, gain_words, metric_unit, metric_words, sentence, with_unit
from plait_report.page import footer, header, html_page, number, tiles

_ALIKE = 0.005  # would be told as 0 %


def report_page(state: JobState, *, command: str, made_by: str = "", job_text: str = "") -> str:
    """Return the page, with what the state does not contain: the command that reruns the job, who made the page, and
    the job's text as given; without `job_text` the job is written out with all its defaults."""
    several, answer = len(state.spec.goal.goals) > 1, state.recommendation
    body = [
        _head(state),
        _tiles(state, answer),
        sections.choices(state) if several else "",
        sections.difference(state, answer) if answer is not None and not several else "",
        sections.limits(state) if _nothing_kept(state) else "",
        sections.progress(state),
        sections.trade_offs(state),
        sections.importance(state),
        sections.slices(state),
        sections.drift(state),
        sections.all_trials(state) if state.rows else "",
        sections.facts(state),
        sections.reproduction(command, job_text or sections.job_text(state)),
        footer(made_by),
    ]
    return html_page(f"{state.spec.name}: {verdict(state)}", body, sorts=True)


# ---- the verdict -----------------------------------------------------------------------------------------------------


def verdict(state: JobState) -> str:
    """Return the headline."""
    return _verdict(state)[1]


def _verdict(state: JobState) -> tuple[str, str]:
    """Return the CSS class and the text."""
    if state.phase == "failed":
        return "none", "The job failed"
    if state.phase == "finished" and _nothing_kept(state):
        return "none", "Nothing keeps the limits"
    if state.phase == "finished" and state.answers:
        return _answered(state)
    running = {
        "searching": "Searching",
        "confirming": "Confirming the best",
        "waiting": "Not finished" if state.rows else "Not begun",
        "cancelled": "Cancelled",
    }
    words = running.get(state.phase, "Nothing to recommend")
    goal = state.spec.goal.goals[0]
    gain = state.best.gain.get(goal.metric) if state.best is not None else None
    return "unsure", f"{words}: {gain_words(goal, gain)} so far" if gain and gain > 1.0 else words


def _answered(state: JobState) -> tuple[str, str]:
    goals, answer = state.spec.goal.goals, state.recommendation
    if len(goals) > 1 or answer is None:
        count = len(state.answers)
        words = f"{count} configurations to choose from"
        return "met", "One configuration is best in every goal" if count == 1 else words
    if not answer.changes:
        return "", "The default stays"
    if figures.default_breaks(state, confirmed=answer.confirmed):
        return "met", "Keeps every limit; the default does not"
    gain = answer.gain.get(goals[0].metric)
    if gain is None:
        return "met", "A better configuration"
    if abs(gain.value - 1.0) < _ALIKE:
        return "", "No better than the default"
    sure = answer.confirmed and gain.low is not None and gain.low > 1.0
    return "met" if sure else "unsure", gain_words(goals[0], gain.value).capitalize()


def _nothing_kept(state: JobState) -> bool:
    return bool(state.rows) and not state.answers and not state.bests


def _head(state: JobState) -> str:
    over = [f"tuning job “{state.spec.name}”", state.spec.target.app]
    if state.rows:
        over.append(f"{datetime.fromtimestamp(state.rows[0].started_at_s, tz=UTC):%Y-%m-%d %H:%M} UTC")
    return header(over, _verdict(state), _leads(state), state.warnings)


def _leads(state: JobState) -> list[str]:
    """Return the answer in a sentence, then why the search stopped."""
    answers = [answer.sentence for answer in state.answers[:1]] if len(state.spec.goal.goals) == 1 else []
    return [each[:1].upper() + sentence(each[1:]) for each in [*(answers or [state.binding]), state.reason] if each]


# ---- tiles -----------------------------------------------------------------------------------------------------------


def _tiles(state: JobState, answer: Recommendation | None) -> str:
    goals, remaining = state.spec.goal.goals, state.remaining
    shown = []
    metrics = answer.metrics if answer else state.best.metrics if state.best else {}
    before = figures.metrics_of(state, state.spec.default, confirmed=answer is not None and answer.confirmed)
    if len(goals) == 1:
        for name in dict.fromkeys([goals[0].metric, *state.spec.goal.metrics]):
            if name in metrics:
                was = f"default {with_unit(name, before[name])}" if name in before else ""
                shown.append((metric_words(name), number(metrics[name]), metric_unit(name), was))
    gain = answer.gain.get(goals[0].metric) if answer and answer.changes else None
    if gain is not None and answer is not None:
        better = "times better" if goals[0].direction == "max" else "times lower"
        shown.append((better, f"{gain.value:.2f}", "", _sure(gain, answer)))
    measured = f"of {state.cells} configurations" if state.exhaustive else "configurations"
    took, unit = duration_text(remaining.used_s).split(" ")
    shown.append(("tried", str(state.tried), "", measured))
    shown.append(("took", took, unit, f"{len(state.rows)} measurements"))
    return tiles(shown)


def _sure(gain: Interval, answer: Recommendation) -> str:
    if gain.low is None or gain.high is None:
        return "measured once: no interval"
    return f"{gain.low:.2f} to {gain.high:.2f}" + (f", {answer.rounds} rounds" if answer.confirmed else "")
