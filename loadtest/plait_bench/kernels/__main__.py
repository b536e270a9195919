"""The command line of `python -m plait_bench.kernels`; see the package."""

from __future__ import annotations

import argparse
import json
import sys

from plait_bench.document import document
from plait_bench.host import commit, host_facts
from plait_bench.kernels import NAME, benchmark
from plait_bench.runner import RunPlan, joined, run
from plait_bench.tables import ROOT


def main() -> None:
    """Measure, and print rows or a JSON document."""
    parser = argparse.ArgumentParser(prog="python -m plait_bench.kernels")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", action="append", default=[], help="only this operator or case; may be repeated")
    given = parser.parse_args()
    parts = run(
        benchmark(only=given.workload),
        RunPlan(rounds=given.rounds, settles=False),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    written = document(NAME, commit(ROOT), host_facts(), joined(list(parts)))
    if given.json:
        print(json.dumps(written, indent=1))
        return
    for row in written["rows"]:
        print(f"{row['workload']:<40} {row['system']:<14} {row['metric']:<14} {row['value']:>10.4g} {row['unit']}")


if __name__ == "__main__":
    main()
