"""What the cut costs a request that is alone: whole against split, in process, without HTTP.

The split's dense half is in a child process, over shared memory. Blocks of requests take turns, so that what disturbs
one disturbs the other; a block's value is its median.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.asking import requests_of, wait_until_ready
from plait_bench.disagg.packages import packaged
from plait_bench.runner import Result
from plait_bench.summary import pairwise_ratio
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.values import RankRequest
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeRanker

__all__ = ["CANDIDATES", "NAME", "result"]

NAME = "one-by-one"
METRIC, ADDED = "latency_p50_us", "added_p50_us"
WHOLE, SPLIT = "plait", "plait_split"
CANDIDATES = (1, 64, 512)

_MODEL, _SCALE = "rm1", 0.125
_BLOCK, _REQUESTS = 60, 24

Say = Callable[[str], None]


def result(*, rounds: int, say: Say) -> Result:
    """Medians of both by the number of candidates, what the split adds, and their ratio. Raises `SystemFailed`."""
    package = open_package(packaged(_MODEL, _SCALE, say=say))
    taken = asyncio.run(_measure(package, rounds, say))
    rows, ratios = [], {}
    for candidates, (whole, split) in taken.items():
        workload = f"{NAME}-{candidates}"
        added = [theirs - ours for ours, theirs in zip(whole, split, strict=True)]
        for system, metric, values in ((WHOLE, METRIC, whole), (SPLIT, METRIC, split), (SPLIT, ADDED, added)):
            rows.append(ResultRow.of(values, system=system, workload=workload, metric=metric, unit="us"))
        ratios[f"{workload}:{METRIC}:{SPLIT}/{WHOLE}"] = pairwise_ratio(split, whole)
    return Result(rows=tuple(rows), ratios=ratios, left_out={})


async def _measure(package: Package, rounds: int, say: Say) -> dict[int, tuple[list[float], list[float]]]:
    from plait_bench.disagg.ours import start_dense  # the child is that module, which must not be loaded twice

    whole = WholeRanker(package.card(), package.sparse(), package.dense())
    split = CoreRanker(CnCore(package.card(mode="split"), package.sparse(), start_dense(package, 1)))
    try:
        await asyncio.to_thread(wait_until_ready, split.core)
        taken: dict[int, tuple[list[float], list[float]]] = {}
        for candidates in CANDIDATES:
            requests = requests_of(package, _MODEL, candidates=candidates, count=_REQUESTS)
            taken[candidates] = [], []
            for ranker in (whole, split):
                await _block(ranker, requests)
            for number in range(1, rounds + 1):
                for values, ranker in zip(taken[candidates], (whole, split), strict=True):
                    values.append(await _block(ranker, requests))
                pair = " and ".join(f"{values[-1]:.0f} us" for values in taken[candidates])
                say(f"{NAME}-{candidates}: round {number} of {rounds}: {pair}")
        return taken
    finally:
        for ranker in (whole, split):
            await ranker.close(drain_s=1.0)


async def _block(ranker: Ranker, requests: Sequence[RankRequest]) -> float:
    """Median in microseconds."""
    taken_us = []
    for number in range(_BLOCK):
        started_s = time.perf_counter()
        await ranker.rank(requests[number % len(requests)])
        taken_us.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(taken_us)
