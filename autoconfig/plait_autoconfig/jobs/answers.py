"""The answer of a job: which configuration, how much better than the reference, and with what confidence.

Which one is decided by everything that was measured (`confidence`); by how much it is better is said from fresh
measurements of it and of the reference, because the best of many trials is partly the luckiest.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from plait_autoconfig.jobs.plan import candidates_of, verdict_on
from plait_autoconfig.jobs.promised_rate import held_rate
from plait_autoconfig.jobs.records import Record, fresh_trials, trials_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import Interval, PromisedRate, Recommendation
from plait_autoconfig.jobs.uncertainty import Noise
from plait_autoconfig.objective import GOODPUT_PER_S, Goal
from plait_autoconfig.values import Cell, Config, TrialOutcome, Value, cells_of, config_key

_OPEN = 0.8  # less sure than this, the answer says that more could be found out


def recommendations(spec: JobSpec, records: Sequence[Record]) -> tuple[Recommendation, ...]:
    """Return the answer of a finished search: one, or the front of several goals; none if nothing is feasible."""
    fresh = fresh_trials(records)
    own = config_key(spec.default)
    if len(spec.goal.goals) > 1:
        trials = fresh if any(config_key(trial.config) != own for trial in fresh) else trials_of(records)
        chosen = [config_key(cell.config) for cell in spec.goal.front(trials)]
        sure = 0.0
    else:
        candidates = candidates_of(records)
        now, _ = verdict_on(spec, candidates)
        if now.leader is None:
            return ()
        chosen, sure = [config_key(candidates[now.leader].config)], now.sure
        again = {config_key(cell.config) for cell in cells_of(fresh)}
        trials = fresh if {chosen[0], own} <= again else trials_of(records)
    cells = {config_key(cell.config): cell for cell in cells_of(trials)}
    return tuple(_recommendation(spec, records, cells, key, confirmed=trials is fresh, sure=sure) for key in chosen)


def gain_of(goal: Goal, metrics: Mapping[str, float], reference: Mapping[str, float]) -> float | None:
    """Return how many times better than the reference; None if that is undefined."""
    ours, theirs = metrics.get(goal.metric, 0.0), reference.get(goal.metric, 0.0)
    if ours <= 0.0 or theirs <= 0.0:
        return None
    return ours / theirs if goal.direction == "max" else theirs / ours


def _recommendation(
    spec: JobSpec,
    records: Sequence[Record],
    cells: Mapping[Hashable, Cell],
    key: Hashable,
    *,
    confirmed: bool,
    sure: float,
) -> Recommendation:
    """Return the cell with this key as an answer. `cells`: all that were measured, by key."""
    cell, reference = cells[key], cells.get(config_key(spec.default))
    measured = [(trial.config, trial.outcome) for each in cells.values() for trial in each.trials]
    gain: dict[str, Interval] = {}
    chances: list[float | None] = []
    for goal in spec.goal.goals if reference is not None else ():
        ours, theirs = values_of(goal.metric, cell), values_of(goal.metric, reference)
        if not ours or not theirs or min(*ours, *theirs) <= 0.0:
            continue
        over, under = (ours, theirs) if goal.direction == "max" else (theirs, ours)
        noise = Noise.of(goal.metric, measured, seed=spec.seed)
        gain[goal.metric] = noise.ratio(over, under)
        chances.append(noise.chance_above(over, under))
    is_reference = key == config_key(spec.default)
    chance = chances[0] if len(chances) == 1 and not is_reference else None
    made = Recommendation(
        config=cell.config,
        metrics=cell.outcome.metrics,
        gain=gain,
        chance=chance,
        confirmed=confirmed,
        rounds=len(cell.trials),
        changes=changes_of(spec.default, cell.config),
        sentence="",
        capacity=_capacity(spec, measured, cell),
        promise=held_rate(spec, records, cell.config),
    )
    return _with_sentence(spec, records, made, reference, sure)


def changes_of(reference: Config, config: Config) -> dict[str, tuple[Value | None, Value | None]]:
    """Return the knobs that differ, with both values; None: the knob is inactive on that side."""
    names = dict.fromkeys([*reference, *config])
    pairs = {name: (reference.get(name), config.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _capacity(spec: JobSpec, measured: Sequence[tuple[Config, TrialOutcome]], cell: Cell) -> Interval | None:
    """Return the rate per second that the configuration answers in time; None unless the job searched for it."""
    if not spec.is_capacity_search or not all(each.failure or GOODPUT_PER_S in each.metrics for _, each in measured):
        return None
    return Noise.of(GOODPUT_PER_S, measured, seed=spec.seed).mean(values_of(GOODPUT_PER_S, cell))


def values_of(metric: str, cell: Cell | None) -> list[float]:
    """Return the metric in each trial of the cell that ran."""
    trials = cell.trials if cell is not None else ()
    return [trial.outcome.metrics[metric] for trial in trials if trial.outcome.failure is None]


# ---- in words --------------------------------------------------------------------------------------------------------


def _with_sentence(
    spec: JobSpec, records: Sequence[Record], made: Recommendation, reference: Cell | None, sure: float
) -> Recommendation:
    if made.changes:
        text = f"{_settings(made)}: {_gains(made)}{_verdict(made)}."
    else:
        text = f"Keep the reference: {_why_keep(spec, records)}."
    text += f" {_basis(made)}{_best_of(spec, records, sure)}{_reach(made.capacity)}{_promised(made.promise)}"
    if reference is not None and reference.outcome.failure is None and not spec.goal.feasible(reference.outcome):
        missed = [name for name, excess in spec.goal.excesses(reference.outcome).items() if excess > 0.0]
        text += f" The reference itself misses {' and '.join(missed)}."
    return replace(made, sentence=text)


def _settings(made: Recommendation) -> str:
    return ", ".join(f"{name} = {new}" for name, (_, new) in made.changes.items() if new is not None) or "The reference"


def _gains(made: Recommendation) -> str:
    if not made.gain:
        return "it cannot be put as a multiple of the reference"
    return " and ".join(_gain(metric, interval) for metric, interval in made.gain.items())


def _gain(metric: str, interval: Interval) -> str:
    said = f"{interval.value:.2f} times as good as the reference in {metric}"
    if interval.low is None or interval.high is None:
        return said
    return f"{said} (95 % sure: {interval.low:.2f} to {interval.high:.2f})"


def _verdict(made: Recommendation) -> str:
    if made.chance is None:
        return ""
    levels = ((0.99, "almost certainly"), (0.95, "very likely"), (0.8, "probably"))
    said = next((word for level, word in levels if made.chance >= level), None)
    if said is None:
        return f"; that may be noise (the chance that it is better at all is {100.0 * made.chance:.0f} %)"
    return f"; {said} better"


def _basis(made: Recommendation) -> str:
    if made.confirmed:
        return f"From {made.rounds} fresh measurement{'s' * (made.rounds != 1)} of it after the search."
    return "It was not measured again after the search, and the best of several trials is partly the luckiest."


def _best_of(spec: JobSpec, records: Sequence[Record], sure: float) -> str:
    """Return how sure it is that nothing else that was tried is better; empty if nothing else was, or for a front."""
    others = len({record.key for record in records if record.kind.compares and record.valid}) - 1
    if not others or len(spec.goal.goals) > 1:
        return ""
    said = f" That none of the other {others} that were tried is better by 1 %: {100.0 * sure:.0f} % sure."
    return said if sure >= _OPEN else f"{said} More trials or a larger `confirm` would tell."


def _reach(capacity: Interval | None) -> str:
    if capacity is None:
        return ""
    said = f" It answers {capacity.value:.3g} requests a second in time"
    if capacity.low is None or capacity.high is None:
        return f"{said}, by what was measured once."
    return f"{said} (95 % sure: {max(0.0, capacity.low):.3g} to {capacity.high:.3g})."


def _promised(promise: PromisedRate | None) -> str:
    if promise is None:
        return ""
    if promise.rate_per_s is None and promise.runs:
        runs = f"{promise.runs} run{'s' * (promise.runs != 1)}"
        return f" Offered again, {promise.lowest_per_s:.3g} were held in {runs}, too few to promise it."
    if promise.rate_per_s is None:
        return f" No rate down to {promise.lowest_per_s:.3g} was held throughout when it was offered again."
    return f" Offered again, {promise.rate_per_s:.3g} were held in {promise.runs} runs of {promise.runs}."


def _why_keep(spec: JobSpec, records: Sequence[Record]) -> str:
    own = config_key(spec.default)
    others = [cell for cell in cells_of(trials_of(records)) if config_key(cell.config) != own]
    if not any(spec.goal.feasible(cell.outcome) for cell in others):
        return "no other configuration that was tried keeps every limit"
    return "none that was tried is likely to be better, by all that was measured"
