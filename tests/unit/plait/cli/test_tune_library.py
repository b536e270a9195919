"""`plait tune library`: from somebody's CSV file to past runs that a job learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import main as root
from plait_autoconfig.jobs.past_runs import past_runs
from support.tune_jobs import job

MAP = """\
service: mine
knobs: {replicas: pods, batch: batch}
metrics: {goodput_per_cost: per cost}
goals: [max goodput_per_cost]
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with measurements: the sum of pods and batch, one of them outside the job's space."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{pods},{batch},{pods + batch}" for pods in (1, 2, 9) for batch in (1, 4)]
    (tmp_path / "runs.csv").write_text("\n".join(["pods,batch,per cost", *rows]) + "\n")
    (tmp_path / "map.yaml").write_text(MAP)
    return tmp_path


def plait(*words: str) -> int:
    """The exit code of a command."""
    return root.main(["tune", "library", *words])


def test_a_csv_file_becomes_a_library_of_a_job(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported once even if twice, listed, shown, exported and merged; the job says what it cannot use, and why."""
    for added in (6, 0):
        assert plait("import", "runs.csv", "--map", "map.yaml", "--into", "past.log") == 0
        assert f"{added} of 6 trials added" in capsys.readouterr().out
    assert plait("list", "past.log", "--json") == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["trials"], listed["knobs"]) == (6, ["batch", "replicas"])
    assert plait("show", "past.log", listed["run_id"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 7
    assert plait("export", "past.log", "past.jsonl") == 0
    assert plait("merge", "other.log", "past.jsonl") == 0
    assert plait("merge", "other.log", "past.log") == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "1 runs, 6 trials added to other.log", "1 runs, 0 trials added to other.log"
    ]  # fmt: skip
    runs, said = past_runs(job(library=str(measured / "other.log"), starter_library=False), ())
    assert [len(run.trials) for run in runs] == [6]
    assert len(said) == 1
    assert "4 of 6 trials can be used; 2 not: replicas is 9" in said[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["list", "nothing.log"], "there is no library nothing.log"),
        (["merge", "other.log", "nothing.log"], "there is no library nothing.log"),
        (["import", "runs.csv", "--map", "nothing.yaml"], "nothing.yaml"),
        (["import", "runs.csv"], "needs a map"),
    ],
)
def test_mistakes_are_said_in_a_sentence(
    measured: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """And nothing is made."""
    before = sorted(measured.iterdir())
    assert plait(*words) != 0
    assert said in capsys.readouterr().err
    assert sorted(measured.iterdir()) == before
