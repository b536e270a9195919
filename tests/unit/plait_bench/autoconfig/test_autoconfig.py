"""The tuner's benchmark: tables, searches and rows, on tiny data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fakes.bench import measured
from plait_autoconfig.designers.base import RandomDesigner, ServiceContext
from plait_autoconfig.jobs.measurer import MeasurementKind
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome
from plait_bench import autoconfig
from plait_bench.autoconfig import synthetic
from plait_bench.autoconfig.searching import Curve, Searching, measured_again, play
from plait_bench.autoconfig.services import Service, falcon_suite, recorded_suite
from plait_bench.errors import BenchError
from plait_bench.runner import RunPlan
from support.tune_jobs import job
from support.tuned import played

SPACE = Space(
    (
        IntKnob(name="threads", low=1, high=4),
        ChoiceKnob(name="batch", values=(1, 4), ordered=True),
    )
)


def recorded(*, leave_out: int = 0) -> list[LibraryRun]:
    """Two runs on eight cells, one of which crashes; every cell three times. Of the last run some are left out."""
    runs = []
    for name, factor in (("one", 1.0), ("two", 3.0)):
        trials = []
        for repeat, off in enumerate((0.9, 1.2, 1.0)):
            for cell in SPACE.cells():
                threads, batch = int(cell["threads"]), int(cell["batch"])
                outcome = TrialOutcome.measured(goodput_per_cost=factor * threads * batch**0.5 * off)
                if threads * batch == 16:
                    outcome = TrialOutcome.failed(FailureKind.CRASH, "too much")
                trials.append(Trial(number=len(trials), config=cell, outcome=outcome, repeat=repeat))
        kept = tuple(trials[leave_out:8] if name == "two" and leave_out else trials)
        runs.append(LibraryRun(run_id=name, service="tiny", trials=kept, goals=("max goodput_per_cost",)))
    return runs


def test_recorded_runs_become_a_workload():
    """Each against the other; trials show what was measured, in order; the truth is the mean."""
    suite = recorded_suite(recorded(), SPACE)
    assert [service.name for service in suite.services] == ["one", "two"]
    assert [run.run_id for run in suite.services[0].library] == ["two"]
    service = suite.services[0]
    at = service.index[service.space.key({"threads": 3, "batch": 4})]
    rng = np.random.default_rng(0)
    shown = [service.show(at, repeat, rng).metrics["goodput_per_cost"] for repeat in (0, 1, 2)]
    assert shown == pytest.approx([5.4, 7.2, 6.0])
    assert service.truth[at].metrics["goodput_per_cost"] == pytest.approx(6.2)
    assert service.regret(at) == pytest.approx(0.0)
    assert service.regret(service.index[service.space.key({"threads": 4, "batch": 4})]) == 1.0


def test_what_the_trials_cannot_tell_apart_ties():
    """Cells whose means are closer to the best one's than chance takes them have no regret, others all of theirs; one
    glitch among many trials moves nothing; without repeats nothing ties."""

    def service_of(repeats: int, *, glitch: float = 1.0) -> Service:
        rng, trials = np.random.default_rng(7), []
        for cell in SPACE.cells():
            rate = {1: 95.0, 2: 99.0, 3: 100.0, 4: 60.0}[int(cell["threads"])]
            for repeat in range(repeats):
                shown = rate * float(np.exp(0.03 * rng.standard_normal()))
                outcome = TrialOutcome.measured(goodput_per_cost=shown * (glitch if not trials else 1.0))
                trials.append(Trial(number=len(trials), config=cell, outcome=outcome, repeat=repeat))
        run = LibraryRun(run_id="one", service="tiny", trials=tuple(trials), goals=("max goodput_per_cost",))
        return recorded_suite([run], SPACE).services[0]

    service = service_of(3)
    assert service.tie == pytest.approx(1 - np.exp(-1.96 * 0.03 * (2 / 3) ** 0.5), abs=0.02)
    regrets = {int(cell["threads"]): service.regret(at) for at, cell in enumerate(service.space.cells())}
    assert regrets[2] == regrets[3] == 0.0
    assert regrets[4] == pytest.approx(0.4, abs=0.05)
    assert service_of(3, glitch=31.0).tie == pytest.approx(service.tie, abs=0.02)
    assert service_of(1).tie == 0.0


def test_a_run_with_cells_missing_is_only_a_source():
    """Its optimum is not known."""
    (service,) = recorded_suite(recorded(leave_out=3), SPACE).services
    assert service.name == "one"
    assert [len(run.trials) for run in service.library] == [5]


def test_the_whole_benchmark_runs_on_recorded_runs():
    """Rows for each designer and metric, and ratios of ours to the others."""
    benchmark = (Searching("own-tiny", lambda: recorded_suite(recorded(), SPACE)),)
    plan = RunPlan(rounds=2, systems=("plait", "random"))
    result = measured(benchmark, plan)
    rows = {(row.system, row.metric): row for row in result.rows}
    assert rows["plait", "regret_at_5"].value <= rows["random", "regret_at_1"].value
    assert rows["plait", "trials_to_5pct"].n == 2
    assert set(result.ratios) == {"own-tiny:trials_to_5pct:plait/random"}


def test_without_data_the_published_tables_are_left_out():
    """With the reason; and a system that does not exist is refused by name."""
    result = measured(autoconfig.benchmark(only=["falcon"]), RunPlan(rounds=1))
    assert "--data" in result.left_out["falcon"]
    with pytest.raises(BenchError, match="no system 'cake'"):
        measured(autoconfig.benchmark(only=["synthetic"]), RunPlan(rounds=1, systems=("cake",)))


def liking(family: str) -> float:
    """How well the values of the first past job agree with the truth of its service (rank correlation)."""
    suite = synthetic.suite(family)
    (run,) = [each for each in suite.services[0].library if each.service == suite.services[1].name]
    service = suite.services[1]
    ran = [trial for trial in run.trials if trial.outcome.failure is None]
    shown = [trial.outcome.metrics["goodput_per_cost"] for trial in ran]
    true = [service.values[service.index[service.space.key(trial.config)]] for trial in ran]
    return float(np.corrcoef(np.argsort(np.argsort(shown)), np.argsort(np.argsort(true)))[0, 1])


def test_libraries_mislead_as_announced():
    """Good ones order the cells as the truth does, negated ones the other way round, shuffled ones not at all."""
    assert liking("") > 0.9
    assert liking("negated") < -0.5
    assert abs(liking("shuffled")) < 0.5
    suite = synthetic.suite("glitch")
    metrics = [trial.outcome.metrics for run in suite.services[0].library for trial in run.trials]
    values = [each["goodput_per_cost"] for each in metrics if each]
    assert max(values) > 10 * max(service.values.max() for service in suite.services)


def test_a_search_is_judged_on_the_truth():
    """What is shown is noisy; regret is that of the configuration that would be applied, and never a lucky value."""
    service = synthetic.suite("cold").services[0]

    def make(service: Service, seed: int) -> RandomDesigner:
        return RandomDesigner(service.space, service.objective, seed=seed)

    curve = play(make, service, seed=0, trials=12)
    assert curve.regrets == play(make, service, seed=0, trials=12).regrets
    assert len(curve.regrets) == 12
    assert all(0.0 <= each <= 1.0 for each in curve.regrets)


def test_the_bench_decides_as_a_job_does():
    """The records of a job with noise, replayed cell by cell: as many runs, and the same recommendation."""
    state = played(job(budget={"trials": 8}), noise=0.1)
    rows = [row for row in state.rows if row.kind is not MeasurementKind.CHECK]
    space, cells = state.spec.space, state.spec.space.cells()
    key_of = {space.key(cell): at for at, cell in enumerate(cells)}
    every: dict[int, list[TrialOutcome]] = {}
    shown: dict[int, list[TrialOutcome]] = {}
    for row in rows:
        every.setdefault(key_of[space.key(row.config)], []).append(row.outcome)
        if row.kind is not MeasurementKind.CONFIRM:
            shown.setdefault(key_of[space.key(row.config)], []).append(row.outcome)
    truth = tuple(every.get(at, [rows[0].outcome])[0] for at in range(len(cells)))
    service = Service(space=space, objective=state.spec.goal, truth=truth, context=ServiceContext(), shown=every)
    reference = key_of[space.key(state.spec.default)]
    last = measured_again(service, shown, np.random.default_rng(0), reference=reference)
    assert any(row.kind is MeasurementKind.CONFIRM for row in rows)
    assert cells[last] == state.recommendation.config
    assert {at: len(each) for at, each in shown.items()} == {at: len(each) for at, each in every.items()}


def test_trials_are_counted_to_the_first_good_one():
    """And one more than there were if there was none; a search that ended early keeps its last regret."""
    curve = Curve(regrets=(0.5, 0.2, 0.04))
    assert (curve.trials_to(0.05), curve.trials_to(0.01), curve.regret_at(9)) == (3, 4, 0.04)


def test_extra_trials_are_taken_seed_by_seed():
    """Misled minus cold, of the same seed; without that seed there is nothing to say."""
    slow, fast = (Curve(regrets=(0.5,) * n + (0.0,)) for n in (3, 1))
    cold = Searching("synthetic-cold", lambda: synthetic.suite("cold"))
    misled = Searching("synthetic-negated", lambda: synthetic.suite("negated"), cold)
    with misled.session(lambda _: None):
        cold.played["plait"] = {4: [fast]}
        found = {reading.metric: reading.value for reading in misled.readings("plait", 4, [slow])}
        assert found["extra_trials_to_5pct"] == 2.0
        assert "extra_trials_to_5pct" in misled.metrics
        assert "extra_trials_to_5pct" not in {reading.metric for reading in misled.readings("plait", 5, [slow])}


def test_foreign_folders_are_refused(tmp_path: Path):
    """With the folder's name."""
    with pytest.raises(BenchError, match=str(tmp_path)):
        falcon_suite(tmp_path)
    (tmp_path / "falcon" / "sources").mkdir(parents=True)
    header = "batchsize,cpus,gpumem,gpupower,gputype,norm.(rps/budget)"
    (tmp_path / "falcon" / "sources" / "reg-x.csv").write_text(f"{header}\n4,1,0.8,50,M60,0.2\n")
    with pytest.raises(BenchError, match="1440 configurations"):
        falcon_suite(tmp_path)
