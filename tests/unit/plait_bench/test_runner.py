"""The shared runner over fakes on a virtual clock: layouts, turns, ratios, who is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_bench.benchmark import ProcessLayout, System
from plait_bench.errors import Disagreement, SystemUnavailable
from plait_bench.runner import RunPlan, find_best_layout, layouts, layouts_for, run
from support.bench import FakeFleet, fake_benchmark, fake_workload


def quiet(_: str) -> None:
    """Progress that nobody reads."""


def fleets(log, **seconds):
    """An `open_fleet` that knows how long each system takes, and the fleets it made."""
    made = {}

    def open_fleet(system: System, processes: int) -> FakeFleet:
        taken = seconds[system.name]
        if isinstance(taken, Exception):
            raise taken
        made[system.name] = FakeFleet(system.name, taken, log)
        return made[system.name]

    return open_fleet, made


def test_layouts_use_one_core_or_the_whole_machine():
    """Two cores: 1x1, 1x2 and 2x1; one core: only 1x1; eight: also four processes of two threads."""
    assert [str(layout) for layout in layouts(2)] == ["1x1", "1x2", "2x1"]
    assert [str(layout) for layout in layouts(1)] == ["1x1"]
    assert [str(layout) for layout in layouts(8)] == ["1x1", "1x8", "2x4", "4x2"]


def test_a_layout_without_work_for_every_process_is_not_tried():
    """Requests one by one, or a single one, never use two processes."""
    assert [str(layout) for layout in layouts_for(fake_workload(one_by_one=True), 2)] == ["1x1", "1x2"]
    assert [str(layout) for layout in layouts_for(fake_workload(items=1), 2)] == ["1x1", "1x2"]


def test_the_fastest_layout_is_found_then_the_fastest_variant():
    """Variants are tried in the best shape only, and the fleet is left in the winner."""
    log: list[str] = []
    cost = {"1x1": 5.0, "1x2": 3.0, "2x1": 4.0, "1x2 wide": 2.0, "1x2 slow": 9.0}
    fleet = FakeFleet("a", lambda layout, _: cost[str(layout)], log)
    best, tried = find_best_layout(fleet, ("", "wide", "slow"), fake_workload(), RunPlan(rounds=1, cores=2))
    assert best == ProcessLayout(processes=1, threads=2, variant="wide")
    assert {str(layout): seconds for layout, seconds in tried.items()} == cost
    assert fleet.run((), one_by_one=False).wall_s == 2.0


def test_every_layout_is_warmed_up_before_it_is_timed():
    """The first run of a layout is the warm-up's, and its time does not count."""
    log: list[str] = []
    fleet = FakeFleet("a", lambda _, n: 100.0 if n % 2 == 0 else 1.0, log)
    _, tried = find_best_layout(fleet, ("",), fake_workload(items=4), RunPlan(rounds=1, cores=2))
    assert log == ["a 1", "a 4"] * 3
    assert set(tried.values()) == {1.0}


def test_rounds_take_the_systems_in_turn_after_the_check():
    """A B A B, never A A B B, and agreement is checked before anything is timed."""
    log: list[str] = []
    open_fleet, _ = fleets(log, ours=lambda *_: 1.0, theirs=lambda *_: 2.0)
    run(
        fake_benchmark("ours", "theirs", workloads=[fake_workload()]),
        RunPlan(rounds=3, cores=1),
        open_fleet=open_fleet,
        say=quiet,
    )
    assert log == ["ours 1", "ours 4", "theirs 1", "theirs 4", "ours keep", "theirs keep", *["ours 4", "theirs 4"] * 3]


def test_ratios_are_taken_inside_rounds():
    """A machine that gets ten times slower from round to round changes no ratio: ours is always twice as fast."""
    log: list[str] = []
    slow = [0.1, 0.1, 0.1, 1.0, 10.0, 100.0]
    open_fleet, _ = fleets(log, ours=lambda _, n: slow[n], theirs=lambda _, n: 2 * slow[n])
    result = run(
        fake_benchmark("ours", "theirs", workloads=[fake_workload()]),
        RunPlan(rounds=3, cores=1),
        open_fleet=open_fleet,
        say=quiet,
    )
    ratio = result.ratios["work:per_s:ours/theirs"]
    assert (ratio.value, ratio.p20, ratio.p80, ratio.n) == pytest.approx((2.0, 2.0, 2.0, 3))
    rows = {row.system: row for row in result.rows}
    assert rows["ours"].value == pytest.approx(4 / 10.0)
    assert rows["ours"].layout == "1x1"
    assert rows["ours"].kind == "measured"


def test_a_system_that_can_not_run_is_left_out_with_its_reason():
    """The others go on; ours must be there."""
    workload = fake_workload()
    benchmark = fake_benchmark("ours", "theirs", "third", workloads=[workload, replace(workload, name="more")])
    open_fleet, made = fleets(
        [], ours=lambda *_: 1.0, theirs=SystemUnavailable("theirs needs PEFT"), third=lambda *_: 4.0
    )
    result = run(benchmark, RunPlan(rounds=1, cores=1), open_fleet=open_fleet, say=quiet)
    assert result.left_out == {"theirs": "theirs needs PEFT"}
    assert list(result.ratios) == ["work:per_s:ours/third", "more:per_s:ours/third"]
    assert all(fleet.closed for fleet in made.values())
    open_fleet, _ = fleets([], ours=SystemUnavailable("no engine"), theirs=lambda *_: 1.0, third=lambda *_: 1.0)
    with pytest.raises(SystemUnavailable, match="no engine"):
        run(benchmark, RunPlan(rounds=1, cores=1), open_fleet=open_fleet, say=quiet)


def test_a_workload_runs_only_its_systems():
    """A system that a workload does not name takes no part in it, and starts no process before its first workload."""
    log: list[str] = []
    open_fleet, made = fleets(log, ours=lambda *_: 1.0, theirs=lambda *_: 1.0)
    only = fake_workload(systems=frozenset({"ours"}))
    result = run(
        fake_benchmark("ours", "theirs", workloads=[only]), RunPlan(rounds=1, cores=1), open_fleet=open_fleet, say=quiet
    )
    assert set(made) == {"ours"}
    assert result.ratios == {}


def test_different_results_stop_the_run_and_the_processes():
    """Nothing is timed when the systems do not do the same."""
    log: list[str] = []
    benchmark = replace(fake_benchmark("ours", workloads=[fake_workload()]), check=_disagree)
    open_fleet, made = fleets(log, ours=lambda *_: 1.0)
    with pytest.raises(Disagreement):
        run(benchmark, RunPlan(rounds=9, cores=1), open_fleet=open_fleet, say=quiet)
    assert log == ["ours 1", "ours 4", "ours keep"]
    assert made["ours"].closed


def _disagree(*_):
    raise Disagreement("they differ")
