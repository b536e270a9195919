"""`python -m plait_bench.gpu` as a borrowed GPU runs it, small and on a CPU: with the packages of such a machine."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plait_bench.gpu import __main__ as gpu
from plait_bench.gpu.rows import GpuRun

_PROGRAM = """
import runpy
import sys
from importlib.metadata import MetadataPathFinder

finders = sys.meta_path[:]

class WithoutThese:
    names = {"fastapi", "hdrh", "openvino", "optuna", "ray", "starlette", "torchsde"}
    find_distributions = MetadataPathFinder.find_distributions

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            return None
        return next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)

sys.meta_path[:] = [WithoutThese()]
sys.argv[0] = "plait_bench.gpu"
runpy.run_module("plait_bench.gpu", run_name="__main__")
"""


@pytest.mark.slow
def test_every_part_runs_to_its_end(tmp_path: Path) -> None:
    """Rows of all, none failed, and nothing else in the folder than what may be brought back."""
    command = [sys.executable, "-c", _PROGRAM, "--out", str(tmp_path), "--tiny", "--minutes", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row for row in rows if row["metric"] == "failed"] == []
    assert list(dict.fromkeys(row["part"] for row in rows)) == list(gpu.PARTS)
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "log.txt"}
    systems = {row.get("system") for row in rows if row["part"] == "sdxl" and row["metric"] == "ms"}
    assert systems == {"plait", "torch", "torch.compile"}
    cases = {row["workload"] for row in rows if row["part"] == "flux" and row.get("system") == "plait"}
    assert cases == {"64x64 images 1", "64x64 images 4, a LoRA set each", "64x64 images 1, compiled"}


def failing(run: GpuRun) -> None:
    raise ModuleNotFoundError("No module named 'networkx'")


def working(run: GpuRun) -> None:
    run.row("working", "all", 1.0, metric="ms", unit="ms")


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes after the time is over is said to be left out."""
    monkeypatch.setattr(gpu, "PARTS", {name: f"{__name__}:{name}" for name in ("failing", "working")})
    for minutes, code, metrics in (("9", 1, ["failed", "ms"]), ("0", 0, ["skipped"] * 2)):
        monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / minutes), "--tiny", "--minutes", minutes])
        assert gpu.main() == code
        rows = (tmp_path / minutes / "rows.jsonl").read_text().splitlines()
        assert [json.loads(row)["metric"] for row in rows] == metrics


def test_wheels_bring_what_an_interpreter_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without installing anything, and never before what is there."""
    with zipfile.ZipFile(tmp_path / "lacking-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking_package/__init__.py", "NAME = 'brought'")
        wheel.writestr("json/__init__.py", "raise AssertionError")
    monkeypatch.setattr(sys, "path", [*sys.path])
    gpu.add_wheels(tmp_path)
    import lacking_package  # type: ignore[import-not-found]

    assert lacking_package.NAME == "brought"
    assert json.dumps([]) == "[]"
