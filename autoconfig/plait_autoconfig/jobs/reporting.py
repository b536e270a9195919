"""The current state of a job, computed from its records (`state.JobState`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from plait_autoconfig.jobs.answers import gain_of, recommendations, values_of
from plait_autoconfig.jobs.drift import drift_warnings, ratios, reference_outcomes
from plait_autoconfig.jobs.measurer import MeasurementKind, Samples
from plait_autoconfig.jobs.plan import Done, NoReference, next_step, why_over
from plait_autoconfig.jobs.promised_rate import holds
from plait_autoconfig.jobs.records import JobFacts, Record, given_up, searched_trials, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import Best, DriftPoint, JobState, MeasurementRow, Phase, Remaining
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.jobs.uncertainty import Noise
from plait_autoconfig.objective import Goal
from plait_autoconfig.values import Cell, Trial, TrialOutcome, cells_of, config_key


def read_state(store: JobStore, *, now_s: float | None = None) -> JobState:
    """Return the state of a job, whoever works on it. `now_s`: seconds since 1970. Raises `JobBroken`."""
    now = time.time() if now_s is None else now_s
    return state_of(store.spec, store.records(), store.facts(), workers=store.workers(now_s=now), now_s=now)


def state_of(
    spec: JobSpec,
    records: Sequence[Record],
    facts: JobFacts | None = None,
    *,
    workers: tuple[str, ...] | None = None,
    now_s: float = 0.0,
) -> JobState:
    """Return the state that follows from the records. `workers`: those that are alive, if that is known."""
    facts = facts or JobFacts()
    if workers is not None:
        records = tuple(each if each.claim.worker in workers else given_up(each) for each in records)
    used_s = used_seconds(records, now_s=now_s)
    phase, reason = _phase(spec, records, used_s, facts, is_alone=workers == ())
    unsaid = (facts.failure,) if facts.failure not in {"", reason} else ()  # an over job may have failed at its end
    trials = searched_trials(records)
    best, front = _bests(spec, records, trials)
    cells = spec.space.cells()
    return JobState(
        spec=spec,
        subject=facts.subject,
        phase=phase,
        reason=reason,
        rows=tuple(_row(spec, record, best, now_s) for record in records),
        best=best,
        front=front,
        answers=recommendations(spec, records) if phase in {"finished", "cancelled"} else (),
        binding=_binding(spec, records, trials),
        remaining=_remaining(spec, records, used_s),
        drift=_drift(records),
        warnings=(*unsaid, *facts.warnings, *drift_warnings(records, spec.goal.metrics, spec.reference)),
        workers=workers or (),
        cells=len(cells),
        exhaustive=spec.space.exhaustive,
        tried=len({config_key(trial.config) for trial in trials}),
        best_so_far=_best_so_far(spec, trials),
    )


def used_seconds(records: Sequence[Record], *, now_s: float) -> float:
    """Return the seconds spent on measurements, running ones included."""
    finished = sum(record.measured.duration_s for record in records if record.measured is not None)
    return finished + sum(max(0.0, now_s - each.claim.at_s) for each in records if each.status == "running")


def state_to_json(state: JobState) -> dict[str, Any]:
    """Return plain JSON, for `--json` and HTTP."""
    shown = {name: getattr(state, name) for name in state.__slots__ if name != "spec"}
    plain: dict[str, Any] = to_jsonable_python({**shown, "name": state.spec.name, "job": state.spec})
    return plain


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _phase(
    spec: JobSpec, records: Sequence[Record], used_s: float, facts: JobFacts, *, is_alone: bool
) -> tuple[Phase, str]:
    step = next_step(spec, records, used_s=used_s, exhausted=facts.exhausted)
    if isinstance(step, Done):
        return "finished", step.why
    if facts.done and not any(record.status == "running" for record in records):  # another worker may have begun later
        return "finished", facts.done
    if isinstance(step, NoReference):
        return "failed", step.why
    if facts.cancelled:
        return "cancelled", "it was cancelled"
    if facts.failure:
        return "failed", facts.failure
    if is_alone:
        return "waiting", "nobody works on it" + ("; run it again to continue" if records else "")
    active = [record for record in records if record.status != "lost"]
    why = why_over(spec, active, spec.budget.left_s(used_s), facts.exhausted)
    return ("confirming", why) if why else ("searching", "")


def _binding(spec: JobSpec, records: Sequence[Record], trials: Sequence[Trial]) -> str:
    """Return why nothing is feasible: in the search, or by all that was measured."""
    why = spec.goal.why_none(trials) if trials else ""
    again = "" if why or not trials else spec.goal.why_none(trials_of(records))
    return f"measured again, {again}" if again else why


def _remaining(spec: JobSpec, records: Sequence[Record], used_s: float) -> Remaining:
    made = sum(record.kind is MeasurementKind.TRIAL and record.status != "lost" for record in records)
    return Remaining(
        trials=max(0, spec.budget.trials - made),
        seconds=None if spec.budget.minutes is None else max(0.0, spec.budget.left_s(used_s)),
        used_trials=made,
        used_s=used_s,
        load_s=sum(record.measured.load_s for record in records if record.measured is not None),
    )


def _drift(records: Sequence[Record]) -> tuple[DriftPoint, ...]:
    outcomes = reference_outcomes(records)
    return tuple(
        DriftPoint(number=record.number, at_s=record.claim.at_s, ratios=ratios(outcomes[0][1], raw))
        for record, raw in outcomes
    )


def _bests(spec: JobSpec, records: Sequence[Record], trials: Sequence[Trial]) -> tuple[Best | None, tuple[Best, ...]]:
    goal = spec.goal
    reference = next((cell for cell in cells_of(trials) if config_key(cell.config) == config_key(spec.default)), None)
    if len(goal.goals) > 1:
        return None, tuple(_best(spec, records, cell, reference) for cell in goal.front(trials))
    cell = goal.best(trials)
    return (None if cell is None else _best(spec, records, cell, reference)), ()


def _best(spec: JobSpec, records: Sequence[Record], cell: Cell, reference: Cell | None) -> Best:
    # As measured: their scatter includes drift, so intervals are rather too wide.
    measured = [(record.config, record.raw) for record in records if record.kind.compares]
    goals = {
        goal.metric: Noise.of(goal.metric, measured, seed=spec.seed).mean(values_of(goal.metric, cell))
        for goal in spec.goal.goals
    }
    known = {} if reference is None else reference.outcome.metrics
    gains = {goal.metric: gain_of(goal, cell.outcome.metrics, known) for goal in spec.goal.goals}
    return Best(
        number=cell.trials[0].number,
        config=cell.config,
        metrics=cell.outcome.metrics,
        count=len(cell.trials),
        goals=goals,
        gain={metric: gain for metric, gain in gains.items() if gain is not None},
    )


def _best_so_far(spec: JobSpec, trials: Sequence[Trial]) -> tuple[tuple[int, float], ...]:
    """Return every change of the best, judged by single trials in their order."""
    if len(spec.goal.goals) > 1:
        return ()
    goal, found = spec.goal.goals[0], []
    best = float("inf")
    for trial in trials:
        if spec.goal.feasible(trial.outcome) and goal.loss(trial.outcome.metrics) < best:
            best = goal.loss(trial.outcome.metrics)
            found.append((trial.number, trial.outcome.metrics[goal.metric]))
    return tuple(found)


def _row(spec: JobSpec, record: Record, best: Best | None, now_s: float) -> MeasurementRow:
    outcome, measured = record.outcome, record.measured
    feasible = outcome is not None and spec.goal.feasible(outcome)
    duration_s = max(0.0, now_s - record.claim.at_s) if record.status == "running" else 0.0
    return MeasurementRow(
        number=record.number,
        kind=record.kind,
        status=record.status,
        config=record.config,
        raw=record.raw,
        outcome=outcome,
        drift=record.drift,
        feasible=feasible,
        reason=why_rejected(spec, record, best),
        note="" if measured is None else measured.note,
        worker=record.claim.worker,
        started_at_s=record.claim.at_s,
        duration_s=duration_s if measured is None else measured.duration_s,
        load_s=0.0 if measured is None else measured.load_s,
        samples=Samples() if measured is None else measured.samples,
        restarted=() if measured is None else measured.restarted,
        artefacts=() if measured is None else measured.artefacts,
    )


def why_rejected(spec: JobSpec, record: Record, best: Best | None) -> str:
    """Return a description: the failure, the limits violated and by how much, or how much worse than the best it is; of
    a check the rate, and whether it held."""
    outcome = record.outcome
    if outcome is None:
        return f"lost: {record.lost}" if record.lost else ""
    if outcome.failure is not None:
        kind = outcome.failure.replace("_", " ")
        return f"{kind}: {outcome.detail}" if outcome.detail else kind
    if record.kind is MeasurementKind.CHECK:
        return f"{record.claim.rate_per_s:.3g}/s {'held' if holds(spec, record) else 'missed'}"
    missed = [
        f"{limit} missed by {100.0 * excess:.3g} % ({outcome.metrics[limit.metric]:.5g})"
        if limit.value
        else f"{limit} missed: {outcome.metrics[limit.metric]:.5g}"
        for limit in spec.goal.limits
        if (excess := limit.excess(outcome.metrics)) > 0.0
    ]
    if missed:
        return "; ".join(missed)
    if best is None or config_key(best.config) == record.key or record.kind is not MeasurementKind.TRIAL:
        return ""
    return _worse(spec.goal.goals[0], outcome, best)


def _worse(goal: Goal, outcome: TrialOutcome, best: Best) -> str:
    ours, theirs = outcome.metrics[goal.metric], best.metrics[goal.metric]
    if ours == theirs:
        return f"as good as the best in {goal.metric}, but later"
    if theirs == 0.0:
        return f"{goal.metric} is {ours:.4g}, the best has 0"
    change = 100.0 * (ours - theirs) / abs(theirs)
    return f"{goal.metric} is {abs(change):.3g} % {'below' if change < 0 else 'above'} the best"
