"""The designer of a job, its library, and what they make of records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_autoconfig.designers.base import GridDesigner
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.loop import Proposals
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.jobs.reporting import read_state
from plait_autoconfig.jobs.store import JobStore
from plait_autoconfig.store import LibraryStore
from plait_autoconfig.values import FailureKind
from support.autoconfig import measured, run_of
from support.tune_jobs import job, record, run_directly

SMALL = {
    "knobs": {"replicas": {"kind": "int", "low": 1, "high": 4}},
    "constraints": [],
    "reference": {"config": {"replicas": 1}},
}


class Scripted(GridDesigner):
    """A designer that remembers what it was told, and how much it is to expect."""

    def __init__(self, regret=1.0):
        super().__init__(job(**SMALL).space, job(**SMALL).goal, seed=0)
        self.regret = regret

    def expected_regret(self):
        return self.regret


def trial(number, replicas, **more):
    """A measurement."""
    return record(number, {"replicas": replicas}, {"goodput_per_cost": 1.0}, **more)


def test_a_proposal_stays_until_it_is_claimed():
    """What nobody took on is proposed again; what another worker measures is passed over, and comes back when that is
    lost."""
    proposals = Proposals(Scripted(), job(**SMALL))
    assert proposals.next([]) == {"replicas": 1}
    assert proposals.next([]) == {"replicas": 1}
    running = [trial(0, 1, running=True), trial(1, 2, running=True)]
    assert proposals.next(running) == {"replicas": 3}
    assert proposals.next([running[0], replace(running[1], lost="gone")]) == {"replicas": 2}
    everything = [*running, trial(2, 3), trial(3, 4, running=True)]
    assert proposals.next(everything) == "all 4 cells were proposed"


def test_everything_that_ended_is_told_once():
    """Trials, references and confirmations alike; warm-ups and running ones are not."""
    designer = Scripted()
    proposals = Proposals(designer, job(**SMALL))
    records = [
        trial(0, 1, kind=MeasurementKind.WARM_UP),
        trial(1, 1, kind=MeasurementKind.REFERENCE),
        trial(2, 2),
        trial(3, 3, running=True),
    ]
    proposals.next(records)
    proposals.next([*records, trial(4, 2, kind=MeasurementKind.CONFIRM)])
    assert [each.number for each in designer.trials] == [1, 2, 4]


def test_a_designer_that_expects_no_gain_ends_the_search():
    """Only when the job asks for it, and after enough trials."""
    spec = job(**SMALL, stop={"expected_gain": 0.05, "least_trials": 2})
    records = [trial(0, 1), trial(1, 2)]
    assert Proposals(Scripted(regret=0.01), spec).next(records[:1]) == {"replicas": 2}
    assert Proposals(Scripted(regret=0.06), spec).next(records) == {"replicas": 3}
    assert Proposals(Scripted(regret=0.01), job(**SMALL)).next(records) == {"replicas": 3}
    said = "the designer expects no more than 1 % to be left to gain"
    assert Proposals(Scripted(regret=0.01), spec).next(records) == said


@pytest.mark.parametrize("designer", ["plait", "grid", "sobol", "optuna-tpe"])
def test_every_designer_runs_a_job_and_tries_nothing_twice(tmp_path, designer):
    """Failures on the way, the reference in the space: still one trial per configuration."""
    spec = job(designer={"name": designer}, budget={"trials": 8}, confirm={"best": 1, "times": 1})
    state = run_directly(tmp_path, spec, fail={"batch=8": "refuse"})
    tried = [tuple(sorted(row.config.items())) for row in state.rows if row.kind is MeasurementKind.TRIAL]
    assert len(set(tried)) == len(tried) == 8
    assert tuple(sorted(spec.default.items())) not in tried
    assert state.phase == "finished"


def test_a_job_adds_its_trials_to_the_library_and_does_not_learn_from_itself(tmp_path):
    """All that compares, with its failures; resumed with more budget, only the new ones are added."""
    path, states, runs = str(tmp_path / "past.journal"), [], []
    for trials in (3, 5):
        spec = job(library=path, budget={"trials": trials}, confirm={"best": 0})
        states.append(run_directly(tmp_path / "job", spec, fail={"batch=8": "refuse"}))
        runs += LibraryStore.open(path).runs()
    (run, more), state = runs, states[-1]
    assert (run.service, run.goals, run.versions) == ("fake", ("max goodput_per_cost",), {"fake": "1"})
    assert more.run_id == run.run_id
    assert len(more.trials) == sum(row.kind.compares for row in state.rows) > len(run.trials)
    assert state.warnings == ()


def test_a_library_of_another_space_is_told_and_not_used(tmp_path):
    """A job learns nothing from trials with values of another space, and says which, why and what is lost with them."""
    path = str(tmp_path / "past.journal")
    LibraryStore.open(path).add(run_of(measured(0, {"replicas": 9, "batch": 4}, goodput_per_cost=3.0)))
    spec = job(library=path, budget={"trials": 1}, confirm={"best": 0})
    (warning,) = run_directly(tmp_path / "job", spec).warnings
    assert "picks (run-1): 0 of 1 trials can be used" in warning
    assert "replicas is 9, but must be a whole number from 1 to 4" in warning
    assert "the best of them had goodput_per_cost 3, and none is left" in warning


def test_a_library_that_can_not_be_read_is_refused_before_anything_is_measured(tmp_path):
    """Learning nothing in silence would waste trials."""
    (tmp_path / "past.journal").write_text('{"not": "a journal"}\n')
    with pytest.raises(JobRefused, match=r"the library .*past.journal cannot be used"):
        run_directly(tmp_path / "job", job(library=str(tmp_path / "past.journal")))
    assert read_state(JobStore.open(tmp_path / "job")).rows == ()


def test_failures_of_every_kind_are_told_to_the_designer_as_they_are(tmp_path):
    """Out of memory, crashes and refusals are outcomes of their configuration; an invalid load test is not."""
    state = run_directly(tmp_path, job(budget={"trials": 13}), fail={"replicas=3": "refuse", "replicas=4": "invalid"})
    kinds = {row.config["replicas"]: row.outcome.failure for row in state.rows if row.outcome and row.outcome.failure}
    assert kinds == {3: FailureKind.REFUSED_START, 4: FailureKind.INVALID}
    again = [row for row in state.rows if row.config["replicas"] == 4]
    assert len(again) > len({row.config["batch"] for row in again})
