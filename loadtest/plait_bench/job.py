"""The composition root of ``plait bench``: definition, runner, document, record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from plait_bench import autoconfig, disagg, fabric, images, loadtest, records
from plait_bench.document import document
from plait_bench.errors import BenchError
from plait_bench.host import SLOW_WAKE_US, commit, cores, host_facts
from plait_bench.runner import Result, RunPlan, joined, run
from plait_bench.tables import RESULTS, ROOT
from plait_bench.workers import WorkerFleet

# As many as make a 20th and an 80th percentile mean something in a quarter of an hour on two cores.
ROUNDS, QUICK_ROUNDS = 5, 3

# Half a core of other work is what two systems that run in turn can share fairly.
_BUSY_SHARE = 0.25


NAMES = (images.NAME, loadtest.NAME, disagg.NAME, fabric.NAME, autoconfig.NAME)

Say = Callable[[str], None]
Take = Callable[[Say], Iterator[Result]]
"""Measures, and gives what it has as soon as it is whole: a long run that is stopped keeps that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What the command line asked for. ``models`` None: the starter's; empty ``workloads``/``systems``: all.

    ``data``: the folder with published tables; ``tables``: recorded ones. Both are for the tuner's benchmark.
    """

    rounds: int
    name: str = images.NAME
    models: Path | None = None
    workloads: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    record: bool = False
    overwrite: bool = False
    results: Path | None = None
    data: Path | None = None
    tables: tuple[Path, ...] = ()


def rounds_of(name: str, *, quick: bool) -> int:
    """How often everything is measured if nobody says so; the tuner's rounds are seeds."""
    if name == autoconfig.NAME:
        return autoconfig.QUICK_SEEDS if quick else autoconfig.SEEDS
    return QUICK_ROUNDS if quick else ROUNDS


def measure(job: BenchJob, *, say: Say) -> dict[str, Any]:
    """Runs the benchmark and returns its document; records each part when it is there. Raises `BenchError`."""
    host, at = host_facts(), commit(ROOT)
    workloads, take = _definition(job)
    path = job.results or RESULTS / f"{job.name}.jsonl"
    if job.record and not job.overwrite:
        records.check_new(records.read(path), bench=job.name, commit=at, host=host, workloads=workloads)
    say(f"{job.name} at {at} on {host['cpu']}, {host['cores']} cores; load average {host['loadavg_1m']}")
    if host["wake_us"] > SLOW_WAKE_US:
        say(f"waking a process takes {host['wake_us']:.0f} us here: all that crosses processes will be slow")
    if host["loadavg_1m"] > _BUSY_SHARE * host["cores"]:
        say("something else keeps this machine busy: the layouts and ratios found now will not hold on an idle one")
    parts = []
    for part in take(say):
        parts.append(part)
        if job.record:
            written = document(job.name, at, host, part)
            records.append(path, records.records_of(written), overwrite=job.overwrite)
            say(f"recorded in {path}")
    return document(job.name, at, host, joined(parts))


def _definition(job: BenchJob) -> tuple[list[str], Take]:
    """Names of the workloads, and what measures them all. Raises `BenchError`."""
    if job.name == loadtest.NAME:
        if unknown := set(job.workloads) - {loadtest.WORKLOAD}:
            raise BenchError(f"there is no workload {min(unknown)!r}; there is {loadtest.WORKLOAD}")
        taken = partial(loadtest.measure, rounds=job.rounds, systems=job.systems)
        return [loadtest.WORKLOAD], lambda say: iter([taken(say=say)])
    if job.name == fabric.NAME:
        names = list(job.workloads or fabric.NAMES)
        measured = partial(fabric.measure, rounds=job.rounds, only=job.workloads)
        return names, lambda say: iter([measured(say=say)])
    if job.name == disagg.NAME:
        names = list(job.workloads or disagg.NAMES)
        return names, lambda say: disagg.measure(rounds=job.rounds, only=job.workloads, systems=job.systems, say=say)
    if job.name == autoconfig.NAME:
        names = list(job.workloads or autoconfig.NAMES)
        return names, lambda say: autoconfig.measure(
            rounds=job.rounds, only=job.workloads, systems=job.systems, data=job.data, recorded=job.tables, say=say
        )
    try:
        benchmark = images.definition(job.models or _starter(), only=job.workloads, systems=job.systems)
    except KeyError as error:
        raise BenchError(f"there is no workload or system {error}") from error
    plan = RunPlan(rounds=job.rounds, cores=cores())
    names = [workload.name for workload in benchmark.workloads]
    return names, lambda say: iter([run(benchmark, plan, open_fleet=WorkerFleet, say=say)])


def text_table(written: Mapping[str, Any]) -> str:
    """The document for people: rows, then ratios."""
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
    """The models that ship with plait."""
    from plait_serving.images.config import STARTER_FOLDER

    return STARTER_FOLDER
