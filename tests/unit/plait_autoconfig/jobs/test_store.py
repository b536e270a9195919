"""The file of a job: claims, workers that are gone or killed, earlier versions, and what may change."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from fakes.measurer import fake_measurer
from plait_autoconfig.errors import JobBroken, JobRefused
from plait_autoconfig.jobs.loop import MAX_LOST, run_job
from plait_autoconfig.jobs.measurer import Measured, MeasurementKind
from plait_autoconfig.jobs.records import Claim
from plait_autoconfig.jobs.reporting import read_state, state_to_json
from plait_autoconfig.jobs.store import LEASE_S, JobStore
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.forking import forked, killed
from support.tune_jobs import DirectRunner, fake_source, job, run_directly
from support.waiting import wait_for

CELL = {"replicas": 2, "batch": 4}
EARLIER = Path(__file__).parent / "earlier"


def claim(store, *, kind=MeasurementKind.TRIAL, nonce="n"):
    """A claim of some worker."""
    made = Claim(kind=kind, config=CELL, seed=3, worker="gone", nonce=nonce, at_s=time.time())
    return store.claim(made, seen=store.records())


def ended(record, **metrics):
    """The record, measured."""
    return replace(
        record, measured=Measured(outcome=TrialOutcome(metrics=metrics), duration_s=1.5, note="n"), drift={"x": 2.0}
    )


def test_records_come_back_as_they_were_stored(tmp_path):
    """Another process reads the same records, finished, lost and running. What was declared lost cannot end later."""
    store = JobStore.open_or_create(tmp_path, job())
    first = ended(claim(store), goodput_per_cost=5.0, x=4.0)
    second = replace(claim(store), lost="why")
    third = claim(store)
    assert store.end(first)
    assert store.end(second)
    assert not store.end(ended(replace(second, lost=""), goodput_per_cost=5.0)), "a worker that slept through its lease"
    assert JobStore.open(tmp_path).records() == (first, second, third)
    assert first.outcome.metrics == {"goodput_per_cost": 5.0, "x": 2.0}
    assert first.raw.metrics["x"] == 4.0


def earlier(folder, name):
    """A copy of a job's folder as plait 0.1 left it before it had `job.sqlite`."""
    return Path(shutil.copytree(EARLIER / name, folder / name))


@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_a_job_of_an_earlier_version_is_shown_as_that_version_showed_it(tmp_path, name):
    """Every measurement, the answer with its intervals, the reason; the journal's torn last line is lost, and no other,
    and what ran when its worker ended is told as lost. From then on the file holds the job."""
    folder = earlier(tmp_path, name)
    shown = json.loads((folder / "state.json").read_text())
    now_s = 1790000010.0
    assert json.loads(json.dumps(state_to_json(read_state(JobStore.open(folder), now_s=now_s)))) == shown
    (folder / "study.journal").unlink()
    assert json.loads(json.dumps(state_to_json(read_state(JobStore.open(folder), now_s=now_s)))) == shown


def test_a_job_of_an_earlier_version_goes_on(tmp_path):
    """What was measured is not measured again, what was running when its worker died is lost, and the job ends."""
    folder = earlier(tmp_path, "stopped")
    state = run_directly(folder, job(limits=["p99_ms <= 140"]))
    shown = json.loads((folder / "state.json").read_text())
    assert json.loads(json.dumps(state_to_json(state)))["rows"][:4] == shown["rows"][:4]
    assert [row.status for row in state.rows[:5]] == ["finished"] * 4 + ["lost"]
    assert sum(row.kind is MeasurementKind.TRIAL and row.status == "finished" for row in state.rows) == 6
    assert (state.phase, state.warnings[0][:10]) == ("finished", "library: 2")


def test_a_writer_that_is_killed_leaves_nothing_of_what_it_began(tmp_path):
    """In the middle of a transaction, after the file was changed: the next one reads what was committed before."""
    store = JobStore.open_or_create(tmp_path, job())
    known = claim(store)

    def begin():
        db = sqlite3.connect(tmp_path / "job.sqlite", isolation_level=None)
        db.execute("PRAGMA cache_size = 1")  # pages go to the file before the end
        db.execute("BEGIN IMMEDIATE")
        for number in range(1, 500):
            db.execute("INSERT INTO measurement SELECT ?, record FROM measurement WHERE number = 0", (number,))
        (tmp_path / "begun").touch()
        time.sleep(60.0)

    pid = forked(begin)
    wait_for((tmp_path / "begun").exists)
    assert (tmp_path / "job.sqlite-journal").exists()
    killed(pid)
    assert JobStore.open(tmp_path).records() == (known,)
    assert claim(store).number == 1


def test_the_file_is_a_table_for_whoever_opens_it(tmp_path):
    """`select * from trials` has a row for each measurement."""
    state = run_directly(tmp_path, job(limits=["p99_ms <= 90"]), fail={"batch=8": "refuse"})
    with closing(sqlite3.connect(tmp_path / "job.sqlite")) as db:
        rows = db.execute("SELECT number, kind, status, config, metrics, failure FROM trials").fetchall()
    read = [(*row[:3], json.loads(row[3]), row[4] and json.loads(row[4]), row[5]) for row in rows]
    assert read == [
        (row.number, row.kind, "finished", row.config, row.raw.metrics, row.raw.failure) for row in state.rows
    ]


def test_a_file_system_without_locks_is_told_as_such(tmp_path, monkeypatch):
    """With the folder, before anything is written there."""

    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refused)
    with pytest.raises(JobBroken, match=rf"file system of {tmp_path} refuses the locks .*No locks available"):
        JobStore.open_or_create(tmp_path, job())
    assert list(tmp_path.iterdir()) == []


def test_the_study_opens_in_optunas_own_tools(tmp_path):
    """Values, parameters and constraints are those of the trials. Failures are failures; the checks of a rate, which
    have no value of the goal, are none."""
    folder = tmp_path / "job"
    few = {"budget": {"trials": 4}, "confirm": {"best": 1, "times": 1}}
    spec = job(limits=["p99_ms <= 90"], storage=f"sqlite:///{tmp_path}/trials.db", **few)
    state = run_directly(folder, spec, fail={"batch=8": "refuse"})
    study, rows = optunas_own(tmp_path), [row for row in state.rows if row.kind.compares]
    assert len(rows) < len(state.rows)
    for trial, row in zip(study.trials, rows, strict=True):
        assert trial.params == row.config
        assert (trial.state == TrialState.FAIL) == (row.outcome.failure is not None)
        if row.outcome.failure is None:
            assert trial.values == [row.outcome.metrics["goodput_per_cost"]]
            assert trial.constraints == spec.goal.excesses(row.outcome)


def optunas_own(folder):
    """The study, as Optuna's tools open it."""
    return optuna.load_study(study_name=f"demo:{folder}/job", storage=f"sqlite:///{folder}/trials.db")


def test_a_kill_between_the_end_and_its_copy_is_mended(tmp_path, monkeypatch):
    """The end counts once it is stored; the copy for Optuna's tools is made by the next worker."""
    spec = job(storage=f"sqlite:///{tmp_path}/trials.db")
    store = JobStore.open_or_create(tmp_path / "job", spec)
    record = claim(store)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optuna.Study, "add_trial", killed)
        store.end(ended(record, goodput_per_cost=5.0))
    assert JobStore.open(tmp_path / "job").records()[0].status == "finished"
    assert optunas_own(tmp_path).trials == []
    JobStore.open_or_create(tmp_path / "job", spec)
    assert [trial.state for trial in optunas_own(tmp_path).trials] == [TrialState.COMPLETE]


def test_of_two_that_decide_on_the_same_one_claims(tmp_path):
    """The other decides again, on what there is by then."""
    store, other = JobStore.open_or_create(tmp_path, job()), JobStore.open(tmp_path)
    seen = other.records()
    first = claim(store)
    assert other.claim(first.claim, seen=seen) is None
    assert other.records() == (first,)
    assert other.claim(first.claim, seen=other.records()).number == 1


def test_another_job_is_not_mixed_into_the_folder(tmp_path):
    """More budget resumes; another objective is refused by name; no job is said."""
    claim(JobStore.open_or_create(tmp_path, job()))
    JobStore.open_or_create(tmp_path, job(budget={"trials": 9}, confirm={"best": 1}))
    assert JobStore.open(tmp_path).spec.budget.trials == 9
    with pytest.raises(JobRefused, match="holds a job with other objective, limits"):
        JobStore.open_or_create(tmp_path, job(objective="min cost", limits=["p99_ms <= 9"]))
    with pytest.raises(JobRefused, match="there is no job in"):
        JobStore.open(tmp_path / "nowhere")


def test_a_job_that_measured_nothing_gives_way_to_another(tmp_path):
    """As one does that was refused for a typing error. What a worker that is gone had only claimed is nothing. Its
    study goes too, whose directions were its own; what others keep in a study is left."""
    folder, database = tmp_path / "job", f"sqlite:///{tmp_path}/trials.db"
    store = JobStore.open_or_create(folder, job(objective="max nosuch", storage=database))
    store.end(replace(claim(store), lost="it was given up"))
    again = JobStore.open_or_create(folder, job(objective="min cost", storage=database))
    assert again.records() == ()
    assert str(JobStore.open(folder).spec.goal) == "min cost_per_hour"
    study = optunas_own(tmp_path)
    assert (study.directions, study.trials) == ([optuna.study.StudyDirection.MINIMIZE], [])
    study.add_trial(optuna.trial.create_trial(value=1.0))
    again.end(ended(claim(again), cost_per_hour=2.0))
    assert [trial.values for trial in optunas_own(tmp_path).trials] == [[1.0], [2.0]]


def test_an_end_of_the_job_that_was_here_before_is_not_one_of_this(tmp_path):
    """Numbers begin anew; a worker that had hung meanwhile comes back with a number that another one has now."""
    store = JobStore.open_or_create(tmp_path, job(objective="max nosuch"))
    hung = claim(store)
    store.end(replace(hung, lost="it says nothing"))
    again = JobStore.open_or_create(tmp_path, job(objective="min cost"))
    assert not store.end(ended(hung, nosuch=1.0))
    mine = claim(again, nonce="mine")
    assert mine.number == hung.number
    assert not store.end(ended(hung, nosuch=1.0))
    assert again.records() == (mine,)


def test_a_database_that_goes_away_ends_no_job(tmp_path, monkeypatch):
    """What was measured counts, and the job says that its copy is behind until one is made again."""
    spec = job(storage=f"sqlite:///{tmp_path}/trials.db")
    store = JobStore.open_or_create(tmp_path / "job", spec)
    first, second = claim(store, nonce="a"), claim(store, nonce="b")

    def away(**_):
        raise OSError("the database is starting up")

    with monkeypatch.context() as patch:
        patch.setattr(optuna, "create_study", away)
        assert store.end(ended(first, goodput_per_cost=5.0))
        JobStore.open_or_create(tmp_path / "job", spec)
    assert [record.status for record in store.records()] == ["finished", "running"]
    (warning,) = store.facts().warnings
    assert "behind" in warning
    assert "starting up" in warning
    assert store.end(ended(second, goodput_per_cost=6.0))
    assert sorted(trial.values for trial in optunas_own(tmp_path).trials) == [[5.0], [6.0]]


@pytest.mark.parametrize("storage", ["nosuch://x", "sqlite:////nosuch/folder/x.db"])
def test_a_database_that_is_not_to_be_had_is_one_sentence(tmp_path, storage):
    """Whoever is asked for it: SQLAlchemy, a driver that is not installed, the file system."""
    with pytest.raises(JobBroken, match=r"cannot be read or written: [^\n]+$"):
        JobStore.open_or_create(tmp_path, job(storage=storage))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("job.sqlite", 100 * b"{", "cannot be read or written: file is not a database"),
        *(("resolved.json", text, r"resolved\.json is damaged") for text in (b"{", b"\xff\xfe", b'{"name": 3}')),
        *(("study.journal", 2 * line, "cannot be read") for line in (b"null\n", b"{}\n", b"\xff\xfe\x00\n", b"[1]\n")),
    ],
)
def test_a_damaged_folder_is_told_in_one_sentence(tmp_path, name, content, said):
    """Not by a traceback, whoever opens the folder."""
    folder = earlier(tmp_path, "finished")
    (folder / name).write_bytes(content)
    for opened in (JobStore.open, lambda folder: JobStore.open_or_create(folder, job())):
        with pytest.raises(JobBroken, match=said):
            opened(folder)


def test_a_damaged_document_is_told_by_its_field(tmp_path):
    """What somebody changed by hand in the file."""
    claim(JobStore.open_or_create(tmp_path, job()))
    with closing(sqlite3.connect(tmp_path / "job.sqlite")) as db:
        db.execute("UPDATE measurement SET record = json_set(record, '$.claim.seed', 'x')")
        db.commit()
    with pytest.raises(JobBroken, match=r"job\.sqlite is damaged: claim\.seed"):
        JobStore.open(tmp_path).records()


def test_an_empty_file_is_no_job(tmp_path):
    """Of a process that was killed before it wrote anything: the next one begins anew."""
    (tmp_path / "job.sqlite").touch()
    with pytest.raises(JobRefused, match="there is no job in"):
        JobStore.open(tmp_path)
    assert JobStore.open_or_create(tmp_path, job()).records() == ()


def test_a_worker_is_present_while_it_lives_and_says_so(tmp_path):
    """It is gone at once when it ends, and after the lease when it hangs."""
    store = JobStore.open_or_create(tmp_path, job())
    store.join("a", now_s=100.0)
    assert store.workers(now_s=100.0) == ("a",)
    assert store.workers(now_s=100.0 + LEASE_S) == ()
    store.join("a", now_s=100.0 + LEASE_S)
    assert store.workers(now_s=100.0 + LEASE_S) == ("a",)
    store.leave("a")
    assert store.workers(now_s=100.0) == ()


def test_a_worker_that_is_killed_is_gone_at_once(tmp_path):
    """Long before its lease is over, also while nobody has asked for its end."""
    store = JobStore.open_or_create(tmp_path, job())
    pid = forked(lambda: (JobStore.open(tmp_path).join("a", now_s=100.0), time.sleep(60.0)))
    wait_for(lambda: store.workers(now_s=100.0) == ("a",))
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert store.workers(now_s=100.0) == ()
    os.waitpid(pid, 0)
    assert store.workers(now_s=100.0) == ()


def test_a_job_whose_worker_is_gone_is_told_to_wait(tmp_path):
    """Work is left and nobody does it; the measurement that ran is lost, and does not take longer and longer."""
    store = JobStore.open_or_create(tmp_path, job())
    assert (read_state(store, now_s=100.0).phase, store.records()) == ("waiting", ())
    store.join("gone", now_s=100.0)
    claim(store, kind=MeasurementKind.REFERENCE)
    state = read_state(store, now_s=100.0)
    assert (state.phase, [row.status for row in state.rows]) == ("searching", ["running"])
    state = read_state(store, now_s=100.0 + LEASE_S)
    assert (state.phase, state.reason) == ("waiting", "nobody works on it; run it again to continue")
    assert [(row.status, row.reason, row.duration_s) for row in state.rows] == [
        ("lost", "lost: its worker was gone", 0.0)
    ]


def test_a_configuration_that_takes_its_worker_down_again_and_again_is_a_crash(tmp_path):
    """Otherwise a resumed job would die on it for ever."""
    spec = job()
    store = JobStore.open_or_create(tmp_path, spec)
    for _ in range(MAX_LOST):
        store.end(replace(claim(store), lost="its worker was gone"))
    claim(store)
    state = run_directly(tmp_path, spec)
    row = state.rows[MAX_LOST]
    assert row.outcome.failure is FailureKind.CRASH
    assert "the tuner itself died while measuring it" in row.reason
    assert all(other.config != CELL for other in state.rows[MAX_LOST + 1 :] if other.kind is MeasurementKind.TRIAL)


def test_time_that_no_measurement_took_is_part_of_the_budget(tmp_path):
    """The job that ends for it has an answer, though the measurements alone would leave time for another one."""
    clock = [1000.0]

    class SlowToStart(DirectRunner):
        def check(self, tick):
            clock[0] += 20.0
            return super().check(tick)

        def measure(self, task, say, tick):
            took_s = 20.0 if task.kind is MeasurementKind.CONFIRM else 10.0  # longer than the search has seen
            clock[0] += took_s
            return replace(super().measure(task, say, tick), duration_s=took_s)

    spec = job(budget={"trials": 50, "minutes": 2}, confirm={"best": 2, "times": 2})
    store = JobStore.open_or_create(tmp_path, spec)
    runner = SlowToStart(fake_measurer(folder=tmp_path), spec)
    state = run_job(store, fake_source(), runner=runner, now=lambda: clock[0])
    assert (state.phase, len(state.answers)) == ("finished", 1)
    assert "2 minutes of the budget are used up" in state.reason
    assert state.remaining.seconds > 0.0
    assert read_state(JobStore.open(tmp_path)).answers == state.answers


def test_a_space_smaller_than_the_budget_is_searched_whole(tmp_path):
    """The designer runs out of cells: the search ends with that reason, and is not asked again."""
    small = {"replicas": {"kind": "int", "low": 1, "high": 3}}
    spec = job(knobs=small, constraints=[], reference={"config": {"replicas": 1}}, budget={"trials": 50})
    state = run_directly(tmp_path, spec)
    assert state.phase == "finished"
    assert state.reason == "all 3 cells were proposed"
    assert sum(row.kind is MeasurementKind.TRIAL for row in state.rows) == 2  # the reference is the third


def test_cancelling_ends_the_worker_and_gives_its_trial_up(tmp_path):
    """The state says cancelled; starting it again resumes."""
    spec = job()
    store = JobStore.open_or_create(tmp_path, spec)

    def cancel_at_the_second(event):
        if event.kind == "trial_progress" and event.number == 2:
            store.note(cancelled=True)

    runner = DirectRunner(fake_measurer(folder=tmp_path, seconds=0.01), spec)
    state = run_job(store, fake_source(), runner=runner, on_event=cancel_at_the_second)
    assert state.phase == "cancelled"
    assert runner.finished == 1
    assert state.rows[2].reason == "lost: it was given up"
    assert run_directly(tmp_path, spec).phase == "finished"


def test_a_reference_that_can_not_be_measured_ends_the_job(tmp_path):
    """One measurement, and the reason."""
    with pytest.raises(JobBroken, match="reference configuration could not be measured: refused start: as told"):
        run_directly(tmp_path, job(), fail={"batch=4": "refuse"})
    assert len(read_state(JobStore.open(tmp_path)).rows) == 1


@pytest.mark.parametrize("name", ["trials", "logs"])
def test_a_folder_that_cannot_be_made_ends_the_job_and_is_no_death(tmp_path, name):
    """As on a full disk: a sentence with the folder, in the job's state, too. What was begun is lost for that reason;
    the next run goes on, however often that happened."""
    folder = tmp_path / name
    folder.write_text("")
    spec = job()
    for _ in range(MAX_LOST + 1):
        with pytest.raises(JobBroken, match=str(folder)) as caught:
            if name == "trials":
                run_directly(tmp_path, spec)
            else:
                run_job(JobStore.open_or_create(tmp_path, spec), fake_source())
        assert JobStore.open(tmp_path).facts().failure == str(caught.value)
    assert all(str(folder) in record.lost for record in JobStore.open(tmp_path).records())
    folder.unlink()
    assert run_directly(tmp_path, spec).phase == "finished"


def test_a_live_service_is_tuned_by_one_process_at_a_time(tmp_path):
    """The second is told who holds it, and the job goes on for the first as if nobody had come; afterwards it is
    free."""
    spec = job(target={"live": {"guard": ["p99_ms <= 900"]}})
    store = JobStore.open_or_create(tmp_path, spec)
    store.join("first", now_s=time.time())
    store.note(cancelled=True)
    with pytest.raises(JobBroken, match=r"another process is tuning the live service of this job \(first\)"):
        run_directly(tmp_path, spec)
    assert (store.facts().cancelled, store.facts().failure, store.records()) == (True, "", ())
    store.leave("first")
    assert run_directly(tmp_path, spec).phase == "finished"


def test_of_two_that_come_to_a_live_service_at_once_one_goes_on(tmp_path, monkeypatch):
    """Also if nobody was there yet when the second looked: who is there is decided as he joins."""
    spec = job(target={"live": {"guard": ["p99_ms <= 900"]}})
    store = JobStore.open_or_create(tmp_path, spec)
    store.join("first", now_s=time.time())
    monkeypatch.setattr(JobStore, "workers", lambda *_, **__: ())
    with pytest.raises(JobBroken, match=r"another process is tuning the live service of this job \(first\)"):
        run_directly(tmp_path, spec)
    assert store.records() == ()


def test_a_live_service_is_left_with_the_best_configuration(tmp_path):
    """Where the job asks for it; otherwise as it was (test_tune_live.py)."""
    state = run_directly(tmp_path, job(target={"live": {"guard": ["p99_ms <= 900"], "leave": "best"}}))
    applied = [line for line in (tmp_path / "measured.log").read_text().splitlines() if line.startswith("apply")]
    assert applied == [f"apply {sorted(state.recommendation.config.items())}"]


def test_the_overhead_of_a_trial_is_two_transactions(tmp_path):
    """Its claim and its end: some milliseconds each, far below 3 % of a trial of seconds. SQLite counts them."""
    state = run_directly(tmp_path, job(limits=["p99_ms <= 900"], budget={"trials": 10}))
    written = int.from_bytes((tmp_path / "job.sqlite").read_bytes()[24:28], "big")
    assert written <= 10 + 2 * len(state.rows)
