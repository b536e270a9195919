"""The demo's tuning job: run anew each time, and told in two lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.demo.run import tune_ranking
from plait.errors import PlaitError
from plait.errors import told as raised_as_told
from plait.tuning.job import local_run
from plait_autoconfig.errors import JobBroken, NothingValid, TunerError
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import JobState


def test_cli_demo_tunes_three_trials_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier demo left is taken away, the job has three trials, and the report's place is told."""
    (tmp_path / "job.sqlite").touch()
    ran: list[JobSpec] = []

    def run(job: Path, *, folder: Path) -> tuple[JobState, Path]:
        assert not folder.exists()
        ran.append(parse_job(job.read_text(), folder=job.parent))
        return state_of(ran[0], []), folder

    monkeypatch.setattr(local_run, "run", run)
    told = tune_ranking(tmp_path)
    assert ran[0].budget.trials == 3
    assert str(tmp_path / "report.html") in told


def test_cli_demo_keeps_its_hands_off_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds no job is not removed."""
    (tmp_path / "mine.txt").write_text("x")
    job = local_run.EXAMPLES / "demo.yaml"
    spec = parse_job(job.read_text(), folder=job.parent)
    monkeypatch.setattr(local_run, "run", lambda job, folder: (state_of(spec, []), folder))
    tune_ranking(tmp_path)
    assert (tmp_path / "mine.txt").exists()


def test_cli_demo_goes_on_where_the_host_is_too_busy_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are made; what is broken ends it all the same."""

    def fails(error: Exception) -> None:
        def run(job: Path, *, folder: Path) -> None:
            with raised_as_told(TunerError):
                raise error

        monkeypatch.setattr(local_run, "run", run)

    fails(NothingValid("requests left late"))
    assert "NOTHING TUNED: requests left late" in tune_ranking(tmp_path)
    fails(JobBroken("the child died"))
    with pytest.raises(PlaitError, match="the child died"):
        tune_ranking(tmp_path)
