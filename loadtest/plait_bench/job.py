"""The composition root of `plait bench`: definition, runner, document, record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait_bench import autoconfig, disagg, fabric, images, kernels, loadtest, models, placement, records, tuning, zoo
from plait_bench.benchmark import Benchmark
from plait_bench.cache import cache_folder
from plait_bench.document import document
from plait_bench.errors import BenchError, RecordError
from plait_bench.fleet.workers import WorkerFleet
from plait_bench.host import BUSY_LOAD, SLOW_WAKE_US, UNKNOWN, commit, cores, host_facts
from plait_bench.images.sizes import DTYPES, EDGES, DeviceName, DTypeName, Variety, size_of
from plait_bench.runner import TRIALS, RunPlan, joined, run
from plait_bench.tables import RESULTS, ROOT
from plait_fabric.cores import has_bfloat16

# As many as make a 20th and an 80th percentile mean something in a quarter of an hour on two cores.
ROUNDS, QUICK_ROUNDS = 5, 3

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """The command line's settings. `models` None: the starter's, or those in the cache; empty `workloads` or `systems`:
    all. `size`, `edge`, `device` and `dtype` ("auto": each that the CPU computes in, float16 on a GPU) are for images.
    `at`: the commit that this tree is a copy of, where there is no git.

    `data`: the folder with published tables and lists, for the tuner's and the placement benchmark; `tables`: recorded
    ones, for the tuner's.
    """

    rounds: int
    name: str = images.NAME
    models: Path | None = None
    size: str = "starter"
    edge: int = EDGES[0]
    dtype: str = "auto"
    device: DeviceName = "cpu"
    at: str = ""
    workloads: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    trials: int = TRIALS
    record: bool = False
    overwrite: bool = False
    results: Path | None = None
    data: Path | None = None
    tables: tuple[Path, ...] = ()


def _images(job: BenchJob) -> Benchmark:
    size = size_of(job.size)
    root = job.models or (cache_folder() / size.name if size.family else _starter())
    return images.benchmark(
        root,
        cores=cores(),
        open_fleet=WorkerFleet,
        varieties=[
            Variety(size=size, edge=job.edge, dtype=dtype, device=job.device)
            for dtype in _dtypes(job.dtype, job.device)
        ],
        only=job.workloads,
        named=job.systems,
    )


def _dtypes(asked: str, device: DeviceName) -> tuple[DTypeName, ...]:
    """Return the dtypes to measure: those that the CPU computes in, or the one that was asked for if it does; on a GPU
    float16, the default there."""
    if device == "cuda":
        return tuple(dtype for dtype in DTYPES if dtype == asked) or ("float16",)
    native: tuple[DTypeName, ...] = ("float32", "bfloat16") if has_bfloat16() else ("float32",)
    if asked == "auto":
        return native
    found = tuple(dtype for dtype in native if dtype == asked)
    if not found:
        raise BenchError(f"this CPU does not compute in {asked}: emulated, it would say nothing")
    return found


BENCHMARKS: Mapping[str, Callable[[BenchJob], Benchmark]] = {
    images.NAME: _images,
    loadtest.NAME: lambda job: loadtest.benchmark(only=job.workloads),
    disagg.NAME: lambda job: disagg.benchmark(only=job.workloads),
    fabric.NAME: lambda job: fabric.benchmark(only=job.workloads),
    kernels.NAME: lambda job: kernels.benchmark(only=job.workloads),
    autoconfig.NAME: lambda job: autoconfig.benchmark(only=job.workloads, data=job.data, recorded=job.tables),
    tuning.NAME: lambda job: tuning.benchmark(only=job.workloads),
    zoo.NAME: lambda job: zoo.benchmark(only=job.workloads),
    models.NAME: lambda job: models.benchmark(
        job.models or cache_folder() / "models", only=job.workloads, data=job.data
    ),
    placement.NAME: lambda job: placement.benchmark(only=job.workloads, data=job.data),
}

NAMES = tuple(BENCHMARKS)


def rounds_of(name: str, *, quick: bool) -> int:
    """Return the default number of rounds; the tuner's and the placement benchmark's rounds are seeds."""
    if name == autoconfig.NAME:
        return autoconfig.QUICK_SEEDS if quick else autoconfig.SEEDS
    if name == placement.NAME:
        return placement.QUICK_SEEDS if quick else placement.SEEDS
    return QUICK_ROUNDS if quick else ROUNDS


def trials_of(*, quick: bool) -> int:
    """Return the default number of trials of a layout."""
    return 1 if quick else TRIALS


def measure(job: BenchJob, *, say: Say) -> dict[str, Any]:
    """Run the benchmark and return its document; record each part once it is complete. Raises `BenchError`."""
    if job.overwrite:
        raise RecordError("results are append-only: --overwrite is gone; a second run is recorded beside the first")
    if job.record:
        _require_commit(job)
    benchmark = BENCHMARKS[job.name](job)
    host, at = host_facts(), _commit(job)
    path = job.results or RESULTS / f"{job.name}.jsonl"
    say(f"{job.name} at {at} on {host['cpu']}, {host['cores']} cores; load average {host['loadavg_1m']}")
    _warn(host, say)
    parts = []
    settles = job.rounds > QUICK_ROUNDS  # a quick run is a look
    plan = RunPlan(rounds=job.rounds, trials=job.trials, systems=job.systems, settles=settles)
    for part in run(benchmark, plan, say=say):
        parts.append(part)
        if job.record:
            _require_commit(job)  # nobody changed it meanwhile
            if _commit(job) != at:
                raise RecordError(f"the checkout left commit {at} while it was measured: nothing more is recorded")
            records.append(path, records.records_of(document(job.name, at, host, part)))
            say(f"recorded in {path}")
    return document(job.name, at, host, joined(parts))


def _commit(job: BenchJob) -> str:
    """Return the checkout's commit, or the one that was said to be copied here."""
    found = commit(ROOT)
    if found != UNKNOWN and job.at:
        raise BenchError("--at is for a copy without git; this checkout knows its commit")
    return job.at or found


def _require_commit(job: BenchJob) -> None:
    """Raise `RecordError` unless the rows can name the commit that they come from."""
    if not job.at:
        records.require_clean(ROOT)


def _warn(host: Mapping[str, Any], say: Say) -> None:
    """Report why the rows will be marked as measured on a busy host, if they will."""
    if host["wake_us"] > SLOW_WAKE_US:
        say(
            f"warning: waking a process takes {host['wake_us']:.0f} us here, more than {SLOW_WAKE_US:.0f}: all that "
            f"crosses processes will be slow, and every row is marked busy"
        )
    if host["loadavg_1m"] > BUSY_LOAD:
        say(
            f"warning: the load average is {host['loadavg_1m']}, more than {BUSY_LOAD}: the layouts and ratios found "
            f"now will not hold on an idle machine, and every row is marked busy"
        )


def text_table(written: Mapping[str, Any]) -> str:
    """Format the document for people: rows, then ratios."""
    lines = [
        f"{row['workload']:<11} {row['system']:<18} {row['metric']:<25} {row['value']:>9.4g} {row['unit']:<14} "
        f"({row['p20']:.4g} to {row['p80']:.4g}, n {row['n']}) {row['layout']}".rstrip()
        for row in written["rows"]
    ]
    lines += [
        f"{key:<62} {value:>7.2f} ({spread['p20']:.2f} to {spread['p80']:.2f})"
        for key, value in written["ratios"].items()
        for spread in [written["ratio_spreads"][key]]
    ]
    return "\n".join(lines)


def _starter() -> Path:
    """Return the folder of the models that ship with plait."""
    from plait_serving.images.config import STARTER_FOLDER

    return STARTER_FOLDER
