"""The tuner's benchmark: tables, protocols, tests and rows, on tiny data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait_autoconfig.designers.random import RandomDesigner
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.rows import dump_lines
from plait_autoconfig.space import Space
from plait_autoconfig.values import FailureKind, Trial, TrialOutcome
from plait_bench import autoconfig
from plait_bench.autoconfig import falcon, llm_pilot, synthetic
from plait_bench.autoconfig.play import Curve, play
from plait_bench.autoconfig.searching import Searching
from plait_bench.autoconfig.tables import recorded_runs, recorded_suites
from plait_bench.autoconfig.tasks import Service, TuningTask
from plait_bench.errors import BenchError
from plait_bench.paired import critical_distance, mean_ranks, p_better, p_not_worse, sign_flip_p
from plait_bench.runner import RunPlan, run
from support.bench import calm

SPACE = Space(
    (
        IntKnob(name="threads", low=1, high=4),
        ChoiceKnob(name="batch", values=(1, 4), ordered=True),
    )
)
SPACES = {"one": SPACE, "two": SPACE}


def recorded(folder: Path, *, leave_out: int = 0, **changes: Any) -> Path:
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
        run = LibraryRun(run_id=name, service="tiny", trials=kept, goals=("max goodput_per_cost",))
        runs.append(replace(run, **changes))
    path = folder / "tiny.jsonl"
    path.write_text("\n".join(dump_lines(runs)))
    return path


def test_recorded_runs_become_a_workload(tmp_path: Path):
    """Each against the other; trials show what was measured, in order; the truth is the mean."""
    (suite,) = recorded_suites(recorded_runs([recorded(tmp_path)]), SPACES)
    assert suite.name == "own-tiny"
    assert [task.name for task in suite.tasks] == ["one", "two"]
    assert [run.run_id for run in suite.tasks[0].library] == ["two"]
    service = suite.tasks[0].service
    at = service.index[service.space.key({"threads": 3, "batch": 4})]
    rng = np.random.default_rng(0)
    shown = [service.show(at, repeat, rng).metrics["goodput_per_cost"] for repeat in (0, 1, 2)]
    assert shown == pytest.approx([5.4, 7.2, 6.0])
    assert service.truth[at].metrics["goodput_per_cost"] == pytest.approx(6.2)
    assert service.regret(at) == pytest.approx(0.0)
    assert service.regret(service.index[service.space.key({"threads": 4, "batch": 4})]) == 1.0


def test_what_the_trials_cannot_tell_apart_ties(tmp_path: Path):
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
        return recorded_suites([run], SPACES)[0].tasks[0].service

    service = service_of(3)
    assert service.tie == pytest.approx(1 - np.exp(-1.96 * 0.03 * (2 / 3) ** 0.5), abs=0.02)
    regrets = {int(cell["threads"]): service.regret(at) for at, cell in enumerate(service.space.cells())}
    assert regrets[2] == regrets[3] == 0.0
    assert regrets[4] == pytest.approx(0.4, abs=0.05)
    assert service_of(3, glitch=31.0).tie == pytest.approx(service.tie, abs=0.02)
    assert service_of(1).tie == 0.0


def test_a_run_with_cells_missing_is_only_a_source(tmp_path: Path):
    """Its optimum is not known."""
    (suite,) = recorded_suites(recorded_runs([recorded(tmp_path, leave_out=3)]), SPACES)
    (task,) = suite.tasks
    assert task.name == "one"
    assert [len(run.trials) for run in task.library] == [5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"goals": ("best",)}, "'one' cannot be read: the goal 'best'"),
        ({"goals": ()}, "'one' cannot be read: the goal ''"),
        (
            {"trials": (Trial(number=0, config={"threads": 9, "batch": 1}, outcome=TrialOutcome.measured(x=1.0)),)},
            "threads",
        ),
    ],
)
def test_recorded_runs_that_can_not_be_judged_are_refused(tmp_path: Path, changes: dict[str, Any], said: str):
    """The message names the run and what is wrong."""
    with pytest.raises(BenchError, match=said):
        recorded_suites(recorded_runs([recorded(tmp_path, **changes)]), SPACES)


def test_a_file_that_is_no_library_is_refused_by_name(tmp_path: Path):
    """And so is a run of a space that nobody knows."""
    path = recorded(tmp_path)
    with pytest.raises(BenchError, match="no space is known for the recorded run 'two'"):
        recorded_suites(recorded_runs([path]), {"one": SPACE})
    path.write_text("cake\nmore\n")
    with pytest.raises(BenchError, match=r"tiny\.jsonl is no library"):
        recorded_runs([path])


def test_the_whole_benchmark_runs_on_recorded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows for each designer and metric, ratios of ours to the others, and paired tests."""
    monkeypatch.setattr(autoconfig, "_spaces", lambda: SPACES)
    benchmark = autoconfig.benchmark(only=["own-tiny"], recorded=[recorded(tmp_path)])
    plan = RunPlan(rounds=2, systems=("plait", "random", "portfolio"))
    (result,) = run(benchmark, plan, say=lambda _: None, look=calm)
    assert sum(row.value for row in result.rows if row.metric == "rank") == pytest.approx(1 + 2 + 3)
    rows = {(row.system, row.metric): row for row in result.rows}
    assert rows["plait", "regret_at_5"].value <= rows["random", "regret_at_1"].value
    assert rows["plait", "trials_to_5pct"].n == 2
    assert rows["plait", "pretrain_s"].value > 0
    assert ("plait/random", "trials_to_5pct_p_better") in rows
    optimum = rows["two", "optimum"]
    assert optimum.value == pytest.approx(3 * 6.2)
    assert optimum.p20 < optimum.value < optimum.p80
    assert optimum.n == 3
    assert set(result.ratios) == {"own-tiny:trials_to_5pct:plait/random", "own-tiny:trials_to_5pct:plait/portfolio"}


def test_without_data_the_published_tables_are_left_out():
    """With the reason; and a workload that does not exist is refused by name."""
    (result,) = run(autoconfig.benchmark(only=["falcon"]), RunPlan(rounds=1), say=lambda _: None, look=calm)
    assert "--data" in result.left_out["falcon"]
    with pytest.raises(BenchError, match="no workload 'cake'"):
        autoconfig.benchmark(only=["cake"])
    with pytest.raises(BenchError, match="no system 'cake'"):
        list(run(autoconfig.benchmark(only=["synthetic"]), RunPlan(rounds=1, systems=("cake",)), say=lambda _: None))


def test_synthetic_services_are_what_they_say():
    """Three cells in ten fail; every service is new once; equal seeds make equal families."""
    with_library, cold, misled = (synthetic.suite(family) for family in ("", "cold", "negated"))
    for task in with_library.tasks:
        assert np.mean(task.service.values == 0.0) == pytest.approx(0.3, abs=0.02)
    assert not cold.tasks[0].library
    assert len(misled.tasks[0].library) == len(with_library.tasks[0].library) == len(with_library.tasks) - 1 > 3
    for task in with_library.tasks:
        assert task.name not in {run.service for run in task.library}
    again = synthetic.suite().tasks[0].service
    assert again.truth == with_library.tasks[0].service.truth


def liking(family: str) -> float:
    """How well the values of the first past job agree with the truth of its service (rank correlation)."""
    suite = synthetic.suite(family)
    (run,) = [each for each in suite.tasks[0].library if each.service == suite.tasks[1].name]
    service = suite.tasks[1].service
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
    metrics = [trial.outcome.metrics for run in suite.tasks[0].library for trial in run.trials]
    values = [each["goodput_per_cost"] for each in metrics if each]
    assert max(values) > 10 * max(task.service.values.max() for task in suite.tasks)


def test_every_designer_gets_the_same_number_of_searches():
    """The slow ones, too."""
    assert Searching("synthetic", synthetic.suite).rounds == {}


def test_a_search_is_judged_on_the_truth():
    """What is shown is noisy; regret is that of the configuration that would be applied, and never a lucky value."""
    task = synthetic.suite("cold").tasks[0]

    def make(task: TuningTask, seed: int) -> RandomDesigner:
        return RandomDesigner(task.service.space, task.service.objective, seed=seed)

    curve = play(make, task, seed=0, trials=12)
    assert curve.regrets == play(make, task, seed=0, trials=12).regrets
    assert len(curve.regrets) == 12
    assert all(0.0 <= each <= 1.0 for each in curve.regrets)
    assert curve.bad_between(1, 12) == sum(curve.bad)


def test_trials_are_counted_to_the_first_good_one():
    """And one more than there were if there was none; a search that ended early keeps its last regret."""
    curve = Curve(regrets=(0.5, 0.2, 0.04), bad=(False, True, False), ask_s=(0.1, 0.1, 0.1))
    assert (curve.trials_to(0.05), curve.trials_to(0.01), curve.regret_at(9)) == (3, 4, 0.04)


def test_mean_ranks_and_their_critical_distance():
    """Ties share ranks; the distance is that of Demsar's example: four classifiers, fourteen data sets."""
    assert mean_ranks([[1.0, 5.0], [1.0, 6.0], [3.0, 4.0]]) == [1.75, 2.25, 2.0]
    assert critical_distance(4, 14) == pytest.approx(1.25, abs=0.005)


def test_sign_flips_have_the_false_alarm_rate_that_they_claim():
    """Of 400 comparisons of equals at most about 5 % are called better (6 standard errors: one failure in 10^9)."""
    rng = np.random.default_rng(0)
    alarms = sum(sign_flip_p(rng.standard_normal(8)) <= 0.05 for _ in range(400))
    assert alarms / 400 <= 0.05 + 6 * (0.05 * 0.95 / 400) ** 0.5
    assert sign_flip_p([-1.0] * 6) == pytest.approx(1 / 64)
    assert p_better([1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3]) < 0.05
    assert p_not_worse([2.0] * 6, [2.0] * 6, 1.0) < 0.05
    assert p_not_worse([3.0] * 6, [2.0] * 6, 1.0) == 1.0
    assert sign_flip_p([]) == 1.0


def test_extra_trials_are_taken_seed_by_seed():
    """Misled minus cold, of the same seed; without that seed there is nothing to say."""
    slow, fast = (Curve(regrets=(0.5,) * n + (0.0,), bad=(False,) * (n + 1), ask_s=(0.0,)) for n in (3, 1))
    cold = Searching("synthetic-cold", lambda: synthetic.suite("cold"))
    misled = Searching("synthetic-negated", lambda: synthetic.suite("negated"), cold=cold)
    with misled.session(lambda _: None):
        cold.played["plait"] = {4: [fast]}
        found = {reading.metric: reading.value for reading in misled.readings("plait", 4, [slow])}
        assert found["extra_trials_to_5pct"] == 2.0
        assert "extra_trials_to_5pct" in misled.metrics
        assert "extra_trials_to_5pct" not in {reading.metric for reading in misled.readings("plait", 5, [slow])}


PILOT = {
    "expected_predictions_LLM-Pilot.csv": [
        "model,gpu,num_users,median_nttft,median_itl",
        *(f"{m},{g},{u},{u * a},{10 + u * b}" for m, g, a, b in (
            ("small", "1 x T4", 1.0, 0.2), ("small", "1 x A100", 0.5, 0.1),
            ("large", "1 x T4", 200.0, 9.0), ("large", "1 x A100", 2.0, 1.0),
        ) for u in (1, 2, 4, 8, 16, 32, 64, 128)),
    ],
    "prices.csv": ["GPU,price", "1 x T4,1", "1 x A100,3", ","],
    "llm_features.csv": [
        "model,model_n_parameters,model_n_layers,model_n_heads,model_is_flash_attention,model_is_encoder_decoder,"
        "model_torch_dtype", "small,1,12,8,TRUE,FALSE,float16", "large,9,48,32,FALSE,FALSE,float32",
    ],
    "gpu_features.csv": ["gpu,gpu_n_gpus", "1 x T4,1", "1 x A100,1"],
}  # fmt: skip


def pilot(folder: Path) -> llm_pilot.PilotData:
    """Two models on two profiles, in the form of the publication."""
    for name, lines in PILOT.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    return llm_pilot.read(folder)


def test_the_published_protocol_scores_recommendations(tmp_path: Path):
    """Enough pods at the lowest price: 1. Too few: a failure. Too many: overspend."""
    data = pilot(tmp_path)
    users = {m: {g: llm_pilot.users_at_slo(points) for g, points in by.items()} for m, by in data.curves.items()}
    assert users == {"small": {"1 x T4": 64, "1 x A100": 128}, "large": {"1 x T4": 0, "1 x A100": 32}}
    right = {"small": llm_pilot.Advice(profile="1 x T4", pods=4), "large": llm_pilot.Advice(profile="1 x A100", pods=7)}
    assert llm_pilot.so_score(data, right) == pytest.approx(1.0)
    few = {**right, "large": llm_pilot.Advice(profile="1 x A100", pods=6)}
    assert llm_pilot.so_score(data, few) == pytest.approx(2 * 0.5 / 1.5)
    dear = {**right, "small": llm_pilot.Advice(profile="1 x A100", pods=2)}
    assert llm_pilot.so_score(data, dear) == pytest.approx(2 * 0.75 / 1.75)
    assert llm_pilot.so_score(data, dict.fromkeys(right)) == 0.0
    assert llm_pilot.score_of_regrets([0.0, 1.0]) == pytest.approx(2 * 0.5 / 1.5)
    assert llm_pilot.best_static(data, ["small", "large"]) >= 0.66


def test_profiles_become_a_space_of_measured_ones(tmp_path: Path):
    """Only what was measured is on offer, and what cannot hold one user is infeasible."""
    suite = llm_pilot.suite(pilot(tmp_path))
    large = next(task.service for task in suite.tasks if task.name == "large")
    offered = [f"{cell['count']} x {cell['accelerator']}" for cell in large.space.cells()]
    assert offered == ["1 x T4", "1 x A100"]
    assert large.values.tolist() == [0.0, pytest.approx(1 / 21)]


def test_foreign_folders_are_refused(tmp_path: Path):
    """With the folder's name."""
    for read in (falcon.suite, llm_pilot.read):
        with pytest.raises(BenchError, match=str(tmp_path)):
            read(tmp_path)
    (tmp_path / "sources").mkdir()
    header = "batchsize,cpus,gpumem,gpupower,gputype,norm.(rps/budget)"
    (tmp_path / "sources" / "reg-x.csv").write_text(f"{header}\n4,1,0.8,50,M60,0.2\n")
    with pytest.raises(BenchError, match="1440 configurations"):
        falcon.suite(tmp_path)
