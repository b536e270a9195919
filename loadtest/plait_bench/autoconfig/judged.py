"""How searches are scored: one number per seed (over the services of a suite), and paired tests over services."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from plait_bench.autoconfig.play import CONFIRM_AFTER, Curve
from plait_bench.autoconfig.tasks import Suite
from plait_bench.benchmark import Metric, ResultRow
from plait_bench.paired import critical_distance, mean_ranks, p_better, p_not_worse

MARGIN_TRIALS = 1.0
"""The non-inferiority margin: at most this many trials later."""

OPTIMUM, TIED = "optimum", "tied_cells"

Played = Mapping[str, Mapping[int, Sequence[Curve]]]
"""By designer and seed: a curve for each task."""

_Number = Callable[[Curve], float]


def metrics_of(suite: Suite) -> dict[str, tuple[str, Callable[[Sequence[float]], float], _Number]]:
    """Map each metric to its unit, how it is aggregated over services, and its value for one search."""
    found: dict[str, tuple[str, Callable[[Sequence[float]], float], _Number]] = {}
    for mark in suite.marks:
        found[f"regret_at_{mark}"] = ("share", fmean, lambda curve, mark=mark: curve.regret_at(mark))  # type: ignore[misc]
    found["trials_to_5pct"] = ("trials", fmean, lambda curve: curve.trials_to(0.05))
    found["trials_to_5pct_median"] = ("trials", median, lambda curve: curve.trials_to(0.05))
    found["trials_to_3pct_median"] = ("trials", median, lambda curve: curve.trials_to(0.03))
    if suite.trials >= 15:
        found["infeasible_6_to_15"] = ("trials", fmean, lambda curve: curve.bad_between(6, 15))
    if suite.trials >= CONFIRM_AFTER:
        found["regret_confirmed_20"] = (
            "share",
            fmean,
            lambda curve: 1.0 if curve.confirmed is None else curve.confirmed,
        )
    found["ask_ms"] = ("ms", fmean, lambda curve: 1e3 * fmean(curve.ask_s))
    return found


def units(suite: Suite) -> dict[str, Metric]:
    """Describe the metrics of a round by name; lower is better, except for scores."""
    found = {metric: Metric(unit=unit, better="lower") for metric, (unit, _, _) in metrics_of(suite).items()}
    found["extra_trials_to_5pct"] = Metric(unit="trials", better="lower")
    found["so_score_3_trials"] = Metric(unit="score", better="higher")
    return found


def tests(suite: Suite, played: Played, ours: str) -> list[ResultRow]:
    """Run two paired tests against each of the others, on trials to 5 %, service by service (`paired`)."""
    found = []
    if ours not in played:
        return []
    for system, seeds in played.items():
        if system == ours:
            continue
        both = [seed for seed in played[ours] if seed in seeds]
        mine, theirs = (_by_service([played[name][seed] for seed in both]) for name in (ours, system))
        for metric, p in (
            ("trials_to_5pct_p_better", p_better(mine, theirs)),
            ("trials_to_5pct_p_not_1_worse", p_not_worse(mine, theirs, MARGIN_TRIALS)),
        ):
            found.append(
                ResultRow(
                    system=f"{ours}/{system}", workload=suite.name, metric=metric, unit="p", value=p, p20=p, p80=p,
                    n=len(mine), layout="sign flips over services; false alarms <= 5 % at p <= 0.05",
                )
            )  # fmt: skip
    return found


def ranks(suite: Suite, played: Played) -> list[ResultRow]:
    """Return each designer's mean rank over services, by trials to 5 %, with half a critical distance on both sides:
    designers whose intervals do not overlap differ. Empty for fewer than three designers."""
    if len(played) < 3:
        return []
    seeds = set.intersection(*(set(each) for each in played.values()))
    losses = [_by_service([each[seed] for seed in sorted(seeds)]) for each in played.values()]
    half = critical_distance(len(played), len(suite.tasks)) / 2.0
    return [
        ResultRow(
            system=system, workload=suite.name, metric="rank", unit="rank", value=rank, p20=rank - half,
            p80=rank + half, n=len(suite.tasks),
        )
        for system, rank in zip(played, mean_ranks(losses), strict=True)
    ]  # fmt: skip


def _by_service(seeds: Sequence[Sequence[Curve]]) -> list[float]:
    return [fmean(seed[at].trials_to(0.05) for seed in seeds) for at in range(len(seeds[0]))]


def optima(suite: Suite) -> list[ResultRow]:
    """Return the optimum of each service that is known only as well as it was measured, with its interval, and how many
    cells tie with it."""
    found = []
    for task in suite.tasks:
        if (tie := task.service.tie) == 0.0:
            continue
        goal, values = task.service.objective.require_one_goal(), task.service.values
        n = min(map(len, task.service.shown.values()))
        best, tied = float(values.max()), float(sum(values >= values.max() * (1.0 - tie)))
        half = (1.0 - tie) ** (0.5**0.5)  # of one mean, where `tie` is of the difference of two
        for metric, unit, value, low, high in (
            (OPTIMUM, goal.metric, best, best * half, best / half),
            (TIED, "cells", tied, tied, tied),
        ):
            found.append(
                ResultRow(
                    system=task.name, workload=suite.name, metric=metric, unit=unit, value=value, p20=low, p80=high, n=n
                )
            )
    return found


def row(system: str, workload: str, metric: str, unit: str, values: Sequence[float]) -> ResultRow:
    """Make the row of one metric from one value per seed."""
    return ResultRow.of(values, system=system, workload=workload, metric=metric, unit=unit)
