"""The libraries of the zoo, installed beside nothing else, and a process that has them to judge their models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plait_bench.benchmark import Say
from plait_bench.errors import BenchError

__all__ = ["LIBRARIES", "install", "judge"]

LIBRARIES = ("deepctr-torch==0.3.0", "torch-rechub==0.9.0", "recbole==1.2.1", "torchrec==1.8.0")
_NEEDED = (
    "absl-py==2.5.1",
    "colorama==0.4.6",
    "colorlog==6.12.0",
    "fbgemm-gpu-cpu==1.8.0",
    "lightning-utilities==0.15.3",
    "mypy-extensions==1.2.0",
    "orjson==3.13.0",
    "pandas==2.2.3",
    "pyre-extensions==0.0.32",
    "python-dateutil==2.9.0.post0",
    "pytz==2026.6",
    "pyvers==0.2.3",
    "tensorboard==2.21.0",
    "tensordict==0.15.3",
    "texttable==1.7.2",
    "thop==0.1.1.post2209072238",
    "torchmetrics==1.0.3",
    "typing-inspect==0.9.0",
    "tzdata==2026.6",
)
"""What the libraries import on the way to their models, and this environment does not have."""

_PIP_S, _JUDGE_S = 600.0, 1_800.0


def install(folder: Path, say: Say) -> None:
    """Install the libraries into a folder, without their dependencies, unless they are there. Raises `BenchError`."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing {', '.join(LIBRARIES)} into {folder}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]
    run_command([*command, str(folder), *LIBRARIES, *_NEEDED], {}, _PIP_S)
    (folder / "complete").touch()


def judge(folder: Path, variants: Sequence[str] = ()) -> list[Mapping[str, Any]]:
    """Return the facts about all variants, or about those named, with the libraries of `folder`. Raises
    `BenchError`."""
    paths = [*sys.path, str(folder)]  # behind: torch and numpy stay ours
    command = [sys.executable, "-m", "plait_bench.zoo.judge", *variants]
    made = run_command(command, {"PYTHONPATH": os.pathsep.join(paths)}, _JUDGE_S)
    return [json.loads(line) for line in made.splitlines()]


def run_command(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> str:
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
