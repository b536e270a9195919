"""Measuring the cells of a workload: in rounds, what is there is kept, the file is a library that ships with plait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait_autoconfig.knobs import IntKnob
from plait_autoconfig.rows import load_lines
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, TrialOutcome
from plait_bench.autoconfig.cells import CellWorkload, measure
from plait_bench.autoconfig.services import SPACES, MeasureCell, outcome_of, own_suite

Asked = list[tuple[int, int]]


def toy(asked: Asked, knob: str = "batch") -> CellWorkload:
    """Goodput grows with the one knob; ``asked`` notes what was measured."""

    def measured(config: Config, seed: int) -> TrialOutcome:
        asked.append((int(config[knob]), seed))
        return outcome_of([10.0, 30.0], 1.0 / int(config[knob]), slo_ms=20.0, cores=2.0)

    @contextmanager
    def opened() -> Iterator[MeasureCell]:
        yield measured

    space = Space((IntKnob(name=knob, low=1, high=6),))
    return CellWorkload(name="toy", service="toys", space=space, features={"size": 1.0}, opened=opened)


def test_what_was_measured_is_not_measured_again(tmp_path: Path):
    """Every cell once a round, in another order each time; a file that was cut off is gone on with."""
    path, first, rest = tmp_path / "toy.jsonl", Asked(), Asked()
    measure(toy(first), path, times=1, say=lambda _: None)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-2]) + "\n")
    measure(toy(rest), path, times=2, say=lambda _: None)
    assert sorted(first) == [(batch, 0) for batch in range(1, 7)]
    assert rest[:2] == first[-2:]
    assert sorted(rest[2:]) == [(batch, 1) for batch in range(1, 7)]
    assert [batch for batch, _ in rest[2:]] != [batch for batch, _ in first]
    (run,) = load_lines(path.read_text().splitlines())
    assert (run.run_id, run.service, run.goals) == ("toy", "toys", ("max goodput_per_cost",))
    assert [trial.number for trial in run.trials] == list(range(12))
    assert run.versions.keys() == {"plait", "torch", "diffusers"}


def test_the_library_that_ships_has_every_cell_of_these_workloads():
    """Of at least three image services and three ranking services, each cell more than once: so their optima are known,
    with an interval."""
    for suite in map(own_suite, SPACES):
        assert len(suite.services) >= 3
        for service in suite.services:
            assert len(service.space.cells()) <= 48
            assert min(map(len, service.shown.values())) >= 2
            assert 0.0 < service.tie < 0.5


def test_an_outcome_counts_what_came_in_time():
    """Half of two requests in half a second, on two cores."""
    metrics = outcome_of([10.0, 30.0], 0.5, slo_ms=20.0, cores=2.0).metrics
    assert metrics["goodput_per_s"] == 2.0
    assert metrics["attainment"] == 0.5
    assert metrics["goodput_per_cost"] == 1.0
    assert metrics["achieved_per_s"] == 4.0
