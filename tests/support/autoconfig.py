"""Pieces that tests of the tuner share."""

from __future__ import annotations

from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, Hardware, Trial, TrialOutcome, Value

GRID = Space(
    (IntKnob(name="cpu", low=1, high=4, unit="cores"), ChoiceKnob(name="batch", values=(1, 2, 4), ordered=True))
)


def measured(number: int, config: dict[str, Value], **metrics: float) -> Trial:
    """A trial that ran."""
    return Trial(number=number, config=config, outcome=TrialOutcome.measured(**metrics), duration_s=1.5, seed=number)


def failed(number: int, config: dict[str, Value], kind: FailureKind = FailureKind.CRASH) -> Trial:
    """A trial that did not."""
    return Trial(number=number, config=config, outcome=TrialOutcome.failed(kind, "the reason"), duration_s=0.5)


def run_of(*trials: Trial, run_id: str = "run-1", **fields: object) -> LibraryRun:
    """A library run with every field set to something."""
    known = {
        "service": "picks",
        "units": {"cpu": "cores", "batch": ""},
        "workload": {"candidates": 100.0},
        "hardware": Hardware(name="lab", cpus=8, memory_bytes=2**33, accelerator="H100", accelerators=1),
        "versions": {"plait": "0.1.0", "torch": "2.13.0+cpu"},
        "goals": ("max rate_per_s",),
        "started_at": "2026-11-01T08:00:00+00:00",
    }
    return LibraryRun(run_id=run_id, trials=trials, **{**known, **fields})
