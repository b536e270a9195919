"""How many requests a second whole and split answer without HTTP: callers in this process, on the same cores.

As in `split_cost` the split's dense half is in a child process, over shared memory. Each system has its best layout of
those that fit the machine; blocks take turns, and a block's value is its throughput with `CALLERS` requests under way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.asking import requests_of
from plait_bench.disagg.packages import packaged
from plait_bench.host import cores
from plait_bench.runner import Result
from plait_bench.summary import ValueSummary, pairwise_ratio
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.values import RankRequest

__all__ = ["CANDIDATES", "NAME", "result"]

NAME = "in-process"
METRIC, UNIT = "in_process_per_s", "requests/s"
WHOLE, SPLIT = "plait", "plait_split"
CANDIDATES = (64, 512)
CALLERS = 8
_BLOCK_S = 2.0
_REQUESTS = 24

Say = Callable[[str], None]


def result(*, rounds: int, say: Say, scales: Mapping[str, float]) -> Result:
    """Throughputs of both by model and candidates, and their ratio. ``scales``: of the models' tables, by model.

    Raises `SystemFailed`.
    """
    rows: list[ResultRow] = []
    ratios: dict[str, ValueSummary] = {}
    for model, scale in scales.items():
        package = open_package(packaged(model, scale, say=say))
        for candidates in CANDIDATES:
            workload = f"{NAME}-{model}-{candidates}"
            requests = requests_of(package, model, candidates=candidates, count=_REQUESTS)
            taken, layouts = asyncio.run(_measure(package, requests, rounds, workload, say))
            rows += [
                ResultRow.of(values, system=system, workload=workload, metric=METRIC, unit=UNIT, layout=layouts[system])
                for system, values in taken.items()
            ]
            ratios[f"{workload}:{METRIC}:{SPLIT}/{WHOLE}"] = pairwise_ratio(taken[SPLIT], taken[WHOLE])
    return Result(rows=tuple(rows), ratios=ratios, left_out={})


async def _measure(
    package: Package, requests: Sequence[RankRequest], rounds: int, workload: str, say: Say
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Throughputs of every round by system, and the layouts."""
    async with AsyncExitStack() as stack:
        rankers: dict[str, Ranker] = {}
        layouts: dict[str, str] = {}
        for system in (WHOLE, SPLIT):
            layouts[system], rankers[system] = await _best(package, system, requests, workload, say)
            stack.push_async_callback(rankers[system].close, drain_s=1.0)
        taken: dict[str, list[float]] = {system: [] for system in rankers}
        for number in range(1, rounds + 1):
            for system, ranker in rankers.items():
                taken[system].append(await _throughput_per_s(ranker, requests))
            both = " and ".join(f"{system} {values[-1]:.0f}" for system, values in taken.items())
            say(f"{workload}: round {number} of {rounds}: {both} requests/s")
    return taken, layouts


async def _best(
    package: Package, system: str, requests: Sequence[RankRequest], workload: str, say: Say
) -> tuple[str, Ranker]:
    """The fastest layout; the others are closed."""
    found: list[tuple[float, str, Ranker]] = []
    for own, hns in _layouts(system):
        layout = f"{'+'.join(map(str, (own, *hns)))} threads"
        ranker = await asyncio.to_thread(_open, package, own, hns)
        await _throughput_per_s(ranker, requests)
        found.append((await _throughput_per_s(ranker, requests), layout, ranker))
        say(f"{workload}: {system}, {layout}: {found[-1][0]:.0f}/s")
    found.sort(key=lambda each: -each[0])
    for _, _, ranker in found[1:]:
        await ranker.close(drain_s=1.0)
    return found[0][1], found[0][2]


def _layouts(system: str) -> list[tuple[int, tuple[int, ...]]]:
    """Threads here and of each HN: one, all cores, or, for the split, one here and an HN with all cores or on each."""
    counts = tuple(dict.fromkeys([1, cores()]))
    if system == WHOLE:
        return [(count, ()) for count in counts]
    return [*((count, (count,)) for count in counts), *((1, (each,)) for each in counts[1:]), (1, (1,) * cores())]


def _open(package: Package, threads: int, hns: Sequence[int]) -> Ranker:
    """Whole without HNs, else cut."""
    from plait_bench.disagg.ours import split, whole  # the child is that module, which must not be loaded twice

    return split(package, threads, hns) if hns else whole(package, threads)


async def _throughput_per_s(ranker: Ranker, requests: Sequence[RankRequest]) -> float:
    """Answers per second with `CALLERS` requests under way, for `_BLOCK_S`."""
    began_s = time.perf_counter()
    answered = 0

    async def ask(number: int) -> None:
        nonlocal answered
        while time.perf_counter() - began_s < _BLOCK_S:
            await ranker.rank(requests[number % len(requests)])
            number += CALLERS
            answered += 1

    await asyncio.gather(*(ask(caller) for caller in range(CALLERS)))
    return answered / (time.perf_counter() - began_s)
