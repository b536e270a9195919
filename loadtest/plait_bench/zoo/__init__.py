"""Models of other libraries, as their users have them: does the cutter take them, and how much crosses?

The libraries are installed beside nothing else, without their dependencies, in a folder of the cache; torch and numpy
stay those of this environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from plait_bench.benchmark import Benchmark, Metric, Reading, Say, Subject, Workload, chosen
from plait_bench.cache import cache_folder
from plait_bench.errors import BenchError

__all__ = ["NAME", "benchmark"]

NAME = "zoo"

_LIBRARIES = ("deepctr-torch==0.3.0", "torch-rechub==0.9.0", "recbole==1.2.1")
_NEEDED = (
    "absl-py==2.5.1",
    "colorama==0.4.6",
    "colorlog==6.12.0",
    "pandas==2.2.3",
    "python-dateutil==2.9.0.post0",
    "pytz==2026.6",
    "tensorboard==2.21.0",
    "texttable==1.7.2",
    "thop==0.1.1.post2209072238",
    "tzdata==2026.6",
)
"""What the libraries import on the way to their models, and this environment does not have."""

_PIP_S, _JUDGE_S = 600.0, 1_800.0


class Zoo(Workload):
    """For each variant: bytes that cross for 100 candidates, seconds to package it, and the max difference of a score;
    `refused` is 1 for those that are not taken."""

    name = "zoo"
    systems = ("plait",)
    rounds: ClassVar[Mapping[str, int]] = {"plait": 1}
    metrics: Mapping[str, Metric] = {
        "crossing_bytes": Metric(unit="bytes", better="lower"),
        "package_s": Metric(unit="s", better="lower"),
        "max_difference": Metric(unit="score", better="lower"),
        "refused": Metric(unit="models", better="lower"),
    }

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Install the libraries, unless they are there."""
        self.folder, self.say = cache_folder() / "zoo-1", say
        if not (self.folder / "complete").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            say(f"installing {', '.join(_LIBRARIES)} into {self.folder}")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
            _run([*command, str(self.folder), *_LIBRARIES, *_NEEDED], {}, _PIP_S)
            (self.folder / "complete").touch()
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the cutter."""
        yield _Judging(self)


@dataclass(frozen=True)
class _Judging:
    """Implements `Subject`."""

    workload: Zoo

    def warm_up(self) -> None:
        """Do nothing: bytes are the same when cold."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Package and compare all variants."""
        paths = [*sys.path, str(self.workload.folder)]  # behind: torch and numpy stay ours
        made = _run([sys.executable, "-m", "plait_bench.zoo.judge"], {"PYTHONPATH": os.pathsep.join(paths)}, _JUDGE_S)
        return [reading for line in made.splitlines() for reading in self._readings(json.loads(line))]

    def _readings(self, found: Mapping[str, Any]) -> list[Reading]:
        if "refused" in found:
            self.workload.say(f"{found['variant']}: {found['refused']}")
        values = {name: float(found[name]) for name in self.workload.metrics if name != "refused" and name in found}
        values["refused"] = float("refused" in found)
        return [Reading(workload=found["variant"], metric=name, value=value) for name, value in values.items()]


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
    """Return what a command prints. Raises `BenchError` with the end of its errors."""
    try:
        made = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{Path(command[0]).name} {command[2]} took more than {timeout_s:.0f} s") from error
    if made.returncode:
        raise BenchError(f"{' '.join(command[1:4])} failed: {made.stderr.strip()[-500:]}")
    return made.stdout


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark. Raises `BenchError` for an unknown workload."""
    chosen(only, (Zoo.name,), "workload")
    return Benchmark(name=NAME, workloads=(Zoo(),))
