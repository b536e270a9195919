"""The placement benchmark on a made-up data folder: same tasks for all, means over seeds, the published beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait_bench import placement
from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.placement import departing, growing, recommending
from plait_bench.placement.lists import CONTENDERS, MADE, PUBLISHED, load, published_means
from plait_bench.runner import BenchResult, RunPlan, joined, run
from plait_deploy.placement.policies import POLICIES
from plait_deploy.placement.testing import sample_tasks
from plait_deploy.placement.values import Task

MODELS = ("G2", "T4", "P100", "G3", "V100M16", "V100M32")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve nodes, three lists and what was "published" for two seeds."""
    folder = tmp_path / "fgd"
    folder.mkdir()
    nodes = [f"n{at},64000,400000,{(8, 4, 2)[at % 3]},{MODELS[at % 6]}" for at in range(12)]
    (folder / "openb_node_list_gpu_node.csv").write_text(
        "\n".join(["sn,cpu_milli,memory_mib,gpu,model", *nodes]) + "\n"
    )
    for number, name in enumerate(PUBLISHED):
        tasks = [
            f"p{at},{task.cpu_milli},{task.memory_mib},{task.gpus},{task.gpu_milli},"
            for at, task in enumerate(sample_tasks(60, number))
        ]
        head = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec"
        (folder / f"openb_pod_list_{name}.csv").write_text("\n".join([head, *tasks]) + "\n")
    rows = [f"openb_pod_list_default,06-FGD,{seed},{value}" for seed, value in ((42, 95.0), (43, 96.0))]
    text = "\n".join(["workload,policy,seed,alloc_pct_at_130", *rows, "openb_pod_list_cpu050,06-FGD,42,90.0"])
    (folder / "published_allocation.csv").write_text(text + "\n")
    return tmp_path


def result(data: Path, *only: str, rounds: int = 2, systems: tuple[str, ...] = ()) -> BenchResult:
    """Run the benchmark."""
    plan = RunPlan(rounds=rounds, systems=systems, trials=1)
    return joined(list(run(placement.benchmark(only=only, data=data), plan, say=lambda _: None)))


def values(found: BenchResult, workload: str, metric: str) -> dict[str, float]:
    """A metric by system."""
    return {row.system: row.value for row in found.rows if (row.workload, row.metric) == (workload, metric)}


def test_every_policy_plays_on_the_published_lists(data):
    """Shares are modelled, times measured; the published mean stands beside the policy that it is of."""
    found = result(data, "default")
    means = values(found, "default", "allocated_mean_pct")
    assert set(means) == set(POLICIES)
    assert all(0 < value <= 100 for value in means.values())
    assert values(found, "default", "published_mean_pct") == {"fgd": 95.5}
    kinds = {row.metric: row.kind for row in found.rows}
    assert (kinds["allocated_pct"], kinds["run_s"], kinds["allocated_mean_pct"]) == ("modelled", "measured", "modelled")
    assert found.ratios == {}


def test_a_round_is_a_seed(data):
    """The mean is that of the rounds, and another run gives the same."""
    one, two = (result(data, "cpu050", systems=("plait", "random")) for _ in range(2))
    for system in ("plait", "random"):
        rows = {row.metric: row for row in one.rows if row.system == system}
        shares = rows["allocated_pct"].rounds
        assert rows["allocated_mean_pct"].value == pytest.approx(sum(shares) / 2)
        assert len(set(shares)) == 2
    assert values(one, "cpu050", "allocated_mean_pct") == values(two, "cpu050", "allocated_mean_pct")


@pytest.mark.parametrize("name", MADE)
def test_made_lists_are_others_and_always_the_same(data, name):
    """They can be replayed, and differ from what they were made from."""
    made = load(name, data).tasks
    assert made == load(name, data).tasks
    assert made != load("default", data).tasks
    assert set(values(result(data, name, rounds=1), name, "allocated_pct")) == set(CONTENDERS)


def test_what_the_made_lists_are_for(data):
    """More CPU tasks, more CPU, more GPUs each, other parts, named models."""
    base = load("default", data).tasks

    def share(tasks: tuple[Task, ...], of) -> float:
        return sum(map(of, tasks)) / len(tasks)

    assert share(load("cpu-tasks", data).tasks, lambda task: not task.gpus) > share(base, lambda task: not task.gpus)
    assert share(load("hungry", data).tasks, lambda task: task.cpu_milli) > share(base, lambda task: task.cpu_milli)
    assert share(load("multi-gpu", data).tasks, lambda task: task.gpus) > share(base, lambda task: task.gpus)
    assert len({task.gpu_milli for task in load("shifted", data).tasks}) > len({task.gpu_milli for task in base})
    assert any(len(task.gpu_models) == 2 for task in load("picky", data).tasks)


def test_departures_and_growth_are_measured(data, monkeypatch):
    """Both in small."""
    monkeypatch.setattr(departing, "LIFETIMES", 2)
    monkeypatch.setattr(growing, "SIZES", (12, 24))
    monkeypatch.setattr(growing, "DECISIONS", 50)
    found = result(data, "departures", "nodes", rounds=1)
    assert set(values(found, "departures", "stranded_pct")) == set(CONTENDERS)
    assert set(values(found, "nodes-24", "decision_us")) == {"plait", "fgd", "first-fit"}
    assert all(value > 0 for value in values(found, "nodes", "growth").values())


def test_without_data_it_says_what_is_missing(tmp_path, data):
    """The option, the folder, or the column."""
    left = joined(list(run(placement.benchmark(only=["default"]), RunPlan(rounds=1), say=lambda _: None))).left_out
    assert left == {"default": "placement needs the folder with the published lists (--data)"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemUnavailable, match="has no folder fgd"):
        placement.benchmark(data=tmp_path / "empty")
    (data / "fgd" / "openb_pod_list_default.csv").write_text("name,cpu_milli\na,1\n")
    with pytest.raises(BenchError, match="lacks the column memory_mib"):
        load("default", data)
    (data / "fgd" / "published_allocation.csv").write_text("workload,policy\nopenb_pod_list_default,06-FGD\n")
    with pytest.raises(BenchError, match="not as published"):
        published_means("default", data)


TRACE = (
    "instance_sn,role,app_name,cpu_request,gpu_request,max_instance_per_node,creation_time,scheduled_time,deletion_time"
)


@pytest.fixture
def dlrm(tmp_path: Path) -> Path:
    """Three apps, of which one fits no node."""
    rows = [f"c{at},CN,a,96,0,-1,{at},{at}," for at in range(20)]
    rows += [f"h{at},HN,a,8,1,2,{at},{at}," for at in range(10)]
    rows += [f"d{at},CN,b,48,0,2,{5 * at},{5 * at},{5 * at + 40}" for at in range(10)]
    rows += [f"e{at},HN,b,12,1,4,,,{at + 40}" for at in range(10)]
    rows += ["f0,CN,c,192,0,-1,,,", "f1,HN,c,8,1,-1,,,"]
    folder = tmp_path / "dlrm-v2025"
    folder.mkdir()
    (folder / recommending.FILE).write_text("\n".join([TRACE, *rows]) + "\n")
    return tmp_path


def test_recommendation_is_placed_split_and_monolithic(dlrm):
    """A row for each arrangement and policy; monolithic nodes run out of cores before they run out of GPUs."""
    found = result(dlrm, "dlrm", rounds=1)
    for arrangement in recommending.ARRANGEMENTS:
        assert set(values(found, f"dlrm-{arrangement}", "cores_stranded")) == set(POLICIES)
        assert values(found, f"dlrm-{arrangement}", "covered_pct")["plait"] == pytest.approx(100 * 50 / 52)
    split, whole = (values(found, f"dlrm-{name}", "gpus_stranded") for name in ("split", "monolithic"))
    assert all(split[name] < whole[name] for name in POLICIES)
    kinds = {row.metric: row.kind for row in found.rows}
    assert (kinds["gpus_stranded"], kinds["decision_p99_ms"]) == ("modelled", "measured")


def test_a_trace_of_recommendation_is_needed_and_must_add_up(tmp_path, dlrm):
    """A sentence for the missing folder, and for a column."""
    plan = RunPlan(rounds=1)
    left = joined(list(run(placement.benchmark(only=["dlrm"]), plan, say=lambda _: None))).left_out
    assert left == {"dlrm": "dlrm needs a folder dlrm-v2025 with the public trace in --data"}
    (dlrm / "dlrm-v2025" / recommending.FILE).write_text(TRACE.replace("role,", "") + "\nc0,a,1,0,-1,,,\n")
    with pytest.raises(BenchError, match="lacks the column role"):
        result(dlrm, "dlrm", rounds=1)


def test_an_unknown_workload_is_a_sentence():
    """It says what there is."""
    with pytest.raises(BenchError, match="there is no workload 'philly'; there are default, gpushare100"):
        placement.benchmark(only=["philly"])
