"""`plait tune library`: from somebody's CSV file to past runs that a job learns from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.cli import main as root
from plait.tuning.measure.checks import prepare, target_config
from plait.tuning.measure.measurer import PlaitMeasurer
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.past_runs import past_runs
from support.tune_jobs import JOB, job

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
    assert "the best of them was 117 % better in goodput_per_cost than the best that is left" in said[0]


def test_a_library_becomes_a_job(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its knobs with the values that were seen, its goal, its most frequent configuration as the reference; with
    `--only-measured` nothing else is proposed. A file that is there is not overwritten, a folder is not made."""
    (measured / "map.yaml").write_text(MAP + "sets: {replicas: cn-picks.replicas, batch: cn-picks.window}\n")
    with (measured / "runs.csv").open("a") as file:
        file.write("2,4,6.1\n")
    assert plait("import", "runs.csv", "--map", "map.yaml", "--into", "past.log") == 0
    assert plait("job", "past.log", "--scenario", "picks", "--out", "all.yaml") == 0
    assert plait("job", "past.log", "--scenario", "picks", "--out", "some.yaml", "--only-measured") == 0
    spec, some = (parse_job((measured / name).read_text(), folder=measured) for name in ("all.yaml", "some.yaml"))
    assert spec.target.app == "recommend"
    assert spec.settings(spec.default) == {"cn-picks.replicas": 2, "cn-picks.window": 4}
    assert "2 times" in spec.reference.why
    assert [knob.values for knob in spec.knobs.values()] == [(1, 2, 9), (1, 4)]
    assert [len(each.space.cells()) for each in (spec, some)] == [6, 6]
    assert prepare(spec, target_config(spec.target, live=False))[0]
    runs, said = past_runs(some, ())
    assert next(len(run.trials) for run in runs) == 7
    assert said == ()
    capsys.readouterr()
    assert plait("job", "past.log", "--scenario", "picks", "--out", "all.yaml") == 1
    assert "all.yaml is there already" in capsys.readouterr().err
    assert plait("job", "past.log", "--scenario", "picks", "--out", "nowhere/job.yaml") == 1
    assert "nowhere/job.yaml cannot be written: No such file" in capsys.readouterr().err
    (measured / "target.yaml").write_text("{command: [node,\n")
    assert plait("job", "past.log", "--scenario", "picks", "--target", "target.yaml", "--out", "theirs.yaml") == 1
    assert "target.yaml, line 2: " in capsys.readouterr().err


def test_a_csv_file_of_any_service_becomes_a_job(measured: Path, capsys, monkeypatch) -> None:
    """With the target of the service; a knob that is empty with some values of another one depends on it, what a row
    says of a knob that does not count changes nothing, and one that had one value keeps it."""
    rows = ["plain,1,,10", "plain,4,,12", "packed,1,3,11", "packed,4,9,15", "packed,4,9,16"]
    (measured / "other.csv").write_text("\n8,".join(["mib,mode,batch,level,rps", *rows]))
    (measured / "other.yaml").write_text(
        "service: _größe\nknobs: {level: level, mode: mode, batch: batch, cache: mib}\nmetrics: {goodput_per_s: rps}\n"
    )
    (measured / "target.yaml").write_text("{command: ['true'], ready: 'http://127.0.0.1:{port}/'}\n")
    (measured / "load.yaml").write_text(
        "{target: {api: raw}, arrivals: {kind: poisson, rate_per_s: 20}, duration_s: 10, slo: {latency_ms: 50}}\n"
    )
    (measured / "jobs").mkdir()
    words = ["--map", "other.yaml", "--target", "target.yaml", "--scenario", "load.yaml", "--out", "jobs/mine.yaml"]
    assert plait("job", "other.csv", *words) == 0, capsys.readouterr().err
    spec = parse_job((measured / "jobs" / "mine.yaml").read_text(), folder=measured / "jobs")
    assert spec.knobs["level"].when == {"mode": ("packed",)}
    assert spec.default == {"mode": "packed", "batch": 4, "cache": 8, "level": 9}
    assert str(spec.goal) == "max goodput_per_s"
    assert len(spec.space.cells()) == 2 + 2 * 2
    monkeypatch.setenv("PLAIT_STATE_DIR", str(measured / "state"))
    measurer = PlaitMeasurer(folder=measured, commands=True)
    assert measurer.check(spec).service == "gr--e"
    measurer.close()
    runs, said = past_runs(spec, ())
    assert (next(len(run.trials) for run in runs), said) == (5, ())


def test_a_job_proposes_only_what_was_measured(measured: Path) -> None:
    """`candidates: measured` leaves out the rest of the space, and learns from all of it; a library with nothing of the
    space is named with the reason."""
    assert plait("import", "runs.csv", "--map", "map.yaml", "--into", "past.log") == 0
    few = job(library=str(measured / "past.log"), candidates="measured")
    assert few.candidates == tuple({"replicas": pods, "batch": batch} for pods in (1, 2) for batch in (1, 4))
    assert len(few.space.cells()) == 4
    with pytest.raises(JobRefused, match="no measurement of a configuration of this space: replicas is"):
        job(
            library=str(measured / "past.log"), candidates="measured", constraints=[],
            knobs={**JOB["knobs"], "replicas": {"kind": "int", "low": 20, "high": 30}},
            reference={"config": {"replicas": 20, "batch": 1}},
        )  # fmt: skip
