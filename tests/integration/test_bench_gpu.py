"""`python -m plait_bench.gpu` as a borrowed GPU runs it, small and on a CPU: with the packages of such a machine."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plait_bench.gpu.__main__ import PARTS, add_wheels

_PROGRAM = """
import os
import runpy
import sys
from importlib.metadata import MetadataPathFinder

finders = sys.meta_path[:]

class WithoutThese:
    names = {"fastapi", "hdrh", "openvino", "optuna", "ray", "starlette", "torchsde", os.environ.get("ABSENT")}
    find_distributions = MetadataPathFinder.find_distributions

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return None
        return next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)

sys.meta_path[:] = [WithoutThese()]
sys.argv[0] = "plait_bench.gpu"
runpy.run_module("plait_bench.gpu", run_name="__main__")
"""


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, object]], str]:
    """The exit code, the rows and what was said."""
    command = [sys.executable, "-c", _PROGRAM, "--out", str(folder), "--tiny", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    path = folder / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return done.returncode, rows, done.stdout + done.stderr


@pytest.mark.slow
def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    """Rows of all, none failed, and nothing else in the folder than what may be brought back."""
    code, rows, said = run(tmp_path, "--minutes", "9")
    failed = [row for row in rows if row["metric"] == "failed"]
    assert (code, failed) == (0, []), said[-3000:]
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(PARTS)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "log.txt"}
    systems = {row.get("system") for row in rows if row["part"] == "sdxl" and row["metric"] == "ms"}
    assert systems == {"plait", "torch", "torch.compile"}
    cases = {row["workload"] for row in rows if row["part"] == "flux" and row.get("system") == "plait"}
    assert cases == {"64x64 images 1", "64x64 images 4, a LoRA set each", "64x64 images 1, compiled"}


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes after the time is over is said to be left out."""
    monkeypatch.setenv("ABSENT", "networkx")
    code, rows, _ = run(tmp_path / "out", "--part", "dense", "--part", "sd15")
    assert code == 1
    assert [row["metric"] for row in rows if row["part"] == "dense"] == ["failed"]
    assert "ms" in {row["metric"] for row in rows if row["part"] == "sd15"}
    code, rows, _ = run(tmp_path / "late", "--minutes", "0")
    assert (code, [row["metric"] for row in rows]) == (0, ["skipped"] * len(PARTS))


def test_wheels_bring_what_an_interpreter_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without installing anything, and never before what is there."""
    with zipfile.ZipFile(tmp_path / "lacking-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking_package/__init__.py", "NAME = 'brought'")
        wheel.writestr("json/__init__.py", "raise AssertionError")
    monkeypatch.setattr(sys, "path", [*sys.path])
    add_wheels(tmp_path)
    import lacking_package  # type: ignore[import-not-found]

    assert lacking_package.NAME == "brought"
    assert json.dumps([]) == "[]"
