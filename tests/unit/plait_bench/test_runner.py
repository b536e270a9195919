"""The shared runner over fakes on a virtual clock: layouts, turns, ratios, who is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from fakes.bench import FakeFleet, fake_systems, fake_workload, measured
from plait_bench.benchmark import RATIO, Reading, Subject, Workload, percentile
from plait_bench.errors import Disagreement, SystemUnavailable
from plait_bench.host import HostConditions
from plait_bench.images.fleet import ItemList, ProcessLayout, System
from plait_bench.images.measured import OnFleets
from plait_bench.runner import BenchResult, RunPlan

ONE_ROUND = RunPlan(rounds=1)


@dataclass
class Played:
    """Runs on fakes: what their fleets were asked, and the fleet that each system opened last."""

    log: list[str] = field(default_factory=list)
    made: dict[str, FakeFleet] = field(default_factory=dict)

    def run(
        self,
        seconds: Mapping[str, Any],
        *works: ItemList,
        systems: list[System] | None = None,
        opening: Callable[[System], None] = lambda _: None,
        cores: int = 1,
        takes_turns: bool = False,
        plan: RunPlan = ONE_ROUND,
        check: Callable[..., None] = lambda *_: None,
        **more: Any,
    ) -> BenchResult:
        """`seconds`: what a run of each system takes (`FakeFleet`), always the same, or why there is none."""

        def open_fleet(system: System, layout: ProcessLayout) -> FakeFleet:
            taken = seconds[system.name]
            opening(system)
            if isinstance(taken, Exception):
                raise taken
            always = taken if callable(taken) else lambda *_: taken
            self.made[system.name] = FakeFleet(system.name, layout, always, self.log)
            return self.made[system.name]

        lists, systems = works or [fake_workload()], systems or fake_systems(*seconds)
        given = {"cores": cores, "takes_turns": takes_turns, "open_fleet": open_fleet}
        made = tuple(OnFleets(items, systems, check, **given) for items in lists)
        return measured(made, plan, **more)


@pytest.mark.parametrize(
    ("work", "cores", "layouts"),
    [
        ({}, 2, "1x1 1x2 2x1"),
        ({}, 1, "1x1"),
        ({}, 8, "1x1 1x8 2x4 4x2"),
        ({"one_by_one": True}, 2, "1x1 1x2"),
        ({"items": 1}, 2, "1x1 1x2"),
    ],
)
def test_layouts_use_one_core_or_the_whole_machine(work, cores, layouts):
    """As up to four processes, if each has work: requests one by one, or a single one, never use two."""
    assert " ".join(map(str, fake_workload(**work).layouts(cores))) == layouts


def chosen(seconds, *, cores=2, trials=1, variants=("",), say=lambda _: None, **workload):
    """The choice of a layout for one system, and what its fleet was asked."""
    played, systems = Played(), fake_systems("a", variants=lambda _: variants)
    plan, work = RunPlan(rounds=1, trials=trials), fake_workload(**workload)
    return played.run({"a": seconds}, work, systems=systems, plan=plan, cores=cores, say=say), played.log


def test_every_layout_and_variant_has_equal_trials_and_the_best_is_kept():
    """Also one that is best only in a shape that is not; what was tried is said. Trials may be shorter than rounds."""
    cost = {"1x1": 5.0, "1x2": 3.0, "2x1": 4.0, "1x1 wide": 9.0, "1x2 wide": 4.0, "2x1 wide": 2.0}
    said = []
    given = {"variants": ("", "wide"), "trials": 2, "say": said.append, "trial_items": 2}
    result, log = chosen(lambda layout, _: cost[str(layout)], **given)
    rates = {layout: f"{2 / seconds:.4g}" for layout, seconds in cost.items()}
    assert {f"work: a, {layout}: {rate}, {rate} images/s" for layout, rate in rates.items()} <= set(said)
    assert result.rows[0].layout == "2x1 wide"
    assert (log.count("a 2"), log.count("a 4"), log[-1]) == (6 * 2, 1, "a 4")


def test_a_lucky_trial_does_not_decide():
    """The median of a layout's trials does, and trials do not count as rounds."""
    taken = {"1x1": iter([9.0, 0.1, 9.0, 9.0]), "1x2": iter([9.0, 3.0, 3.0, 3.0, 9.0, 9.0, 3.0])}
    result, _ = chosen(lambda layout, _: next(taken[str(layout)]), trials=3, one_by_one=True)
    assert (result.rows[0].layout, result.rows[0].n) == ("1x2", 1)


def test_every_layout_is_warmed_up_before_it_is_timed():
    """The first run of a layout is the warm-up's, and its time does not count."""
    result, log = chosen(lambda *_: 1.0)
    assert log == ["a 1", "a 4"] * 3 + ["a 1", "a keep", "a 4"]
    assert result.rows[0].n == 1


def test_rounds_take_the_systems_in_turn_after_the_check():
    """A B A B, never A A B B, and agreement is checked before anything is timed."""
    played = Played()
    played.run({"ours": 1.0, "theirs": 2.0}, plan=RunPlan(rounds=3))
    assert played.log == ["ours 1", "theirs 1", "ours keep", "theirs keep", *["ours 4", "theirs 4"] * 3]


def test_systems_run_their_load_uncounted_before_the_rounds():
    """For as long as the workload says, one system after the other, after the check; not if the plan says no."""
    for settles in (True, False):
        played, plan = Played(), RunPlan(rounds=1, settles=settles)
        result = played.run({"ours": 1.0, "theirs": 2.0}, fake_workload(settle_s=0.01), plan=plan)
        between = played.log[4:-2]  # the check, and the round
        assert between == sorted(between)
        assert set(between) == ({"ours 4", "theirs 4"} if settles else set())
        assert all(row.n == 1 for row in result.rows)


def test_ratios_are_taken_inside_rounds():
    """A machine that gets ten times slower from round to round changes no ratio: ours is always twice as fast. Memory
    is a row of every system, and no ratio."""
    slow = [0.1, 0.1, 1.0, 10.0, 100.0]
    taken = {"ours": lambda _, n: slow[n], "theirs": lambda _, n: 2 * slow[n]}
    result = Played().run(taken, plan=RunPlan(rounds=3))
    ratio = result.ratios["work:images_per_s:ours/theirs"]
    assert (ratio.value, ratio.p20, ratio.p80, ratio.n) == pytest.approx((2.0, 2.0, 2.0, 3))
    rows = {(row.system, row.metric): row for row in result.rows}
    ours = rows["ours", "images_per_s"]
    assert (ours.value, ours.layout, ours.kind) == (pytest.approx(4 / 10.0), "1x1", "measured")
    assert ours.rounds == pytest.approx((4.0, 0.4, 0.04))
    assert [rows[system, "peak_memory_gib"].value for system in taken] == [3.0, 3.0]
    assert len(result.ratios) == 1


def test_a_system_that_can_not_run_is_left_out_with_its_reason():
    """The others go on; ours must be there."""
    played = Played()
    result = played.run({"ours": 1.0, "theirs": SystemUnavailable("theirs needs PEFT"), "third": 4.0})
    assert result.left_out == {"theirs": "theirs needs PEFT"}
    assert list(result.ratios) == ["work:images_per_s:ours/third"]
    assert all(fleet.closed for fleet in played.made.values())
    with pytest.raises(SystemUnavailable, match="no engine"):
        Played().run({"ours": SystemUnavailable("no engine"), "theirs": 1.0})


def test_different_results_stop_the_run_and_the_processes():
    """Nothing is timed when the systems do not do the same."""
    played = Played()
    with pytest.raises(Disagreement):
        played.run({"ours": 1.0}, plan=RunPlan(rounds=9), check=_disagree)
    assert played.log == ["ours 1", "ours keep"]
    assert played.made["ours"].closed


def _disagree(*_):
    raise Disagreement("they differ")


@pytest.mark.parametrize(
    ("seen", "busy"),
    [
        ([(0.2, 20.0), (0.2, 20.0), (1.9, 25.0)], False),
        ([(0.6, 20.0), (0.2, 20.0), (0.2, 25.0)], True),
        ([(0.2, 20.0), (0.2, 20.0), (0.2, 61.0)], True),
    ],
)
def test_rows_say_what_else_the_host_did(seen, busy):
    """The load before the benchmark's own work counts, and the wake-up before each round; each round's load is kept."""
    looks = iter([HostConditions(load=load, wake_us=wake_us) for load, wake_us in seen])
    result = Played().run({"a": 1.0}, plan=RunPlan(rounds=2), look=lambda: next(looks))
    (row,) = (row for row in result.rows if row.metric == "images_per_s")
    assert (row.busy, row.wake_us, row.load) == (busy, max(us for _, us in seen[1:]), tuple(at for at, _ in seen[1:]))


def test_what_does_not_fit_is_closed_and_comes_back_warm():
    """With room for one, systems are opened in turn, and what a new process does first is not counted."""
    played, opened = Played(), []

    def opening(system: System) -> None:
        assert all(fleet.closed for fleet in played.made.values())
        opened.append(system.name)

    played.run({"a": 1.0, "b": 1.0}, plan=RunPlan(rounds=2), opening=opening, takes_turns=True)
    assert opened[-4:] == ["a", "b", "a", "b"]
    assert played.log[-4:] == ["a 1", "a 4", "b 1", "b 4"]


def test_who_is_not_measured_takes_no_time():
    """All but one are paused, whether it runs or is started: a server that idles is not free."""
    played, running = Played(), []

    def note(name: str) -> None:
        running.extend(other for other, fleet in played.made.items() if other != name and not fleet.is_paused)

    taken = {name: lambda *_, name=name: note(name) or 1.0 for name in "abc"}
    played.run(taken, plan=RunPlan(rounds=2), opening=lambda system: note(system.name))
    assert len(played.made) == 3
    assert running == []


def test_a_system_that_divides_the_machine_itself_has_one_layout():
    """It has no trials; the row says that the layout is its own."""
    played = Played()
    result = played.run({"a": 1.0}, systems=fake_systems("a", is_own_layout=True), cores=2)
    assert result.rows[0].layout == "its own"
    assert played.log == ["a 1", "a keep", "a 4"]


def test_percentiles_are_linear_between_neighbours():
    """Of 0, 10, 20, 30, 40, 50: one fifth is 10, one half 25; of what is infinite nothing is subtracted; of nothing
    there is no summary."""
    ordered = [50.0, 0.0, 30.0, 10.0, 40.0, 20.0]
    assert [percentile(ordered, share) for share in (0.0, 0.2, 0.5, 1.0)] == [0.0, 10.0, 25.0, 50.0]
    assert percentile([math.inf, math.inf], 0.5) == math.inf
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


class Promised(Workload):
    """Two systems; the second may be at most twice the first."""

    name, systems, pairs = "promised", ("one", "other"), (("other", "one"),)
    metrics: ClassVar = {"taken_s": "s"}

    @contextmanager
    def open(self, system, layout):
        """Three seconds, or one."""
        yield Subject(lambda _: [Reading(metric="taken_s", value=3.0 if system == "other" else 1.0)])

    def judge(self, rows):
        """Look at the ratio."""
        (ratio,) = (row.value for row in rows if row.unit == RATIO)
        return [f"{ratio:g} times"] if ratio > 2 else []


def test_what_was_promised_is_judged_by_all_rows():
    """Ratios too; not where a system was left out."""
    benchmark = (Promised(),)
    assert measured(benchmark, RunPlan(rounds=1)).missed == ("promised: 3 times",)
    assert measured(benchmark, RunPlan(rounds=1, systems=("one",))).missed == ()
