"""Several jobs side by side: what each found, with what confidence, and how much it cost to find.

Measurements of different jobs do not alternate, so their metrics are not compared directly, only how much each job
gained over the default, and only for jobs with the same objective under the same load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import Interval, JobState, Phase
from plait_autoconfig.report.formatting import config_text, duration_text
from plait_autoconfig.report.page import verdict
from plait_autoconfig.values import Config
from plait_report.page import number

_DECIDE = ("objective", "limits", "rate_tolerance", "target", "scenarios", "offered", "prices", "reference")
"""The parts of a job that decide what a gain means: if they differ, gains cannot be compared."""

_SEARCH = ("knobs", "constraints", "budget", "repeats", "confirm", "designer", "stop", "seed", "library")
"""The parts of a job that decide how well it searches: they may differ, and the differences are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one job. `config`: recommended, or the best so far (`recommended` False); None: nothing.

    `gain`: times better than the default, by goal.
    """

    name: str
    phase: Phase
    headline: str
    designer: str
    seed: int
    tried: int
    measurements: int
    used_s: float
    recommended: bool
    confirmed: bool
    config: Config | None
    metrics: dict[str, float]
    gain: dict[str, Interval]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsCompared:
    """The comparison, also as JSON. `incomparable`: why gains cannot be compared. `differences`: other settings that
    differ."""

    jobs: tuple[Finding, ...]
    incomparable: tuple[str, ...]
    differences: tuple[str, ...]
    sentence: str


def compare(states: Sequence[JobState]) -> JobsCompared:
    """Compare the jobs, in the order given."""
    findings = tuple(_uniquely_named([finding(state) for state in states]))
    specs = [state.spec for state in states]
    incomparable = [name for name in _DECIDE if _differs(specs, name)]
    if len({state.subject.hardware for state in states if state.subject is not None}) > 1:
        incomparable.append("machine")
    return JobsCompared(
        jobs=findings,
        incomparable=tuple(incomparable),
        differences=tuple(name for name in _SEARCH if _differs(specs, name)),
        sentence=_sentence(states, findings, incomparable),
    )


def finding(state: JobState) -> Finding:
    """Return the result of one job. A front is represented by the configuration that is best in its first goal."""
    first = state.spec.goal.goals[0]
    answer = min(state.answers, key=lambda each: first.loss(each.metrics), default=None)
    best = min(state.bests, key=lambda each: first.loss(each.metrics), default=None)
    gain = answer.gain if answer is not None else {}
    if answer is None and best is not None:
        gain = {metric: Interval(value=value) for metric, value in best.gain.items()}
    chosen = answer or best
    return Finding(
        name=state.spec.name,
        phase=state.phase,
        headline=verdict(state),
        designer=state.spec.designer.name,
        seed=state.spec.seed,
        tried=state.tried,
        measurements=len(state.rows),
        used_s=state.remaining.used_s,
        recommended=answer is not None,
        confirmed=answer is not None and answer.confirmed,
        config=None if chosen is None else chosen.config,
        metrics={} if chosen is None else dict(chosen.metrics),
        gain=dict(gain),
    )


def _uniquely_named(findings: Sequence[Finding]) -> list[Finding]:
    """Append the position to the names of jobs that share one."""
    names = [each.name for each in findings]
    return [
        replace(each, name=f"{each.name} ({at})") if names.count(each.name) > 1 else each
        for at, each in enumerate(findings, 1)
    ]


def comparison_rows(findings: Sequence[Finding]) -> list[list[str]]:
    """Return a table with one column per job; the heading comes first."""
    metrics = dict.fromkeys(name for each in findings for name in each.metrics)
    knobs = dict.fromkeys(name for each in findings for name in each.config or {})
    goals = dict.fromkeys(name for each in findings for name in each.gain)
    return [
        ["", *(each.name for each in findings)],
        ["result", *(each.headline for each in findings)],
        ["designer", *(f"{each.designer}, seed {each.seed}" for each in findings)],
        ["tried", *(f"{each.tried} in {duration_text(each.used_s)}" for each in findings)],
        ["how sure", *(_how_sure(each) for each in findings)],
        *([f"gain {name}", *(_gain_text(each.gain.get(name)) for each in findings)] for name in goals),
        *([name, *(number(each.metrics.get(name)) for each in findings)] for name in metrics),
        *([name, *(_value(each.config, name) for each in findings)] for name in knobs),
    ]


def _how_sure(each: Finding) -> str:
    if each.config is None:
        return "-"
    if not each.recommended:
        return "best so far"
    return "confirmed" if each.confirmed else "not measured again"


def _gain_text(gain: Interval | None) -> str:
    if gain is None:
        return "-"
    if gain.low is None or gain.high is None:
        return f"{gain.value:.2f}"
    return f"{gain.value:.2f} ({gain.low:.2f} to {gain.high:.2f})"


def _value(config: Config | None, name: str) -> str:
    return config_text({name: config[name]}).partition("=")[2] if config is not None and name in config else "-"


def _sentence(states: Sequence[JobState], findings: Sequence[Finding], incomparable: Sequence[str]) -> str:
    if incomparable:
        return f"the gains cannot be compared: the jobs differ in {', '.join(incomparable)}"
    goal = states[0].spec.goal.goals[0]
    gains = [(each.gain[goal.metric], each.name) for each in findings if goal.metric in each.gain]
    if len(gains) < 2:
        return "there is nothing to compare yet: fewer than two jobs have found something"
    gains.sort(key=lambda each: -each[0].value)
    (best, name), (second, other) = gains[0], gains[1]
    said = f"{_gain_text(best)} against {_gain_text(second)} times the default in {goal.metric}"
    if best.low is None or second.high is None:
        return f"{name} is ahead of {other}, {said}; measured too seldom to say more"
    if best.low > second.high:
        return f"{name} found more than {other}, {said}"
    return f"no difference beyond noise between {name} and {other}, {said}"


def _differs(specs: Sequence[JobSpec], name: str) -> bool:
    values = [spec.model_dump(include={name})[name] for spec in specs]
    return any(value != values[0] for value in values)
