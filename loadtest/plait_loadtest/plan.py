"""From a scenario to the plan of its run: what is sent when, and what is given up on purpose."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from plait_loadtest.arrivals import schedule
from plait_loadtest.mix import RequestMix, build_mix
from plait_loadtest.scenario import ClosedLoopCallers, Scenario
from plait_loadtest.seeds import Stream, make_rng
from plait_loadtest.validate import validate
from plait_loadtest.values import RequestPlan

_SAMPLE = 2000  # requests whose details a summary reads


def make_plan(scenario: Scenario) -> RequestPlan:
    """Draws the whole run. Raises `ScenarioError` if the scenario, or a file that it names, can not be used.

    ``duration_s`` of the plan is that of the scenario: the length of the measured part, unless ``count`` ends it.
    """
    validate(scenario)
    mix = build_mix(scenario)
    limits = scenario.limits
    if isinstance(scenario.arrivals, ClosedLoopCallers):
        times, warm_up, concurrency = np.empty(0, dtype=np.int64), 0, scenario.arrivals.concurrency
    else:
        concurrency = 0
        times, warm_up = schedule(
            scenario.arrivals,
            duration_s=scenario.duration_s,
            warm_up_s=scenario.warm_up_s,
            count=scenario.count,
            seed=scenario.seed,
        )
    cancelled = make_rng(scenario.seed, Stream.CANCELLATIONS).random(times.size) < limits.cancel_rate
    return RequestPlan(
        scheduled_ns=times,
        warm_up=warm_up,
        duration_s=scenario.duration_s,
        mix=mix,
        cancelled=cancelled,
        cancel_after_s=limits.cancel_after_s,
        concurrency=concurrency,
        count=scenario.count,
    )


def plan_mix_summary(plan: RequestPlan) -> dict[str, object]:
    """What was drawn, for a person who checks a mix; plain values, ready for JSON.

    ``requests``, ``warm_up`` and ``cancelled`` count the whole plan (a closed loop has none), and so do ``share`` and
    ``requests`` of each class; means and most used names are those of the first 2,000 requests.
    """
    planned = int(plan.scheduled_ns.size)
    summary: dict[str, object] = {
        "requests": planned, "warm_up": plan.warm_up, "cancelled": int(plan.cancelled.sum()),
    }  # fmt: skip
    if isinstance(plan.mix, RequestMix):
        summary["classes"] = _classes(plan.mix, planned)
    return summary


def _classes(mix: RequestMix, planned: int) -> dict[str, object]:
    considered = planned or _SAMPLE
    counts = np.bincount(mix.kinds_of(considered), minlength=len(mix.kinds))
    by_kind: dict[int, list[int]] = defaultdict(list)
    for index in range(min(considered, _SAMPLE)):
        by_kind[mix.kind(index)].append(index)
    classes: dict[str, object] = {}
    for kind, name in enumerate(mix.kinds):
        row: dict[str, object] = {"requests": int(counts[kind]) if planned else 0}
        row["share"] = round(int(counts[kind]) / considered, 4)
        row |= _means(mix.facts(index) for index in by_kind[kind])
        row |= _most_used(mix.names(index) for index in by_kind[kind])
        classes[name] = row
    return classes


def _means(facts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    columns: dict[str, list[float]] = defaultdict(list)
    for fact in facts:
        for name, value in fact.items():
            columns[name].append(value)
    return {f"mean_{name}": round(float(np.mean(values)), 3) for name, values in columns.items()}


def _most_used(names: Iterable[Mapping[str, tuple[str, ...]]]) -> dict[str, dict[str, int]]:
    """The five names of each kind that were drawn most, with how often."""
    counters: dict[str, Counter[str]] = defaultdict(Counter)
    for row in names:
        for kind, used in row.items():
            counters[kind].update(used)
    return {f"most_used_{kind}": dict(counter.most_common(5)) for kind, counter in counters.items() if counter}
