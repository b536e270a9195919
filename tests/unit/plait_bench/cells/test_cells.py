"""Measuring the cells of a workload: what is there is kept, the best are measured again, the file is a library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from plait_autoconfig.knobs import IntKnob
from plait_autoconfig.rows import load_lines
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, TrialOutcome
from plait_bench.cells.run import measure
from plait_bench.cells.values import CellSubject, CellWorkload, outcome_of

SPACE = Space((IntKnob(name="batch", low=1, high=6),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy(CellWorkload):
    """Goodput grows with the batch. ``asked``: what was measured."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[CellSubject]:
        yield self

    def measure(self, config: Config, *, seed: int) -> TrialOutcome:
        batch = int(config["batch"])
        self.asked.append((batch, seed))
        return outcome_of([10.0, 30.0], 1.0 / batch, slo_ms=20.0, cores=2.0)


def toy() -> Toy:
    return Toy(name="toy", service="toys", space=SPACE, sets={}, slo_ms=20.0, features={"size": 1.0})


def test_what_was_measured_is_not_measured_again(tmp_path: Path):
    """A sample first, then the rest, and the best twice more, in turn."""
    path, first, rest = tmp_path / "toy.jsonl", toy(), toy()
    measure(first, path, sample=2, again=0, times=0, say=lambda _: None)
    measure(rest, path, sample=None, again=2, times=2, say=lambda _: None)
    assert sorted([*first.asked, *rest.asked[:4]]) == [(batch, 0) for batch in range(1, 7)]
    assert rest.asked[4:] == [(6, 1), (5, 1), (6, 2), (5, 2)]
    (run,) = load_lines(path.read_text().splitlines()).runs
    assert (run.run_id, run.service, run.goals) == ("toy", "toys", ("max goodput_per_cost",))
    assert [trial.number for trial in run.trials] == list(range(10))
    assert run.versions.keys() == {"plait", "torch", "diffusers"}


def test_an_outcome_counts_what_came_in_time():
    """Half of two requests in half a second, on two cores."""
    metrics = outcome_of([10.0, 30.0], 0.5, slo_ms=20.0, cores=2.0).metrics
    assert metrics["goodput_per_s"] == 2.0
    assert metrics["attainment"] == 0.5
    assert metrics["goodput_per_cost"] == 1.0
    assert metrics["achieved_per_s"] == 4.0
