"""Core budgets, thread caps, and which hosts are shared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.config import ServedConfig
from plait.deployments import deployments
from plait_serving.cores import HostCores, capped, declare_threads, threads_of_host
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.images.config import ControlNetSection, ImagesSection


@pytest.mark.parametrize(
    ("threads", "num_cpus", "cap"),
    [(0, None, 0), (3, None, 3), (0, 2.0, 2), (0, 0.5, 1), (1, 2.5, 3), (4, 2.5, 4)],
)
def test_threads_are_a_cap_at_or_above_the_budget(threads: int, num_cpus: float | None, cap: int) -> None:
    """0 is the budget rounded up; without a budget it stays 0, all cores."""
    assert capped(EngineKnobs(threads=threads), num_cpus).threads == cap


def test_sections_apply_their_budget(tmp_path: Path) -> None:
    """The engine of two and a half cores has three threads; a ControlNet of two has two, not its default of one."""
    images = ImagesSection(num_cpus=2.5, controlnets={"edges": ControlNetSection(folder=tmp_path, num_cpus=2)})
    _, engine, controlnet = deployments(ServedConfig(images=images, recommend=None))
    assert engine.knobs is not None
    assert (engine.knobs["threads"], controlnet.knobs) == (3, {"threads": 2})
    _, engine, *_ = deployments(ServedConfig(recommend=None))
    assert engine.knobs == ImagesSection().knobs.model_dump(mode="json")
    with pytest.raises(ValueError, match="num_cpus"):
        ImagesSection(num_cpus=0)


def test_a_host_is_shared_when_the_caps_exceed_its_cores(tmp_path: Path) -> None:
    """Each living process counts once, with its last declaration."""
    folder = tmp_path / "host"
    assert threads_of_host(folder, cores=2) == HostCores(cores=2, planned_threads=0)
    declare_threads(folder, 1)
    declare_threads(folder, 2)
    assert threads_of_host(folder, cores=2) == HostCores(cores=2, planned_threads=2)
    assert not threads_of_host(folder, cores=2).is_shared
    declare_threads(folder, 3)
    assert threads_of_host(folder, cores=2).is_shared


def test_processes_that_ended_do_not_count(tmp_path: Path) -> None:
    """Nor does one that was given the number of such a process, nor a file that says nothing."""
    program = "import sys; from pathlib import Path; from plait_serving.cores import declare_threads as d"
    subprocess.run([sys.executable, "-c", f"{program}; d(Path(sys.argv[1]), 5)", str(tmp_path)], check=True)
    (tmp_path / f"threads-{os.getpid()}-1").write_text("5")
    (tmp_path / "threads-x-y").write_text("5")
    assert len(list(tmp_path.iterdir())) == 3
    assert threads_of_host(tmp_path, cores=2).planned_threads == 0
