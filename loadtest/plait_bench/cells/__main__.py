"""The command line of `python -m plait_bench.cells`; see the package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from plait_bench.cells.run import measure
from plait_bench.cells.workloads import WORKLOADS


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(prog="python -m plait_bench.cells")
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3, help="how often each cell is measured")
    given = parser.parse_args()
    measure(
        WORKLOADS[given.workload],
        given.out,
        times=given.times,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    main()
