"""From searches to rows: one number per seed (over the services of a suite), then median and percentiles over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

from plait_bench.autoconfig.paired import p_better, p_not_worse
from plait_bench.autoconfig.play import Curve
from plait_bench.autoconfig.tasks import Suite
from plait_bench.benchmark import ResultRow
from plait_bench.summary import ValueSummary, pairwise_ratio

MARGIN_TRIALS = 1.0
"""Non-inferior: not later by so many trials."""

Played = Mapping[str, Sequence[Sequence[Curve]]]
"""By designer: by seed, by task."""

_Number = Callable[[Curve], float]


def metrics_of(suite: Suite) -> dict[str, tuple[str, Callable[[Sequence[float]], float], _Number]]:
    """Unit, how services are put together, and the number of one search, by metric."""
    found: dict[str, tuple[str, Callable[[Sequence[float]], float], _Number]] = {}
    for mark in suite.marks:
        found[f"regret_at_{mark}"] = ("share", fmean, lambda curve, mark=mark: curve.regret_at(mark))  # type: ignore[misc]
    found["trials_to_5pct"] = ("trials", fmean, lambda curve: curve.trials_to(0.05))
    found["trials_to_5pct_median"] = ("trials", median, lambda curve: curve.trials_to(0.05))
    found["trials_to_3pct_median"] = ("trials", median, lambda curve: curve.trials_to(0.03))
    if suite.trials >= 15:
        found["infeasible_6_to_15"] = ("trials", fmean, lambda curve: curve.bad_between(6, 15))
    found["ask_ms"] = ("ms", fmean, lambda curve: 1e3 * fmean(curve.ask_s))
    return found


def rows(suite: Suite, played: Played) -> list[ResultRow]:
    """One per designer and metric."""
    return [
        row(system, suite.name, metric, unit, [together([number(curve) for curve in seed]) for seed in seeds])
        for system, seeds in played.items()
        for metric, (unit, together, number) in metrics_of(suite).items()
    ]


def ratios(suite: Suite, played: Played, ours: str) -> dict[str, ValueSummary]:
    """Ours to each of the others in trials to 5 %, seed by seed."""
    _, together, number = metrics_of(suite)["trials_to_5pct"]
    by_system = {
        system: [together([number(curve) for curve in seed]) for seed in seeds] for system, seeds in played.items()
    }
    found = {}
    for system, theirs in by_system.items():
        if system != ours and ours in by_system:
            both = min(len(theirs), len(by_system[ours]))
            key = f"{suite.name}:trials_to_5pct:{ours}/{system}"
            found[key] = pairwise_ratio(by_system[ours][:both], theirs[:both])
    return found


def tests(suite: Suite, played: Played, ours: str) -> list[ResultRow]:
    """Two paired tests against each of the others, on trials to 5 %, service by service (`paired`)."""
    found = []
    if ours not in played:
        return []
    for system, seeds in played.items():
        if system == ours:
            continue
        both = min(len(seeds), len(played[ours]))
        mine, theirs = (_by_service(played[name][:both]) for name in (ours, system))
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


def extra_trials(
    misled: Sequence[Sequence[Curve]], cold: Sequence[Sequence[Curve]], workload: str, system: str
) -> ResultRow:
    """How many trials to 5 % a misleading library costs against none, seed by seed."""
    differences = [
        fmean(curve.trials_to(0.05) for curve in with_it) - fmean(curve.trials_to(0.05) for curve in without)
        for with_it, without in zip(misled, cold, strict=True)
    ]
    return row(system, workload, "extra_trials_to_5pct", "trials", differences)


def _by_service(seeds: Sequence[Sequence[Curve]]) -> list[float]:
    return [fmean(seed[at].trials_to(0.05) for seed in seeds) for at in range(len(seeds[0]))]


def row(system: str, workload: str, metric: str, unit: str, values: Sequence[float]) -> ResultRow:
    """Of one value per seed."""
    return ResultRow.of(values, system=system, workload=workload, metric=metric, unit=unit)
