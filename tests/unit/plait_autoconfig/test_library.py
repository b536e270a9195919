"""Which rows of the library can be read in a space, why others cannot, and how much a run counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import usable_for, usable_runs, weight_of
from plait_autoconfig.objective import Goal, Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, Hardware
from support.autoconfig import GRID, failed, measured, run_of

RATE = Objective((Goal("rate", "max"),))
LAB = Hardware(name="lab", cpus=8, memory_bytes=2**33, accelerator="H100", accelerators=1)
NOW = {"versions": {"plait": "0.1.3", "torch": "2.13.1"}, "hardware": LAB, "at": "2026-11-01T08:00:00+00:00"}


def test_rows_that_fit_are_used_and_others_say_why():
    """Values outside, unknown and missing knobs, invalid trials and missing metrics are counted by reason. Constraints
    and candidates say what is proposed, not what is learned from."""
    run = run_of(
        measured(0, {"batch": 2, "cpu": 1}, rate=1.0),
        measured(1, {"cpu": 9, "batch": 1}, rate=1.0),
        measured(2, {"cpu": 9, "batch": 2}, rate=1.0),
        measured(3, {"cpu": 1}, rate=1.0),
        measured(4, {"cpu": 1, "batch": 1, "precision": 1}, rate=1.0),
        measured(5, {"cpu": 2, "batch": 1}, p99_ms=1.0),
        failed(6, {"cpu": 3, "batch": 1}),
        failed(7, {"cpu": 4, "batch": 1}, FailureKind.INVALID),
    )
    picky = Space(GRID.knobs, ("cpu > 3",), ({"cpu": 4, "batch": 1},))
    usable = usable_for(run, picky, RATE)
    assert [trial.number for trial in usable.trials] == [0, 6]
    assert list(usable.trials[0].config) == ["cpu", "batch"]
    assert usable.unusable == {
        "cpu is 9, but must be a whole number from 1 to 4 (cores)": 2,
        "batch is missing": 1,
        "precision is no knob of this space; they are cpu, batch": 1,
        "rate was not measured": 1,
        "the measurement was invalid": 1,
    }
    assert str(usable).startswith("picks (run-1): 2 of 8 trials can be used; 2 not: cpu is 9")


def test_units_must_agree():
    """A knob of the same name in another unit is another knob."""
    space = Space((IntKnob(name="cpu", low=1, high=4, unit="millicores"), *GRID.knobs[1:]))
    usable = usable_for(run_of(measured(0, {"cpu": 1, "batch": 1}, rate=1.0)), space)
    assert usable.trials == ()
    assert usable.unusable == {"cpu is in cores there and in millicores here": 1}


def test_only_runs_with_a_measurement_teach():
    """Runs whose usable trials all failed, or of another space, are left out."""
    good = run_of(measured(0, {"cpu": 1, "batch": 1}, rate=1.0), failed(1, {"cpu": 9, "batch": 1}), run_id="good")
    broken = run_of(failed(0, {"cpu": 1, "batch": 1}), run_id="broken")
    other = run_of(measured(0, {"threads": 1}, rate=1.0), run_id="other", units={"threads": ""})
    used = usable_runs([good, broken, other], GRID, RATE)
    assert [(run.run_id, len(run.trials)) for run in used] == [("good", 1)]


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({}, 1.0),
        ({"versions": {"plait": "0.2.0", "torch": "2.13.0"}}, 0.5),
        ({"versions": {"vllm": "1.0"}}, 1.0),
        ({"hardware": replace(LAB, accelerator="A100")}, 0.5),
        ({"hardware": replace(LAB, cpus=2)}, 0.8**2),
        ({"hardware": Hardware()}, 1.0),
        ({"started_at": "2025-11-01T09:00:00+01:00"}, 0.5),
        ({"started_at": ""}, 1.0),
        ({"started_at": "2027-11-01"}, 1.0),
    ],
)
def test_stale_and_foreign_runs_count_less(changes, weight):
    """Other minor versions, another accelerator, other CPU counts and age each cost a factor; unknown ones do not."""
    assert weight_of(run_of(**changes), **NOW) == pytest.approx(weight)


def test_choices_keep_their_kind():
    """A row that stores 1 where the space has True is another value."""
    space = Space((ChoiceKnob(name="fused", values=(False, True)),))
    run = run_of(measured(0, {"fused": 1}, rate=1.0), measured(1, {"fused": True}, rate=1.0), units={"fused": ""})
    assert [trial.number for trial in usable_for(run, space).trials] == [1]
