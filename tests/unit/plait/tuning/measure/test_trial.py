"""The load of one trial: a short look that loses is all there is, what may win runs to its end, both costs are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.tuning.measure import measurer as module
from plait.tuning.measure.cost import ReservedResources
from plait.tuning.measure.load import LoadResult
from plait.tuning.measure.measurer import run_loads
from plait.tuning.measure.usage import ResourceUsage
from plait_autoconfig.jobs.measurer import Measured, MeasurementKind, MeasurementTask
from plait_autoconfig.jobs.promised_rate import SLO_MET
from plait_autoconfig.jobs.spec import Prices
from plait_autoconfig.objective import Goal
from plait_autoconfig.values import FailureKind
from plait_loadtest.load import load_scenario
from plait_loadtest.scenario import Scenario

RESERVED = ReservedResources(cores=0.5, gpus=0.25)
CORES_ONLY = Prices(core=1.0, gpu=0.0, gib=0.0)
SCENARIO = {
    "arrivals": {"kind": "poisson", "rate_per_s": 50},
    "duration_s": 16,
    "warm_up_s": 2,
    "slo": {"latency_ms": 9},
}


class Loads:
    """Stands for the loads of a trial, of two seconds each; every one of them shows the same."""

    def __init__(self, folder: Path) -> None:
        self.given: list[Scenario] = []
        self.searched: list[dict[str, Any]] = []
        self.needed: list[float] = []
        self._folder, self._result = folder, LoadResult(metrics={})

    def run_given(self, scenario: Scenario, _watch: object) -> LoadResult:
        self.given.append(scenario)
        return self._result

    def run_search(self, _scenario: Scenario, _watch: object, **how: Any) -> LoadResult:
        self.searched.append(how)
        self.needed.append(how["needed"](self._result))
        return self._result

    def measured(
        self,
        metrics: dict[str, float],
        *,
        slo_met: bool = True,
        early: str = "",
        goal: Goal | None = None,
        search: bool = False,
        prices: Prices = CORES_ONLY,
        **task: Any,
    ) -> Measured:
        """The outcome of such a task, if its loads show these metrics."""
        summary = SimpleNamespace(total=SimpleNamespace(slo_met=slo_met))
        session: Any = SimpleNamespace(summary=summary, result=SimpleNamespace(wall_s=2.0))
        used = ResourceUsage(cpu_s=3.0, memory_bytes=1 << 30)
        self._result = LoadResult(metrics=metrics, ended_early=early, used=used, sessions=(session,), counted_s=2.0)
        running: Any = SimpleNamespace(reserved=RESERVED, may_end=frozenset(), pids=dict, url="http://h:1", prefix="")
        scenarios, log_path = (load_scenario(SCENARIO, {}),), self._folder / "none.log"
        goals = SimpleNamespace(goals=() if goal is None else (goal,), limits=())
        spec = SimpleNamespace(goal=goals, is_capacity_search=search, prices=prices)
        subject: Any = SimpleNamespace(spec=spec, running=running, scenarios=scenarios, guard=None, log_path=log_path)
        own = MeasurementTask(
            number=1, kind=MeasurementKind.TRIAL, config={}, seed=1, limit_s=60.0, folder=self._folder, **task
        )
        return run_loads(subject, own, limit_s=60.0, say=lambda _: None, known={})


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    made = Loads(tmp_path)
    monkeypatch.setattr(module, "run_given", made.run_given)
    monkeypatch.setattr(module, "run_search", made.run_search)
    monkeypatch.setattr(module, "joined", lambda look, rest: rest)
    monkeypatch.setattr(module.Outputs, "write_files", lambda *_: None)
    return made


def test_a_short_look_that_surely_loses_is_all_there_is(loads: Loads) -> None:
    """A quarter of the load; the note says why. Its metrics are those of the look."""
    found = loads.measured({"goodput_per_s": 50.0, "p99_ms": 200.0}, goal=Goal("p99_ms", "min"), to_beat=100.0)
    assert [each.duration_s for each in loads.given] == [4.0]
    assert found.outcome.metrics["p99_ms"] == 200.0
    assert found.note == "short: p99_ms 200 will not beat the best's 100"


@pytest.mark.parametrize("to_beat", [None, 150.0])
def test_what_may_win_and_what_is_compared_with_runs_to_its_end(loads: Loads, to_beat: float | None) -> None:
    """In two parts or in one; the parts make the whole, and differ in their arrivals."""
    loads.measured({"goodput_per_s": 50.0, "p99_ms": 200.0}, goal=Goal("p99_ms", "min"), to_beat=to_beat)
    assert sum(each.duration_s for each in loads.given) == 16.0
    assert len({each.seed for each in loads.given}) == len(loads.given) == (1 if to_beat is None else 2)


@pytest.mark.parametrize(("basis", "cost"), [("reserved", 1.51), ("used", 2.51)])
def test_both_costs_are_told_and_the_basis_is_paid(loads: Loads, basis: str, cost: float) -> None:
    """Used are processor seconds per second of the load that counts. Memory is as measured, GPUs as reserved."""
    prices = Prices.model_validate({"basis": basis, "core": 1.0, "gpu": 4.0, "gib": 0.01})
    found = loads.measured({"goodput_per_s": 50.0}, prices=prices).outcome.metrics
    assert (found["reserved_cores"], found["cpu_cores"], found["memory_gib"]) == (0.5, 1.5, 1.0)
    assert found["reserved_cost_per_hour"] == pytest.approx(1.51)
    assert found["used_cost_per_hour"] == pytest.approx(2.51)
    assert found["cost_per_hour"] == pytest.approx(cost)
    assert found["goodput_per_cost"] == pytest.approx(50.0 * 3600.0 / cost)


def test_a_search_knows_what_to_expect_and_what_it_needs(loads: Loads) -> None:
    """The goodput per cost to beat, times its own cost; what others are compared with is whole and needs nothing."""
    shows, goal = {"goodput_per_s": 50.0}, Goal("goodput_per_cost", "max")
    loads.measured(shows, search=True, goal=goal, to_beat=360_000.0, expected_per_s=40.0)
    loads.measured(shows, search=True, goal=goal)
    assert loads.needed == [pytest.approx(100.0 * RESERVED.cores), 0.0]
    assert [how["expected_per_s"] for how in loads.searched] == [40.0, 0.0]
    assert [how["whole"] for how in loads.searched] == [False, True]


@pytest.mark.parametrize(("slo_met", "early", "held"), [(True, "", 1.0), (False, "", 0.0), (True, "it cannot", 0.0)])
def test_a_rate_that_is_offered_is_held_or_missed(loads: Loads, slo_met: bool, early: str, held: float) -> None:
    """It replaces the scenarios'. One whole run, no search; a run that was ended early has missed."""
    found = loads.measured({"goodput_per_s": 70.0}, slo_met=slo_met, early=early, rate_per_s=70.0)
    assert [(each.arrivals.rate_per_s, each.duration_s) for each in loads.given] == [(70.0, 16.0)]
    assert found.outcome.metrics[SLO_MET] == held


def test_a_rate_that_is_offered_and_not_answered_at_all_is_a_failure(loads: Loads) -> None:
    """Whether the SLO held is no metric of a load without one."""
    assert loads.measured({}, rate_per_s=70.0).outcome.failure is FailureKind.TIME_OUT
