"""What `plait bench` does: the benchmark of that name, and no other, is imported; then runner, document, record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from plait_bench import records
from plait_bench.benchmark import Benchmark, Say
from plait_bench.errors import BenchError
from plait_bench.host import BUSY_LOAD, ROOT, SLOW_WAKE_US, UNKNOWN, commit, host_facts
from plait_bench.runner import TRIALS, RunPlan, joined, run

NAMES = ("images", "loadtest", "disagg", "fabric", "kernels", "autoconfig", "tuning", "placement", "zoo", "models",
         "faults")  # fmt: skip
"""Each is a module or a package here, whose `benchmark` takes `only` (workloads) and the options that it has."""

RESULTS = ROOT / "loadtest" / "results"

# As many as make a 20th and an 80th percentile mean something in a quarter of an hour on two cores.
ROUNDS, QUICK_ROUNDS = 5, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """The command line's settings. `rounds` None: the benchmark's own number; empty `workloads` or `systems`: all.
    `at`: the commit that this tree is a copy of, where there is no git. `options`: by name, those that were given.
    """

    name: str
    rounds: int | None = None
    quick: bool = False
    at: str = ""
    workloads: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    record: bool = False
    results: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def measure(job: BenchJob, *, say: Say) -> dict[str, Any]:
    """Run the benchmark and return its document; record each part once it is complete. Raises `BenchError`."""
    at = _commit(job)
    benchmark, plan = _prepared(job)
    host = host_facts()
    path = job.results or RESULTS / f"{job.name}.jsonl"
    say(f"{job.name} at {at} on {host['cpu']}, {host['cores']} cores; load average {host['loadavg_1m']}")
    _warn(host, say)
    parts = []
    for part in run(benchmark, plan, say=say):
        parts.append(part)
        if job.record:
            if _commit(job) != at:  # nor did anybody change it meanwhile
                raise BenchError(f"the checkout left commit {at} while it was measured: nothing more is recorded")
            left_out = records.put(path, job.name, at, host, part.rows)
            say(f"recorded in {path}" + (f", but for {left_out} rows: the host was busy" if left_out else ""))
    return records.document(job.name, at, host, joined(parts))


def _prepared(job: BenchJob) -> tuple[Benchmark, RunPlan]:
    module = import_module(f"plait_bench.{job.name}")
    takes = signature(module.benchmark).parameters
    given = {**job.options, "systems": job.systems}
    # Published data may be named for all of them, by the environment.
    if ignored := sorted(job.options.keys() - takes - {"data"}):
        raise BenchError(f"{job.name} takes no {ignored[0]}")
    options = {name: value for name, value in given.items() if name in takes}
    # The rounds of the tuner's and the placement benchmark are seeds.
    rounds = getattr(module, "QUICK_SEEDS", QUICK_ROUNDS) if job.quick else getattr(module, "SEEDS", ROUNDS)
    plan = RunPlan(
        rounds=job.rounds or rounds,
        trials=1 if job.quick else TRIALS,
        systems=job.systems,
        settles=(job.rounds or rounds) > QUICK_ROUNDS,  # a quick run is a look
    )
    benchmark: Benchmark = module.benchmark(only=job.workloads, **options)
    return benchmark, plan


def _commit(job: BenchJob) -> str:
    """Return the checkout's commit, or the one that was said to be copied here. Raises `BenchError` if that cannot
    be, or rows that are to be recorded could not name it."""
    found = commit(ROOT)
    if found != UNKNOWN and job.at:
        raise BenchError("--at is for a copy without git; this checkout knows its commit")
    if job.record and not job.at:
        records.require_clean(ROOT)
    return job.at or found


def _warn(host: Mapping[str, Any], say: Say) -> None:
    """Report why times will not be recorded, if they will not."""
    waking = "waking a process takes {:.0f} us here, more than {:.0f}: all that crosses processes will be slow"
    loaded = "the load average is {}, more than {}: layouts and ratios will not hold on an idle machine"
    for says, value, most in ((waking, host["wake_us"], SLOW_WAKE_US), (loaded, host["loadavg_1m"], BUSY_LOAD)):
        if value > most:
            say(f"warning: {says.format(value, most)}, and no time counts")


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
    return "\n".join([*lines, *(f"MISSED: {miss}" for miss in written["missed"])])
