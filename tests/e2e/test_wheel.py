"""The built wheel in an environment of its own, away from any clone, with an empty home: everything that `pip install
plait` promises. The libraries that it asks for are those of the tests' environment; that they are the right ones,
`plait doctor` says there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from support.server import REPOSITORY

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

DEMO_S = 840


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built as `pip install` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, REPOSITORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = folder.glob("plait-*.whl")
    return found


class Environment:
    """A virtual environment with the wheel in it; libraries come from the tests' own, behind it on the path."""

    def __init__(self, root: Path, wheel: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.home.mkdir()
        venv.create(root / "venv", with_pip=False, symlinks=True)
        self.python = root / "venv" / "bin" / "python"
        (packages,) = (root / "venv" / "lib").glob("python*/site-packages")
        # As a line of a .pth file, a folder's own .pth files do not count: the clone's editable install is not there.
        libraries = [path for path in sys.path if Path(path).name == "site-packages"]
        (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps", "--no-index"]
        done = subprocess.run([*pip, wheel], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        self.packages = packages
        (root / "away").mkdir()

    @property
    def environ(self) -> dict[str, str]:
        """An empty home, and nothing of ours."""
        path = f"{self.python.parent}:/usr/bin:/bin"
        return {"PATH": path, "HOME": str(self.home), "TMPDIR": os.environ.get("TMPDIR", "/tmp"), "LANG": "C.UTF-8"}

    def run(self, *arguments: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """A command, far from the clone."""
        return subprocess.run(
            [self.python.parent / arguments[0], *arguments[1:]],
            capture_output=True,
            text=True,
            cwd=self.root / "away",
            env=self.environ,
            timeout=timeout_s,
            check=False,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory, wheel):
    return Environment(tmp_path_factory.mktemp("away"), wheel)


def test_the_wheel_holds_weights_examples_and_says_which_pythons(wheel):
    """Starter weights with their sums, a job, scenarios, the page; 3.11 to 3.13; no tests, benchmarks and results."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        text = archive.read(metadata).decode()
    assert "plait_serving/starter/weights/MANIFEST.json" in names
    assert "plait/tuning/examples/picks.yaml" in names
    tracked = (REPOSITORY / "serving/plait_serving/web").rglob("*")
    page = {str(path.relative_to(REPOSITORY / "serving")) for path in tracked if path.is_file()}
    assert len(page) > 30
    assert page <= set(names)
    assert any(name.startswith("plait_loadtest/builtin/") for name in names)
    assert "plait_report/style.css" in names
    assert [name for name in names if name.startswith(("tests/", "plait_bench/")) or "/results/" in name] == []
    assert [name for name in names if "testing" in name or "starter_training" in name] == []
    assert "Requires-Python: <3.14,>=3.11" in text
    classified = [line for line in text.splitlines() if "Python :: 3." in line]
    assert [line.rpartition(" ")[2] for line in classified] == ["3.11", "3.12", "3.13"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"Version: {project['version']}" in text
    headers, _, description = text.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in headers
    assert "pip install" in description
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert [link for link in links if not link.startswith("http")] == []


def test_an_installed_plait_comes_from_the_wheel_and_finds_its_libraries(environment):
    """Not from the clone; and every requirement of the wheel is met there."""
    done = environment.run("python", "-c", "import plait, plait_serving; print(plait.__file__, plait_serving.__file__)")
    assert done.stdout.count(str(environment.packages)) == 2, done.stdout + done.stderr
    done = environment.run("plait", "doctor", "--json", "--port", "0")
    found = {it["name"]: it for it in json.loads(done.stdout)}
    assert found["packages"]["verdict"] == "ok", found["packages"]
    assert found["starter"]["verdict"] == "ok"
    assert found["state"]["detail"].startswith(str(environment.home))


def test_a_job_of_plait_has_a_name(environment):
    """`plait tune run picks` finds it; one that is not there is told with those that are."""
    done = environment.run("plait", "tune", "run", "pick")
    assert done.returncode == 1
    assert "no such file, nor a job of plait (demo, images, picks); did you mean picks?" in done.stderr
    job = environment.run("python", "-c", "from plait.tuning.job.local_run import *; print(job_file(Path('picks')))")
    assert job.stdout.startswith(str(environment.packages)), job.stderr


def test_the_demo_runs(environment):
    """`plait demo`: a server, images, rankings, a load test, a tuning job; and no server is left."""
    done = environment.run("plait", "demo", "--out", "demo", timeout_s=DEMO_S)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    assert (environment.root / "away" / "demo" / "contact-sheet.png").stat().st_size > 10_000
    assert list(environment.home.glob(".local/state/plait/port-*/run.json")) == []
