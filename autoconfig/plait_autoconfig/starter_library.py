"""The runs that ship with plait: its image engine and its ranker under eight loads, on a small machine.

`starter_library.jsonl.gz` holds them as lines of the library; each was measured by `python -m
plait_bench.autoconfig.cells WORKLOAD --out FILE`.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib import resources

from plait_autoconfig.library import LibraryRun
from plait_autoconfig.rows import load_lines


@cache
def starter_runs() -> tuple[LibraryRun, ...]:
    """Return all runs that ship with plait."""
    stored = resources.files("plait_autoconfig").joinpath("starter_library.jsonl.gz").read_bytes()
    return load_lines(gzip.decompress(stored).decode().splitlines()).runs
