"""The folder of a job: claims, torn lines, workers that are gone, and what may change."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import optuna
import pytest
from optuna.trial import TrialState

from fakes.measurer import fake_measurer
from plait_autoconfig.jobs.errors import JobBroken, JobBusy, JobRefused
from plait_autoconfig.jobs.heartbeat import LEASE_S, Heartbeat, is_present, present_workers
from plait_autoconfig.jobs.loop import MAX_LOST, exclusive_lock, run_job
from plait_autoconfig.jobs.measurer import Measured, MeasurementKind
from plait_autoconfig.jobs.records import Claim
from plait_autoconfig.jobs.reporting import read_state
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.tune_jobs import DirectRunner, fake_source, job, run_directly

CELL = {"replicas": 2, "batch": 4}


def claim(store, *, worker="gone", config=CELL, kind=MeasurementKind.TRIAL):
    """A claim of some worker."""
    with store.exclusive():
        return store.claim(Claim(kind=kind, config=config, seed=3, worker=worker, nonce="n", at_s=time.time()))


def ended(record, **metrics):
    """The record, measured."""
    return replace(
        record, measured=Measured(outcome=TrialOutcome(metrics=metrics), duration_s=1.5, note="n"), drift={"x": 2.0}
    )


def test_records_come_back_as_they_were_stored(tmp_path):
    """Another process reads the same records, finished, lost and running."""
    store = JobStore.open_or_create(tmp_path, job())
    first = ended(claim(store), goodput_per_cost=5.0, x=4.0)
    second = replace(claim(store), lost="why", finished_at_s=1.0)
    third = claim(store)
    assert store.end(first)
    assert store.end(second)
    assert JobStore.open(tmp_path).records() == (first, second, third)
    assert first.outcome.metrics == {"goodput_per_cost": 5.0, "x": 2.0}
    assert first.raw.metrics["x"] == 4.0


def test_a_measurement_that_was_declared_lost_can_not_end_any_more(tmp_path):
    """A worker that slept through its lease finds its result refused, and nothing changes."""
    store = JobStore.open_or_create(tmp_path, job())
    record = claim(store)
    assert store.end(replace(record, lost="gone"))
    assert not store.end(ended(record, goodput_per_cost=5.0))
    assert store.records()[0].status == "lost"


@pytest.mark.parametrize("torn", [b'{"op_code": 4, "wor', b"\xff\xfe", b"{}"])
def test_a_torn_last_line_loses_only_that_line(tmp_path, torn):
    """A writer that was killed in the middle of a line does not make the journal unreadable for those who append."""
    store = JobStore.open_or_create(tmp_path, job())
    store.end(ended(claim(store), goodput_per_cost=5.0))
    with (tmp_path / "study.journal").open("ab") as journal:
        journal.write(torn)
    again = JobStore.open(tmp_path)
    assert [record.status for record in again.records()] == ["finished"]
    claim(again)
    assert [record.status for record in JobStore.open(tmp_path).records()] == ["finished", "running"]
    assert [record.status for record in store.records()] == ["finished", "running"]


def test_the_study_opens_in_optunas_own_tools(tmp_path):
    """Values, parameters and constraints are those of the trials; failures are failures, and so are checks."""
    spec = job(limits=["p99_ms <= 90"])
    state = run_directly(tmp_path, spec, fail={"batch=8": "refuse"})
    study = optunas_own(tmp_path)
    assert len(study.trials) == len(state.rows)
    for trial, row in zip(study.trials, state.rows, strict=True):
        assert trial.params == row.config
        has_no_value = row.outcome.failure is not None or not row.kind.compares
        assert (trial.state == TrialState.FAIL) == has_no_value
    assert study.best_trial.user_attrs["plait:claim"]["config"] == trial_of_best(state)


def optunas_own(folder):
    """The study, as Optuna's tools open it."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    return optuna.load_study(study_name="demo", storage=optuna.storages.JournalStorage(backend))


def trial_of_best(state):
    """The configuration of the best single feasible measurement."""
    feasible = [row for row in state.rows if row.feasible]
    return max(feasible, key=lambda row: row.outcome.metrics["goodput_per_cost"]).config


def test_a_kill_between_the_end_and_its_copy_is_mended(tmp_path, monkeypatch):
    """The end counts once it is stored; the copy for Optuna's tools is made by the next worker."""
    store = JobStore.open_or_create(tmp_path, job())
    record = claim(store)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optuna.storages.JournalStorage, "set_trial_state_values", killed)
        store.end(ended(record, goodput_per_cost=5.0))
    again = JobStore.open(tmp_path)
    assert again.records()[0].status == "finished"
    assert optunas_own(tmp_path).trials[0].state == TrialState.RUNNING
    with again.exclusive():
        again.mend()
    assert optunas_own(tmp_path).trials[0].state == TrialState.COMPLETE


def test_only_one_decides_at_a_time(tmp_path):
    """While one worker chooses and claims, another waits."""
    store, entered = JobStore.open_or_create(tmp_path, job()), threading.Event()
    other = JobStore.open(tmp_path)

    def enter():
        with other.exclusive():
            entered.set()

    thread = threading.Thread(target=enter)
    with store.exclusive():
        thread.start()
        assert not entered.wait(0.1)
    assert entered.wait(30.0)
    thread.join()


def test_another_job_is_not_mixed_into_the_folder(tmp_path):
    """More budget resumes; another objective is refused by name; no job is said."""
    claim(JobStore.open_or_create(tmp_path, job()))
    assert JobStore.open_or_create(tmp_path, job(budget={"trials": 9})).spec.budget.trials == 9
    assert JobStore.open(tmp_path).spec.budget.trials == 9
    with pytest.raises(JobRefused, match="holds a job with other objective, limits"):
        JobStore.open_or_create(tmp_path, job(objective="min cost", limits=["p99_ms <= 9"]))
    with pytest.raises(JobRefused, match="there is no job in"):
        JobStore.open(tmp_path / "nowhere")


def test_a_job_that_measured_nothing_gives_way_to_another(tmp_path):
    """As one does that was refused for a typing error. What a worker that is gone had only claimed is nothing."""
    store = JobStore.open_or_create(tmp_path, job(objective="max nosuch"))
    record = claim(store)
    with store.exclusive():
        store.end_held(replace(record, lost="it was given up"))
    again = JobStore.open_or_create(tmp_path, job(objective="min cost"))
    assert again.records() == ()
    assert str(JobStore.open(tmp_path).spec.goal) == "min cost_per_hour"
    claim(again)
    with pytest.raises(JobRefused, match="holds a job with other objective"):
        JobStore.open_or_create(tmp_path, job(objective="max nosuch"))


@pytest.mark.parametrize("storage", ["nosuch://x", "sqlite:////nosuch/folder/x.db"])
def test_a_database_that_is_not_to_be_had_is_one_sentence(tmp_path, storage):
    """Whoever is asked for it: SQLAlchemy, a driver that is not installed, the file system."""
    with pytest.raises(JobBroken, match=r"cannot be read or written: [^\n]+$"):
        JobStore.open_or_create(tmp_path, job(storage=storage))


@pytest.mark.parametrize("line", [b"null", b"{}", b"\xff\xfe\x00", b"[1]"])
def test_a_damaged_journal_is_told_by_its_folder(tmp_path, line):
    """Not by a traceback."""
    claim(JobStore.open_or_create(tmp_path, job()))
    with (tmp_path / "study.journal").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(JobBroken, match="cannot be read or written"):
        JobStore.open(tmp_path).records()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"name": 3}'])
def test_a_damaged_folder_is_told_by_its_file(tmp_path, content):
    """One sentence that names the file, whoever opens the folder."""
    JobStore.open_or_create(tmp_path, job())
    (tmp_path / "resolved.json").write_bytes(content)
    with pytest.raises(JobBroken, match=r"resolved\.json is damaged"):
        JobStore.open(tmp_path)
    with pytest.raises(JobBroken, match=r"resolved\.json is damaged"):
        JobStore.open_or_create(tmp_path, job())


def test_a_database_holds_the_trials_as_well(tmp_path):
    """`storage` moves the study to a database; the rest of the folder stays."""
    store = JobStore.open_or_create(tmp_path / "job", job(storage=f"sqlite:///{tmp_path}/trials.db"))
    finished, running = ended(claim(store), goodput_per_cost=5.0), claim(store)
    assert store.end(finished)
    assert not (tmp_path / "job" / "study.journal").exists()
    assert JobStore.open(tmp_path / "job").records() == (finished, running)


def test_a_worker_is_present_while_it_lives_and_touches_its_file(tmp_path):
    """It is gone at once when it ends, and after the lease when it hangs."""
    with Heartbeat(tmp_path, "a", now_s=100.0) as own:
        assert is_present(tmp_path, "a", now_s=100.0)
        assert not is_present(tmp_path, "a", now_s=100.0 + LEASE_S)
        own.renew(now_s=100.0 + LEASE_S)
        assert is_present(tmp_path, "a", now_s=100.0 + LEASE_S)
        assert present_workers(tmp_path, now_s=100.0) == ("a",)
    assert not is_present(tmp_path, "a", now_s=100.0)
    assert present_workers(tmp_path, now_s=100.0) == ()


def test_the_claim_of_a_worker_that_is_gone_is_lost_and_proposed_again(tmp_path):
    """Its trial does not count, and its configuration is measured by the next worker."""
    spec = job()
    store = JobStore.open_or_create(tmp_path, spec)
    claim(store, kind=MeasurementKind.REFERENCE, config=dict(spec.default))
    state = run_directly(tmp_path, spec)
    assert [row.status for row in state.rows].count("lost") == 1
    assert sum(row.kind is MeasurementKind.TRIAL for row in state.rows) == spec.budget.trials
    assert state.phase == "finished"


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


def test_a_finished_job_has_nothing_left_to_do_until_it_gets_more_budget(tmp_path):
    """Running it again measures nothing; a larger budget goes on with new configurations."""
    state = run_directly(tmp_path, job())
    assert run_directly(tmp_path, job()).rows == state.rows
    more = run_directly(tmp_path, job(budget={"trials": 9}))
    tried = [tuple(sorted(row.config.items())) for row in more.rows if row.kind is MeasurementKind.TRIAL]
    assert len(tried) == len(set(tried)) == 9


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
            store.cancel()

    runner = DirectRunner(fake_measurer(folder=tmp_path, seconds=0.01), spec)
    state = run_job(store, fake_source(), runner=runner, on_event=cancel_at_the_second)
    assert state.phase == "cancelled"
    assert runner.finished == 1
    assert state.rows[2].reason == "lost: it was given up"
    assert run_directly(tmp_path, spec).phase == "finished"


def test_a_refusal_of_the_measurer_comes_before_any_trial(tmp_path):
    """A knob that is not there is said with those that are, and nothing was measured."""
    with pytest.raises(JobRefused, match=r"there is no knob engine.replicas; there are engine.window"):
        run_directly(tmp_path, job(), knobs=["engine.window"])
    state = read_state(JobStore.open(tmp_path))
    assert state.rows == ()
    assert state.phase == "failed"
    assert "there is no knob engine.replicas" in state.reason


def test_a_reference_that_can_not_be_measured_ends_the_job(tmp_path):
    """One measurement, and the reason."""
    with pytest.raises(JobBroken, match="reference configuration could not be measured: refused start: as told"):
        run_directly(tmp_path, job(), fail={"batch=4": "refuse"})
    assert len(read_state(JobStore.open(tmp_path)).rows) == 1


def test_a_live_service_is_tuned_by_one_process_at_a_time(tmp_path):
    """The second is told who holds it; afterwards it is free."""
    with exclusive_lock(tmp_path / "lock", wait_s=0.0, tick=lambda: None):
        with pytest.raises(JobBusy, match="another process is tuning the live service"):
            with exclusive_lock(tmp_path / "lock", wait_s=0.0, tick=lambda: None):
                pass
    with exclusive_lock(tmp_path / "lock", wait_s=0.0, tick=lambda: None) as descriptor:
        assert descriptor > 0


@pytest.mark.parametrize("leave", ["best", "original"])
def test_a_live_service_is_left_as_the_job_says(tmp_path, leave):
    """With the best configuration, or untouched."""
    spec = job(target={"live": {"guard": ["p99_ms <= 900"], "leave": leave}})
    state = run_directly(tmp_path, spec)
    applied = [line for line in (tmp_path / "measured.log").read_text().splitlines() if line.startswith("apply")]
    wanted = [f"apply {sorted(state.recommendation.config.items())}"] if leave == "best" else []
    assert applied == wanted


def test_the_overhead_of_a_trial_is_a_handful_of_lines(tmp_path):
    """A trial writes at most 4 + limits lines of the journal: some 7 ms each, far below 3 % of a trial of seconds."""
    spec = job(limits=["p99_ms <= 900"], budget={"trials": 10})
    state = run_directly(tmp_path, spec)
    lines = (tmp_path / "study.journal").read_text().count("\n")
    assert lines <= 6 + len(state.rows) * (4 + len(spec.limits))
