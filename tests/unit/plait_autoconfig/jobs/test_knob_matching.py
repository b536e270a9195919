"""Past runs in terms of a job's knobs: they meet by what they set."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.past_runs import in_terms_of, past_runs
from plait_autoconfig.rows import starter_runs
from support.autoconfig import measured, run_of

EXAMPLES = Path(__file__).parents[4] / "serving/plait/tuning/examples"


def test_knobs_with_other_names_meet():
    """By what they set, also in a deployment of the same role; the unit comes along."""
    run = run_of(
        measured(0, {"dense": 2, "sends": 4}, rate=1.0), units={"dense": "cores"},
        sets={"dense": "hn-films.threads", "sends": "cn-films.window"},
    )  # fmt: skip
    found = in_terms_of(run, {"hn_threads": "hn-picks.threads", "window": "cn-picks.window"}, {})
    assert found.trials[0].config == {"hn_threads": 2, "window": 4}
    assert found.units == {"hn_threads": "cores"}


def test_the_same_deployment_comes_before_another_of_its_role():
    """Two ControlNets have threads each; who asks for one of them gets that one."""
    run = run_of(
        measured(0, {"a": 1, "b": 2}, rate=1.0),
        sets={"a": "controlnet-edges.threads", "b": "controlnet-colors.threads"},
    )
    assert in_terms_of(run, {"t": "controlnet-colors.threads"}, {}).trials[0].config == {"t": 2}
    assert in_terms_of(run, {"t": "controlnet-depth.threads"}, {}).trials[0].config == {"t": 1}


def test_what_only_one_side_has_is_taken_as_it_was_or_left_out():
    """The job's knob as in its reference; the run's knob makes repeats of what differed in nothing else."""
    trials = [measured(0, {"cpu": 1, "old": 1}, rate=1.0), measured(1, {"cpu": 1, "old": 2}, rate=3.0)]
    found = in_terms_of(run_of(*trials), {"cpu": "cpu", "batch": "engine.batch"}, {"cpu": 4, "batch": 8})
    assert [trial.config for trial in found.trials] == [{"cpu": 1, "batch": 8}] * 2


def test_runs_of_the_same_knobs_and_of_none_stay_as_they_are():
    """Nothing is renamed that need not be."""
    run = run_of(measured(0, {"batch": 2, "cpu": 1}, rate=1.0))
    assert in_terms_of(run, {"cpu": "cpu", "batch": "batch"}, {}) == run
    assert in_terms_of(run, {"wheels": "cart.wheels"}, {"wheels": 4}) is run


@pytest.mark.parametrize("name", ["demo", "picks", "images"])
def test_the_starter_library_is_usable_in_every_shipped_job(name: str):
    """All runs of its kind of service, and all of their trials; unless the job says no."""
    spec = parse_job((EXAMPLES / f"{name}.yaml").read_text(), folder=EXAMPLES)
    runs, said = past_runs(spec, ())
    kind = "images" if spec.target.app == "images" else "recommend"
    assert sum(run.service == kind for run in runs) == 4
    theirs = [run for run in starter_runs() if run.service == kind]
    assert sum(len(run.trials) for run in runs) == sum(len(run.trials) for run in theirs)
    assert said == ()
    assert past_runs(spec.model_copy(update={"starter_library": False}), ()) == ((), ())
