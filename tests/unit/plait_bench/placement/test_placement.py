"""The placement benchmark on a made-up data folder: same tasks for all, means over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakes.bench import measured
from plait_bench import placement
from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.placement import filling
from plait_bench.placement.filling import CONTENDERS, PUBLISHED, churn, fill, inflated, load
from plait_bench.runner import BenchResult, RunPlan
from plait_deploy.errors import TaskError
from plait_deploy.placement.policies import POLICIES, make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import WHOLE, ClusterNode, Task, classes_of
from suites.placement_policies import sample_tasks

MODELS = ("G2", "T4", "P100", "G3", "V100M16", "V100M32")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve nodes and three lists."""
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
    return tmp_path


def result(data: Path, *only: str, rounds: int = 2, systems: tuple[str, ...] = ()) -> BenchResult:
    """Run the benchmark."""
    plan = RunPlan(rounds=rounds, systems=systems, trials=1)
    return measured(placement.benchmark(only=only, data=data), plan)


def values(found: BenchResult, workload: str, metric: str) -> dict[str, float]:
    """A metric by system."""
    return {row.system: row.value for row in found.rows if (row.workload, row.metric) == (workload, metric)}


def test_every_policy_plays_on_the_published_lists(data):
    """Shares are modelled."""
    found = result(data, "default")
    means = values(found, "default", "allocated_mean_pct")
    assert set(means) == set(POLICIES)
    assert all(0 < value <= 100 for value in means.values())
    assert {row.kind for row in found.rows} == {"modelled"}
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


def test_departures_are_replayed(data, monkeypatch):
    """In small."""
    monkeypatch.setattr(filling, "LIFETIMES", 2)
    found = result(data, "departures", rounds=1)
    assert set(values(found, "departures", "stranded_pct")) == set(CONTENDERS)


def test_without_data_it_says_what_is_missing(tmp_path, data):
    """The option, the folder, or the column."""
    left = measured(placement.benchmark(only=["default"]), RunPlan(rounds=1)).left_out
    assert left == {"default": "fgd: give --data FOLDER, which has it"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemUnavailable, match="fgd: not in "):
        load("default", tmp_path / "empty")
    (data / "fgd" / "openb_pod_list_default.csv").write_text("name,cpu_milli\na,1\n")
    with pytest.raises(BenchError, match=r"fgd, default: not as published: KeyError"):
        load("default", data)


TASKS = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
b,6000,12288,1,460,V100M16|V100M32,LS
a,8000,30517,0,0,,BE
"""


def test_lists_are_read_by_name(data):
    """A specification may name several models; a number that is none, what no task may ask for and columns that are
    missing are told."""
    path = data / "fgd" / "openb_pod_list_default.csv"
    path.write_text(TASKS)
    nodes, tasks = load("default", data)
    assert nodes[0] == ClusterNode(name="n0", cpu_milli=64_000, memory_mib=400_000, gpus=8, gpu_model="G2")
    assert tasks == [
        Task(cpu_milli=8_000, memory_mib=30_517),
        Task(cpu_milli=6_000, memory_mib=12_288, gpus=1, gpu_milli=460, gpu_models=frozenset({"V100M16", "V100M32"})),
    ]
    for line in ("c,8000,1,two,0,,LS\n", "c,8000,1,2,500,,LS\n", "c,8000\n"):
        path.write_text(TASKS + line)
        with pytest.raises(BenchError, match="not as published"):
            load("default", data)


# ---- replays: what arrives, what departs, and what is counted -------------------------------------------------------

ONE = Task(cpu_milli=0, gpus=1, gpu_milli=WHOLE)
HALF = Task(cpu_milli=0, gpus=1, gpu_milli=600)


def test_inflation_ends_at_the_load():
    """All tasks of the list once, then random ones; one more would pass 130 %."""
    tasks = sample_tasks(40, 1)
    total = 4 * sum(task.total_milli for task in tasks)
    found = inflated(tasks, total, 42)
    asked = sum(task.total_milli for task in found)
    assert 1.3 * total - 4 * WHOLE < asked <= 1.3 * total
    assert sorted(map(repr, found[: len(tasks)])) == sorted(map(repr, tasks))
    assert inflated(tasks, total, 42) == found != inflated(tasks, total, 43)


def test_a_list_that_asks_for_more_is_cut():
    """Down to the load, as the published simulator does."""
    found = inflated([ONE] * 100, 10 * WHOLE, 42)
    assert len(found) == 13


def test_a_list_without_gpus_has_no_load():
    """It would be inflated for ever."""
    with pytest.raises(TaskError):
        inflated([Task(cpu_milli=1)], 1000, 42)


def test_what_is_counted_is_what_is_there():
    """Two devices, three tasks of 0.6: one is refused, 0.8 are idle, and none of it is of use."""
    state = ClusterState([ClusterNode(name="a", cpu_milli=0, memory_mib=0, gpus=2)])
    ended = fill(state, [HALF] * 3, make_policy("first-fit", ()), classes_of([HALF, Task(cpu_milli=1)]))
    assert ended.allocated == pytest.approx(0.6)
    assert ended.stranded == pytest.approx(0.4)


def test_departures_keep_the_load():
    """Whole GPUs on a large cluster at 60 %: the mean over time is the load (5 sd)."""
    state = ClusterState([ClusterNode(name=str(at), cpu_milli=0, memory_mib=0, gpus=8) for at in range(50)])
    classes = classes_of([ONE])
    ended = churn(state, [ONE], make_policy("plait", classes), classes, seed=1, load=0.6, arrivals=4_000)
    # 400 GPUs, 240 in use: sd of a Poisson mean over 8 lifetimes, 2 relaxation times each way.
    assert ended.allocated == pytest.approx(0.6, abs=5 * (2 * 240 / 8) ** 0.5 / 400)
    assert ended.stranded == 0
