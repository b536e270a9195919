"""Recommendation models over HTTP: plain PyTorch behind FastAPI against plait, whole and cut in two, on the same cores.

All systems hold the same weights, speak the same protocol, answer the same bodies, and their scores are compared first.
Goodput is what counts (`goodput`). Beside it: what crosses the cut, for both cutters and every model (`crossing`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plait_bench.benchmark import ResultRow
from plait_bench.disagg import big_table, crossing, goodput, in_process, one_by_one, overload, refresh, split_cost
from plait_bench.disagg.bodies import HEADER_BYTES, write_bodies
from plait_bench.disagg.packages import packaged
from plait_bench.disagg.scores import compare
from plait_bench.disagg.serving import BenchServer, serving
from plait_bench.errors import BenchError, SystemFailed
from plait_bench.host import cores
from plait_bench.runner import Result
from plait_bench.summary import ValueSummary, pairwise_ratio

NAME = "disagg"
OURS = "plait"
METRIC, UNIT = "goodput_per_s", "requests/s"
SYSTEMS = ("pytorch", "plait", "plait_split")

_BEGIN = 0.75
"""Of a closed loop's throughput: open-loop arrivals come in bunches, and p99 misses the limit well before that rate."""

_FAR_BEHIND = 0.7
"""Of the fastest layout's throughput in a closed loop."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggWorkload:
    """Requests of ``candidates`` for a configuration whose tables have ``scale`` of their published rows. ``limit_ms``:
    the p99 to keep."""

    model: str
    scale: float
    candidates: int
    limit_ms: float = goodput.LIMIT_MS

    @property
    def name(self) -> str:
        """As the document has it: ``rm1-64``."""
        return f"{self.model}-{self.candidates}"


SCALES: Mapping[str, float] = {"rm1": 0.125, "rm2": 0.125, "criteo-kaggle": 0.25}
"""Half a gigabyte of tables each: far beyond every cache, and four of them fit a small machine."""

_LIMITS_MS: Mapping[str, float] = {"rm2-512": 100.0}
"""One request of this takes plain PyTorch tens of milliseconds on two cores: 50 would leave it no rate at all."""

WORKLOADS = tuple(
    DisaggWorkload(
        model=model, scale=scale, candidates=candidates,
        limit_ms=_LIMITS_MS.get(f"{model}-{candidates}", goodput.LIMIT_MS),
    )
    for model, scale in SCALES.items()
    for candidates in (1, 64, 512)
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """One way to run a system: its name in the table, and the arguments of its server."""

    name: str
    arguments: tuple[str, ...]


COUNTED: Mapping[str, Callable[..., list[ResultRow]]] = {"crossing": crossing.rows, "table-20gb": big_table.rows}
"""What is counted once and has no rounds, by the name that ``--workload`` knows it by."""

COMPARED: Mapping[str, Callable[..., Result]] = {
    one_by_one.NAME: one_by_one.result,
    in_process.NAME: partial(in_process.result, scales=SCALES),
    overload.NAME: overload.result,
    split_cost.NAME: split_cost.result,
    refresh.WORKLOAD: refresh.result,
}
"""What is compared in a way of its own, by the same name."""

NAMES = (*COUNTED, *COMPARED, *(workload.name for workload in WORKLOADS))


def measure(*, rounds: int, only: Sequence[str], systems: Sequence[str], say: Say) -> Iterator[Result]:
    """Every workload in turn, each as soon as it is measured. Raises `BenchError`."""
    chosen = _chosen(only, NAMES, "workload")
    wanted = _chosen(systems, SYSTEMS, "system")
    for name, count in COUNTED.items():
        if name in chosen:
            yield Result(rows=tuple(count(say=say)), ratios={}, left_out={})
    for name, compare_them in COMPARED.items():
        if name in chosen:
            yield compare_them(rounds=rounds, say=say)
    for workload in WORKLOADS:
        if workload.name not in chosen:
            continue
        taken, layouts = _measure_workload(workload, [name for name in SYSTEMS if name in wanted], rounds, say)
        rows = tuple(
            ResultRow.of(
                values, system=name, workload=workload.name, metric=METRIC, unit=UNIT, layout=layouts[name].name
            )
            for name, values in taken.items()
        )
        yield Result(rows=rows, ratios=_ratios(workload.name, taken), left_out={})


def _chosen(asked: Sequence[str], there: Sequence[str], what: str) -> Sequence[str]:
    unknown = sorted(set(asked) - set(there))
    if unknown:
        raise BenchError(f"there is no {what} {unknown[0]!r}; there are {', '.join(there)}")
    return asked or there


def _measure_workload(
    workload: DisaggWorkload, systems: Sequence[str], rounds: int, say: Say
) -> tuple[dict[str, list[float]], dict[str, ServerLayout]]:
    """Goodputs of every round by system, and the layouts they were taken in."""
    package = packaged(workload.model, workload.scale, say=say)
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder, ExitStack() as stack:
        bodies = write_bodies(Path(folder), package, workload.model, workload.candidates, seed=1)
        layouts, known = {}, {}
        for name in systems:
            layouts[name], known[name] = _best(workload, name, package, bodies, say)
        servers = {
            name: stack.enter_context(serving(layouts[name].arguments, bodies[0].read_bytes())) for name in systems
        }
        compare(servers, bodies)
        trials = {name: partial(_trial, server, bodies, workload.limit_ms) for name, server in servers.items()}
        taken: dict[str, list[float]] = {name: [] for name in systems}
        for round_number in range(1, rounds + 1):
            for name in systems:
                run = partial(trials[name], seed=1000 * round_number)
                trial = goodput.around(run, known[name], guessed=False, say=say)
                known[name] = trial.rate_per_s
                taken[name].append(trial.goodput_per_s)
                say(f"{workload.name}: round {round_number} of {rounds}: {name} {taken[name][-1]:.1f} requests/s")
    return taken, layouts


def _best(
    workload: DisaggWorkload, name: str, package: Path, bodies: Sequence[Path], say: Say
) -> tuple[ServerLayout, float]:
    """The layout with the most goodput, and how much it was. Those far behind in a closed loop are not tried."""
    found: dict[ServerLayout, float] = {}
    fastest = 0.0
    for layout in layouts_of(workload, name, package):
        with serving(layout.arguments, bodies[0].read_bytes()) as server:
            closed_per_s = goodput.throughput_per_s(server.url, bodies, HEADER_BYTES)
            fastest = max(fastest, closed_per_s)
            said = f"{workload.name}: {name}, {layout.name}: {closed_per_s:.0f}/s in a closed loop"
            if closed_per_s < _FAR_BEHIND * fastest:
                say(said)
                continue
            run = partial(_trial, server, bodies, workload.limit_ms, seed=0)
            with suppress(SystemFailed):
                found[layout] = goodput.around(run, _BEGIN * closed_per_s, guessed=True, say=say).rate_per_s
            say(f"{said}, {found.get(layout, 0.0):.0f}/s in time")
    if not found:
        raise SystemFailed(f"{workload.name}: {name} keeps the limit of {workload.limit_ms:g} ms at no rate")
    best = max(found, key=lambda layout: found[layout])
    return best, found[best]


def layouts_of(workload: DisaggWorkload, name: str, package: Path) -> tuple[ServerLayout, ...]:
    """The layouts that are tried: on as many threads as there are cores and on one, HTTP in the model's process or in
    one of its own; for the split also one thread for the CN and all cores for the HN, or an HN on each."""
    threads = tuple(dict.fromkeys([1, cores()]))
    if name == "pytorch":
        whole = ("plait_bench.disagg.baseline", workload.model, str(workload.scale))
        return tuple(
            ServerLayout(name=f"{count} threads, {where}", arguments=(*whole, str(count), where))
            for count in threads
            for where in ("inline", "worker")
        )
    is_split = name == "plait_split"
    counts = list(map(str, threads)) + [f"{threads[0]}+{each}" for each in threads[1:] if is_split]
    ours = "plait_bench.disagg.ours", str(package)
    mode = "split" if is_split else "whole"
    found = [
        ServerLayout(name=f"{count} threads{where}", arguments=(*ours, count, mode, *rest))
        for count in counts
        for where, rest in (("", ()), (", model apart", ("apart",)))
    ]
    if is_split and cores() > 1:
        each = "+".join(["1"] * (1 + cores()))
        found.append(ServerLayout(name=f"{each} threads", arguments=(*ours, each, mode)))
    return tuple(found)


def _trial(
    server: BenchServer, bodies: Sequence[Path], limit_ms: float, rate_per_s: float, *, seed: int
) -> goodput.RateAttempt:
    return goodput.attempt(server.url, bodies, HEADER_BYTES, rate_per_s, seed=seed + int(rate_per_s), limit_ms=limit_ms)


def _ratios(workload: str, taken: Mapping[str, Sequence[float]]) -> dict[str, ValueSummary]:
    if OURS not in taken:
        return {}
    return {
        f"{workload}:{METRIC}:{OURS}/{name}": pairwise_ratio(taken[OURS], values)
        for name, values in taken.items()
        if name != OURS
    }
