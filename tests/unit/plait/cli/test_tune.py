"""`plait tune` from the outside: what goes where, exit codes, and knobs that end up in a plait.yaml."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fakes.tuned_app import job_text, write_job
from plait.cli import main as root
from plait.tuning.job import local_run as work
from support.server import REPOSITORY
from support.tune_jobs import job as spec_of
from support.tune_jobs import run_directly

CONFIG = """\
images:
  controlnets: {}
  knobs:
    threads: 4        # all of them
recommend: null
"""


@pytest.fixture(scope="module")
def fake_factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Jobs measure a made-up service."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "FACTORY", "fakes.measurer:cloned_measurer")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY / "tests"), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("PLAIT_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, fake_factory: None) -> Path:
    """The folder of a job that was run."""
    folder = tmp_path_factory.mktemp("done")
    job = write_job(folder, limits=["p99_ms <= 500"])
    assert root.main(["tune", "run", str(job), "--out", str(folder / "job")]) == 0
    return folder / "job"


def test_cli_tune_run_answers_on_stdout_and_resumes(done: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The recommendation is data, everything else is progress; a job that is over is not measured again."""
    before = (done / "measured.log").read_text()
    assert before.count("begin") == 4
    assert root.main(["tune", "run", str(done / "job.yaml"), "--out", str(done)]) == 0
    captured = capfd.readouterr()
    assert "goodput_per_cost" in captured.out
    assert "report: " in captured.err
    assert (done / "measured.log").read_text() == before
    assert (done / "report.html").read_text().startswith("<!doctype html>")


def test_cli_tune_status_lists_every_measurement(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people a line each, for programs JSON with the same numbers."""
    assert root.main(["tune", "status", str(done)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(" trial " in line for line in lines) == 3
    assert lines[-1].startswith("finished")
    assert "3 of 3 trials" in lines[-1]
    assert root.main(["tune", "status", str(done), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["phase"] == "finished"
    assert [row["kind"] for row in document["rows"]].count("trial") == 3


def test_cli_tune_best_is_what_apply_shows_and_writes(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Knobs by the names of the deployments, as YAML or JSON. Of a file the difference first, the file itself only
    without --dry-run; its comments stay, and so do its mode and a link to it."""
    config, file = tmp_path / "plait.yaml", tmp_path / "repository" / "file.yaml"
    file.parent.mkdir()
    file.write_text(CONFIG)
    file.chmod(0o600)
    config.symlink_to(file)
    assert root.main(["tune", "best", str(done), "--json"]) == 0
    knobs = json.loads(capsys.readouterr().out)
    assert set(knobs) == {"engine.threads", "engine.largest_batch"}
    assert root.main(["tune", "best", str(done)]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == knobs
    assert root.main(["tune", "apply", str(done), str(config), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert config.read_text() == CONFIG
    assert root.main(["tune", "apply", str(done), str(config)]) == 0
    assert capsys.readouterr().out == shown
    written = yaml.safe_load(config.read_text())["images"]["knobs"]
    assert written.get("largest_batch", 16) == knobs["engine.largest_batch"]
    assert written["threads"] == knobs["engine.threads"]
    assert "# all of them" in config.read_text()
    assert config.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert root.main(["tune", "apply", str(done), str(config)]) == 0
    assert not capsys.readouterr().out


def test_cli_tune_apply_that_cannot_write_says_so(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence, and the file stays as it is."""
    config = tmp_path / "plait.yaml"
    config.write_text(CONFIG)
    (tmp_path / "plait.yaml.new").mkdir()
    assert root.main(["tune", "apply", str(done), str(config)]) == 1
    assert capsys.readouterr().err == f"plait tune: {config}.new: Is a directory\n"
    assert config.read_text() == CONFIG


def test_cli_tune_apply_needs_a_file_and_a_server(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """plait's default configuration cannot be written, and a port without a server cannot be changed."""
    assert root.main(["tune", "apply", str(done)]) == 1
    assert "name the plait.yaml" in capsys.readouterr().err
    assert root.main(["tune", "apply", str(done), "--port", "1"]) == 1
    assert "no plait serve" in capsys.readouterr().err


def test_cli_tune_report_and_compare(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report can be made at any time, and two jobs stand side by side."""
    page = tmp_path / "page.html"
    assert root.main(["tune", "report", str(done), "--out", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert "plait tune run" in page.read_text()
    assert root.main(["tune", "compare", str(done), str(done), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["jobs"]) == 2
    assert root.main(["tune", "compare", str(done)]) == 2


def test_cli_tune_leaves_a_choice_to_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several goals have no one best configuration, which is not to say that nothing was measured."""
    state = run_directly(tmp_path, spec_of(objective="max goodput_per_s, min cost"))
    said = f"of {len(state.answers)} configurations each is best in some goal"
    assert root.main(["tune", "best", str(tmp_path)]) == 99
    assert said in capsys.readouterr().err
    assert root.main(["tune", "apply", str(tmp_path), "plait.yaml"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("fake_factory")
def test_cli_tune_says_99_and_why_if_nothing_is_feasible(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The limit that binds, and by how much."""
    job = write_job(tmp_path, limits=["p99_ms <= 1"], budget={"trials": 1})
    assert root.main(["tune", "run", str(job), "--out", str(tmp_path / "job")]) == 99
    assert "p99_ms <= 1" in capfd.readouterr().out
    assert root.main(["tune", "best", str(tmp_path / "job")]) == 99
    assert root.main(["tune", "apply", str(tmp_path / "job"), "x.yaml"]) == 1


def test_cli_tune_refuses_what_is_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence with file and field, exit code 1."""
    job = tmp_path / "job.yaml"
    job.write_text(job_text(objective="max happiness at rate x"))
    assert root.main(["tune", "run", str(job), "--out", str(tmp_path / "job")]) == 1
    assert str(job) in capsys.readouterr().err
    assert root.main(["tune", "status", str(tmp_path)]) == 1
    assert "no job" in capsys.readouterr().err
