"""The load of one trial: a short look that loses is all there is, what may win runs to its end, both costs are told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.config import parse_config
from plait.tuning.measure import trial as module
from plait.tuning.measure.cost import reserved
from plait.tuning.measure.load import LoadResult
from plait.tuning.measure.trial import LoadPlan, TrialMetrics, run_loads
from plait.tuning.measure.usage import ResourceUsage
from plait_autoconfig.jobs.promised_rate import SLO_MET
from plait_autoconfig.jobs.spec import Prices
from plait_autoconfig.objective import Goal
from plait_autoconfig.values import FailureKind
from plait_loadtest.load import load_scenario
from plait_loadtest.scenario import Scenario

CONFIG = parse_config(
    {"images": None, "recommend": {"models": {"shop": {"folder": "/shop"}}}}, source="test", folder=Path("/")
)
RESERVED_CORES = 0.1 + 2 * 0.2
SCENARIO = {
    "arrivals": {"kind": "poisson", "rate_per_s": 50},
    "duration_s": 16,
    "warm_up_s": 2,
    "slo": {"latency_ms": 9},
}


def ran(metrics: dict[str, float], *, cpu_s: float = 3.0, slo_met: bool | None = None, early: str = "") -> LoadResult:
    """A load of two seconds."""
    session: Any = SimpleNamespace(
        summary=SimpleNamespace(total=SimpleNamespace(slo_met=slo_met)), result=SimpleNamespace(wall_s=2.0)
    )
    return LoadResult(
        metrics=metrics,
        ended_early=early,
        used=ResourceUsage(cpu_s=cpu_s, memory_bytes=1 << 30),
        sessions=() if slo_met is None else (session,),
        counted_s=2.0,
    )


class Loads:
    """Stands for the loads of a trial; every one of them shows the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, metrics: dict[str, float]) -> None:
        self.given: list[Scenario] = []
        self.searched: list[dict[str, Any]] = []
        self.needed: list[float] = []
        self._metrics = metrics
        monkeypatch.setattr(module, "run_given", self._run_given)
        monkeypatch.setattr(module, "run_search", self._run_search)
        monkeypatch.setattr(module, "joined", lambda look, rest: rest)

    def _run_given(self, scenario: Scenario, _watch: object) -> LoadResult:
        self.given.append(scenario)
        return ran(self._metrics)

    def _run_search(self, _scenario: Scenario, _watch: object, **how: Any) -> LoadResult:
        self.searched.append(how)
        self.needed.append(how["needed"](ran(self._metrics)))
        return ran(self._metrics)


def measured(folder: Path, **plan: Any) -> TrialMetrics:
    """The outcome of a trial with such a plan."""
    running: Any = SimpleNamespace(
        reserved=reserved(CONFIG), may_end=frozenset(), pids=dict, url="http://127.0.0.1:1", prefix=""
    )
    known = {"scenarios": (load_scenario(SCENARIO, {}),), "search": False, "seed": 1, "limit_s": 60.0}
    whole = LoadPlan(**{**known, "prices": Prices(core=1.0, gib=0.0), **plan})
    return run_loads(running, whole, folder=folder, log_path=None, say=lambda _: None, known={})


def test_a_short_look_that_surely_loses_is_all_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the load; the note says why. Its metrics are those of the look."""
    loads = Loads(monkeypatch, {"goodput_per_s": 50.0, "p99_ms": 200.0})
    found = measured(tmp_path, goal=Goal("p99_ms", "min"), to_beat=100.0)
    assert [each.duration_s for each in loads.given] == [4.0]
    assert found.outcome.metrics["p99_ms"] == 200.0
    assert found.notes == ("short: p99_ms 200 will not beat the best's 100",)


@pytest.mark.parametrize("to_beat", [None, 150.0])
def test_what_may_win_and_what_is_compared_with_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_beat: float | None
) -> None:
    """In two parts or in one; the parts make the whole, and differ in their arrivals."""
    loads = Loads(monkeypatch, {"goodput_per_s": 50.0, "p99_ms": 200.0})
    measured(tmp_path, goal=Goal("p99_ms", "min"), to_beat=to_beat)
    assert sum(each.duration_s for each in loads.given) == 16.0
    assert len({each.seed for each in loads.given}) == len(loads.given) == (1 if to_beat is None else 2)


@pytest.mark.parametrize(("basis", "cost"), [("reserved", RESERVED_CORES), ("used", 1.5)])
def test_both_costs_are_told_and_the_basis_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, basis: str, cost: float
) -> None:
    """Used are processor seconds per second of the load that counts."""
    Loads(monkeypatch, {"goodput_per_s": 50.0})
    found = measured(tmp_path, prices=Prices.model_validate({"basis": basis, "core": 1.0, "gib": 0.0})).outcome.metrics
    assert found["reserved_cost_per_hour"] == pytest.approx(RESERVED_CORES)
    assert found["used_cost_per_hour"] == pytest.approx(1.5)
    assert found["cost_per_hour"] == pytest.approx(cost)
    assert found["goodput_per_cost"] == pytest.approx(50.0 * 3600.0 / cost)


def test_a_search_knows_what_to_expect_and_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The goodput per cost to beat, times its own cost; what others are compared with is whole and needs nothing."""
    loads = Loads(monkeypatch, {"goodput_per_s": 50.0})
    goal = Goal("goodput_per_cost", "max")
    measured(tmp_path, search=True, goal=goal, to_beat=360_000.0, expected_per_s=40.0)
    measured(tmp_path, search=True, goal=goal)
    assert loads.needed == [pytest.approx(100.0 * RESERVED_CORES), 0.0]
    assert [how["expected_per_s"] for how in loads.searched] == [40.0, 0.0]
    assert [how["whole"] for how in loads.searched] == [False, True]


@pytest.mark.parametrize(("slo_met", "early", "held"), [(True, "", 1.0), (False, "", 0.0), (True, "it cannot", 0.0)])
def test_a_rate_that_is_offered_replaces_the_scenarios_and_is_held_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slo_met: bool, early: str, held: float
) -> None:
    """One whole run, no search; a run that was ended early has missed."""
    loads = Loads(monkeypatch, {"goodput_per_s": 70.0})
    monkeypatch.setattr(module.Outputs, "write_files", lambda *_: None)

    def run_given(scenario: Scenario, _watch: object) -> LoadResult:
        loads.given.append(scenario)
        return ran({"goodput_per_s": 70.0}, slo_met=slo_met, early=early)

    monkeypatch.setattr(module, "run_given", run_given)
    found = measured(tmp_path, rate_per_s=70.0)
    assert [(each.arrivals.rate_per_s, each.duration_s) for each in loads.given] == [(70.0, 16.0)]
    assert found.outcome.metrics[SLO_MET] == held


def test_a_rate_that_is_offered_and_not_answered_at_all_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the SLO held is no metric of a load without one."""
    Loads(monkeypatch, {})
    assert measured(tmp_path, rate_per_s=70.0).outcome.failure is FailureKind.TIME_OUT
