"""What `plait bench` does: the benchmark of that name, and no other, is imported; then runner, document, record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from plait_bench import records
from plait_bench.benchmark import Say
from plait_bench.errors import BenchError
from plait_bench.host import BUSY_LOAD, ROOT, SLOW_WAKE_US, UNKNOWN, commit, host_facts
from plait_bench.runner import TRIALS, RunPlan, joined, run

NAMES = ("images", "loadtest", "disagg", "fabric", "kernels", "autoconfig", "tuning", "placement", "zoo", "models",
         "faults")  # fmt: skip
"""Each is a module or a package here, whose `benchmark` takes `only` (workloads) and the options that it has."""

RESULTS = ROOT / "loadtest" / "results"

# As many as make a 20th and an 80th percentile mean something in a quarter of an hour on two cores.
ROUNDS, QUICK_ROUNDS = 5, 3


def measure(
    name: str,
    *,
    say: Say,
    rounds: int | None = None,
    quick: bool = False,
    workloads: Sequence[str] = (),
    systems: Sequence[str] = (),
    record: bool = False,
    results: Path | None = None,
    copy_of: str = "",
    **options: Any,
) -> dict[str, Any]:
    """Run the benchmark and return its document; record each part once it is complete. Raises `BenchError`.

    `rounds` None: the benchmark's own number; empty `workloads` or `systems`: all. `copy_of`: the commit that this tree
    is a copy of, where there is no git. `options`: those of the benchmark that were given.
    """
    at = _commit(copy_of, record=record)
    module = import_module(f"plait_bench.{name}")
    takes = signature(module.benchmark).parameters
    # Published data may be named for all of them, by the environment.
    if ignored := sorted(options.keys() - takes - {"data"}):
        raise BenchError(f"{name} takes no {ignored[0]}")
    given = {key: value for key, value in {**options, "systems": systems}.items() if key in takes}
    # The rounds of the tuner's and the placement benchmark are seeds.
    usual = getattr(module, "QUICK_SEEDS", QUICK_ROUNDS) if quick else getattr(module, "SEEDS", ROUNDS)
    plan = RunPlan(
        rounds=rounds or usual,
        trials=1 if quick else TRIALS,
        systems=tuple(systems),
        settles=(rounds or usual) > QUICK_ROUNDS,  # a quick run is a look
    )
    benchmark, host = module.benchmark(only=workloads, **given), host_facts()
    path = results or RESULTS / f"{name}.jsonl"
    say(f"{name} at {at} on {host['cpu']}, {host['cores']} cores; load average {host['loadavg_1m']}")
    _warn(host, say)
    parts = []
    for part in run(benchmark, plan, say=say):
        parts.append(part)
        if record:
            if _commit(copy_of, record=record) != at:  # nor did anybody change it meanwhile
                raise BenchError(f"the checkout left commit {at} while it was measured: nothing more is recorded")
            left_out = records.put(path, name, at, host, part.rows)
            say(f"recorded in {path}" + (f", but for {left_out} rows: the host was busy" if left_out else ""))
    return records.document(name, at, host, joined(parts))


def _commit(copy_of: str, *, record: bool) -> str:
    """Return the checkout's commit, or the one that was said to be copied here. Raises `BenchError` if that cannot
    be, or rows that are to be recorded could not name it."""
    found = commit(ROOT)
    if found != UNKNOWN and copy_of:
        raise BenchError("--at is for a copy without git; this checkout knows its commit")
    if record and not copy_of:
        records.require_clean(ROOT)
    return copy_of or found


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
