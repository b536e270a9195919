"""The fabric: how fast shared memory carries data, how soon a small message is back, and whether a modelled link keeps
its own time. Every round takes all of them in turn.

Rows of kind ``modelled`` say what a link's model says; those of kind ``measured`` were measured on this machine, also
where what was measured is a modelled channel: they show how well real time follows the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from plait_bench.benchmark import ResultRow
from plait_bench.errors import BenchError
from plait_bench.fabric import links, round_trips, throughput
from plait_bench.fabric.values import RoundValue
from plait_bench.runner import Result
from plait_bench.summary import ValueSummary, pairwise_ratio

NAME = "fabric"
OURS = "plait"

Say = Callable[[str], None]


UNITS: Mapping[str, str] = {"gb_per_s": "GB/s", "round_trip_us": "us", "one_way_us": "us", "alpha_us": "us"}
"""By metric."""

_COMPARED = ("memcpy", "model")
"""The systems that ours is compared with, where they have the same metric."""

WORKLOADS: Mapping[str, Callable[[], list[RoundValue]]] = {
    throughput.WORKLOAD: throughput.take,
    round_trips.WORKLOAD: round_trips.take,
    links.WORKLOAD: links.take,
}
"""What takes one round of each; a round has a value for each (system, workload, metric)."""

NAMES = tuple(WORKLOADS)


def measure(*, rounds: int, only: Sequence[str], say: Say) -> Result:
    """All workloads, or those of ``only``. Raises `BenchError`."""
    unknown = sorted(set(only) - set(NAMES))
    if unknown:
        raise BenchError(f"there is no workload {unknown[0]!r}; there are {', '.join(NAMES)}")
    taken: dict[tuple[str, str, str], list[RoundValue]] = {}
    for number in range(1, rounds + 1):
        for name in only or NAMES:
            for one in WORKLOADS[name]():
                taken.setdefault((one.workload, one.system, one.metric), []).append(one)
                if one.kind == "measured":
                    note = f" ({one.layout})" if one.layout else ""
                    say(f"round {number} of {rounds}: {one.workload} {one.system} {one.metric} {one.value:.4g}{note}")
    return Result(rows=tuple(_row(values) for values in taken.values()), ratios=_ratios(taken), left_out={})


def _row(values: Sequence[RoundValue]) -> ResultRow:
    one = values[-1]
    return ResultRow.of(
        [each.value for each in values],
        system=one.system, workload=one.workload, metric=one.metric, unit=UNITS[one.metric], layout=one.layout,
        kind=one.kind,
    )  # fmt: skip


def _ratios(taken: Mapping[tuple[str, str, str], Sequence[RoundValue]]) -> dict[str, ValueSummary]:
    """Ours to what it is compared with, round by round."""
    ratios = {}
    for (workload, system, metric), values in taken.items():
        for other in _COMPARED:
            if system == OURS and (workload, other, metric) in taken:
                theirs = [one.value for one in taken[workload, other, metric]]
                ratios[f"{workload}:{metric}:{OURS}/{other}"] = pairwise_ratio([one.value for one in values], theirs)
    return ratios
