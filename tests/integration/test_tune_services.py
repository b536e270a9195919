"""Services that are not plait's are tuned: a command starts them, a hook changes them, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fakes.bad_server import bad_server
from plait.cli import main as root
from plait.server import processes
from plait.tuning.job.local_run import open_state
from plait.tuning.measure import service_subject
from plait.tuning.measure.application import NotReady, RefusedStart
from plait.tuning.measure.service_subject import ServiceSubject
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.records import Record
from plait_autoconfig.jobs.store import JobStore
from support.documents import blocks_of, read
from support.forking import forked
from support.server import REPOSITORY
from support.waiting import wait_for

SERVER = REPOSITORY / "tests" / "fakes" / "slots.mjs"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")

(GUIDE,) = (
    yaml.safe_load(block.text)
    for block in blocks_of("autoconfig/README.md", read("autoconfig/README.md"))
    if "server.mjs" in block.text
)
JOB: dict[str, Any] = {
    **GUIDE,
    "scenarios": [
        {
            **GUIDE["scenarios"][0],
            "arrivals": {"kind": "constant", "rate_per_s": 30},
            "duration_s": 2,
            "slo": {"latency_ms": 20_000, "percentile": 90},
        }
    ],
    "objective": "min cost at rate 30",
    "prices": {"gib": 0},
    "rate_tolerance": 0.1,
    "budget": {"trials": 6},  # a busy host makes some invalid
    "confirm": {"best": 0},
    "reference": {"config": {"workers": 16, "queue": True, "length": 100}, "every": 0},
    "designer": {"name": "random"},
    "starter_library": False,
    "trial_limit_s": 60,
}
"""The guide's job, shorter."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the job and plait's state are; in the end no process is left that a job started."""
    monkeypatch.setenv("PLAIT_STATE_DIR", str(tmp_path / "state"))
    yield tmp_path
    assert not started_here(tmp_path)


def started_here(folder: Path) -> list[int]:
    """The processes of services that a job of this folder's state has started."""
    records = [json.loads(path.read_text()) for path in folder.glob("state/port-*/run.json")]
    return [each.pid for record in records for each in processes.members(record["run_id"])]


def written(folder: Path, **changes: Any) -> str:
    """The file of the job with other settings, and its server."""
    shutil.copy(SERVER, folder / "server.mjs")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, **changes}, sort_keys=False))
    return str(path)


@needs_node
def test_a_server_in_another_language_is_tuned_by_what_the_guide_says(folder, capsys):
    """One slot refuses most of 30 requests a second of 100 ms each, and four answer them, at whatever pace: these are
    recommended, as arguments, and where no queue is its length is not given."""
    tried = [{"workers": 1, "queue": False}, {"workers": 4, "queue": True, "length": 100}]
    path, out = written(folder, candidates=tried), str(folder / "out")
    assert root.main(["tune", "run", path, "--out", out]) == 0
    state, _ = open_state(folder / "out")
    shown = {row.config["workers"]: row for row in state.rows if row.outcome is not None and not row.outcome.invalid}
    assert {workers: row.feasible for workers, row in shown.items()} == {16: True, 4: True, 1: False}
    assert shown[4].restarted == ("service",)
    assert shown[4].outcome.metrics["reserved_cores"] == 4.0
    assert shown[4].samples.memory_bytes > 0
    capsys.readouterr()
    assert root.main(["tune", "best", out, "--as", "argv"]) == 0
    assert capsys.readouterr().out == "--workers=4 --queue --queue-length=100\n"
    assert root.main(["tune", "apply", out]) == 1
    assert "plait tune best --as" in capsys.readouterr().err


def subject_of(folder: Path, *, sets: str = "workers", **target: Any) -> ServiceSubject:
    """What a job with this target measures: by default, a server of Python's own."""
    (state := folder / "state").mkdir(mode=0o700, exist_ok=True)
    python = [sys.executable, "-m", "http.server", "{port}", "--bind=127.0.0.1"]
    started = {} if "apply" in target else {"command": python, "ready": "http://127.0.0.1:{port}/"}
    changes = {
        "target": {"reserves": {"cores": "slots"}, **started, **target},
        "knobs": {"slots": {"kind": "choice", "values": [1, 4, 16], "ordered": True, "sets": sets}},
        "reference": {"config": {"slots": 16}},
    }
    spec = parse_job(yaml.safe_dump({**JOB, **changes}), folder=folder)
    return ServiceSubject(spec, spec.target, root=state, folder=folder)


def test_a_configuration_is_a_start_and_the_same_one_is_none(folder: Path) -> None:
    """Another configuration is another process; after a failure the same one is started again."""
    subject = subject_of(folder, knobs="env")
    first = subject.apply({"slots": 1}, limit_s=60.0)
    (pid,) = subject.pids()
    assert b"workers=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert first.restarted == ("service",)
    assert subject.apply({"slots": 1}, limit_s=60.0).restarted == ()
    assert list(subject.pids()) == [pid]
    subject.after_failure()
    subject.apply({"slots": 1}, limit_s=60.0)
    assert list(subject.pids()) != [pid]
    assert subject.reserved.cores == 1.0
    subject.close()
    assert subject.pids() == {}


def test_a_service_that_ends_or_never_answers_is_a_failed_start(folder: Path) -> None:
    """With its last words; or with what is waited for."""
    ends = subject_of(folder, command=[sys.executable, "-c", "import sys; sys.exit('no room for ' + sys.argv[1])"])
    with pytest.raises(RefusedStart, match="ended with code 1: no room for --workers=4"):
        ends.apply({"slots": 4}, limit_s=60.0)
    ends.close()
    waits = subject_of(folder, command=[sys.executable, "-c", "import time; time.sleep(600)"])
    with pytest.raises(NotReady, match=r"not ready after 0 s: http://127.0.0.1:.*/: .*refused"):
        waits.apply({"slots": 4}, limit_s=0.2)
    waits.close()


def test_a_service_that_ended_by_itself_takes_nobody_else_along(folder: Path) -> None:
    """The kernel gives its number to others once it was noticed to have ended."""
    ends = subject_of(folder, command=[sys.executable, "-c", "pass"])
    with pytest.raises(RefusedStart):
        ends.apply({"slots": 4}, limit_s=60.0)
    with subprocess.Popen(["sleep", "3600"]) as other:
        ends._process.pid = other.pid
        assert ends.pids() == {}
        ends.close()
        assert other.poll() is None
        other.kill()


def test_what_a_killed_tuner_left_ends_before_the_next_service_starts(folder: Path) -> None:
    """kill -9 of the tuner and its measuring process leaves the service; whoever comes next ends it."""

    def start_and_die():
        subject_of(folder, knobs="env").apply({"slots": 1}, limit_s=60.0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitpid(forked(start_and_die), 0)[1] == signal.SIGKILL
    assert started_here(folder)
    subject_of(folder).close()
    assert not started_here(folder)


def test_an_address_that_answers_already_is_refused(folder: Path) -> None:
    """Else the trials would measure whoever is there."""
    with bad_server() as other, pytest.raises(JobRefused, match="something answers there"):
        subject_of(folder, ready=f"{other.url}/ok", command=[sys.executable, "-c", "pass"])


def test_a_hook_changes_what_runs_and_sets_the_reference_in_the_end(folder: Path) -> None:
    """With the file that has the values; what it cannot apply is a failed start, with its words. The reference is set
    by whoever comes next, if the tuner was killed."""
    (folder / "service.json").write_text('{"pool": [{"name": "main", "workers": 2}]}')
    hook = "import json, sys; n = json.load(open(sys.argv[1]))['pool'][0]['workers']; open('seen', 'a').write(f'{n} ')"
    command = [sys.executable, "-c", f"{hook}; n == 4 and sys.exit('not four')", "{file}"]
    target = {"apply": command, "url": "http://127.0.0.1:9/deep", "knobs": "file", "file": "service.json"}
    subject = subject_of(folder, sets="pool.main.workers", **target)
    assert (subject.url, subject.prefix) == ("http://127.0.0.1:9", "/deep")
    subject.restore()
    assert not (folder / "seen").exists()
    assert subject.apply({"slots": 1}, limit_s=60.0).restarted == ()
    with pytest.raises(RefusedStart, match="ended with code 1: not four"):
        subject.apply({"slots": 4}, limit_s=60.0)
    subject.close()
    later = subject_of(folder, sets="pool.main.workers", **target)
    later.restore()
    later.restore()
    later.close()
    assert (folder / "seen").read_text() == "1 4 16 "


def test_who_did_not_get_his_own_configuration_back_is_told_and_gets_it_from_the_next_run(folder, capsys):
    """The job is finished and has its answer and its report all the same. (Its measurer is one of his own, who gets the
    job's folder and nothing of plait's.)"""
    target = {"apply": [sys.executable], "url": "http://127.0.0.1:9", "reserves": {"cores": "workers"}}
    path, out = written(folder, target=target), folder / "out"
    out.mkdir()
    (out / "stuck").touch()
    run = ["tune", "run", path, "--out", str(out), "--measurer", "fakes.measurer:stuck_measurer"]
    assert root.main(run) == 1
    assert "what was tuned has not got its own configuration back: RuntimeError" in capsys.readouterr().err
    assert open_state(out)[0].phase == "finished"
    assert root.main(["tune", "best", str(out)]) == 0
    assert "has not got its own configuration back" in (out / "report.html").read_text()
    (out / "stuck").unlink()
    assert root.main(run) == 0
    assert "has not got its own configuration back" not in (out / "report.html").read_text()
    assert (out / "measured.log").read_text().endswith("restore\nrestore\nclose\n")
    assert root.main(run) == 0  # and nothing is started any more
    assert (out / "measured.log").read_text().count("close") == 2


def test_a_service_that_others_use_is_tuned_by_one_job_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever job it is; the second is told which process is at it. Another service is free, and so is this one
    afterwards."""
    monkeypatch.setattr(service_subject, "HAND_OVER_S", 0.0)
    target = {"apply": [sys.executable], "url": "http://127.0.0.1:9"}
    first = subject_of(folder, **target)
    with pytest.raises(JobRefused, match=rf"target.apply: process {os.getpid()} tunes http://127.0.0.1:9 already"):
        subject_of(folder, **target)
    subject_of(folder, **{**target, "url": "http://127.0.0.1:8"}).close()
    first.close()
    subject_of(folder, **target).close()


def test_a_hook_that_does_not_end_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with what it waits for."""
    waits = "import os, subprocess; p = subprocess.Popen(['sleep', '3600']); open('new', 'w').write(f'{p.pid}')"
    command = [sys.executable, "-c", f"{waits}; os.rename('new', 'pid'); p.wait()"]
    subject = subject_of(folder, apply=command, url="http://127.0.0.1:9")

    class Hook(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            wait_for((folder / "pid").exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    with monkeypatch.context() as patched, pytest.raises(NotReady, match="has not ended"):
        patched.setattr(subprocess, "Popen", Hook)
        subject.apply({"slots": 1}, limit_s=60.0)
    waited_for = processes.identify(int((folder / "pid").read_text()))
    wait_for(lambda: waited_for is None or not processes.is_running(waited_for))
    subject.close()


# ---- kill -9 ---------------------------------------------------------------------------------------------------------

CAPACITY = {
    "objective": "max goodput_per_cost",
    "knobs": {
        "workers": {"kind": "choice", "values": [2, 8], "ordered": True},
        "queue": {"kind": "choice", "values": [False]},
    },
    "reference": {"config": {"workers": 2, "queue": False}, "every": 0},
    "target": {**JOB["target"], "reserves": {"cores": "3 + workers", "memory_gib": 0}},
    "budget": {"trials": 2},
    "confirm": {"best": 1, "times": 1},
}


def has_begun(out: Path, kind: MeasurementKind) -> bool:
    """Whether a measurement of the kind runs, and its service with it."""
    try:
        records: tuple[Record, ...] = JobStore.open(out).records()
    except Exception:
        return False
    return any(each.kind is kind and each.status == "running" for each in records) and bool(started_here(out.parent))


@needs_node
@pytest.mark.slow
def test_a_job_on_it_survives_kill_9_in_every_phase_and_its_promise_is_checked(folder, capsys):
    """In the search, in the confirmation and in the checks at the end; `status` says that nobody works on it. What was
    measured stays, and the rate that is promised is what eight slots of 100 ms can answer, however slow the host."""
    job, out = written(folder, **CAPACITY), folder / "out"
    for kind in (MeasurementKind.TRIAL, MeasurementKind.CONFIRM, MeasurementKind.CHECK):
        worker = subprocess.Popen([sys.executable, "-m", "plait.cli.main", "tune", "run", job, "--out", str(out)])
        wait_for(lambda kind=kind: has_begun(out, kind), 240.0)
        finished = [each.number for each in JobStore.open(out).records() if each.status == "finished"]
        for pid in (worker.pid, *children_of(worker.pid)):
            os.kill(pid, signal.SIGKILL)
        worker.wait()
        assert root.main(["tune", "status", str(out)]) == 0
        assert "waiting: nobody works on it; run it again to continue" in capsys.readouterr().out
        kept = [each.number for each in JobStore.open(out).records() if each.status == "finished"]
        assert kept == finished
    assert root.main(["tune", "run", job, "--out", str(out)]) == 0
    state, _ = open_state(out)
    assert state.phase == "finished"
    assert sum(row.status == "lost" for row in state.rows) == 3
    assert state.recommendation.config == {"workers": 8, "queue": False}
    promise = state.recommendation.promise
    assert 25.0 < promise.rate_per_s < 100.0  # two slots answer 20, eight 80, and a tenth may be refused


def children_of(pid: int) -> list[int]:
    """The processes that this one has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()]
