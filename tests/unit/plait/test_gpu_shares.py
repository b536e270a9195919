"""What of a GPU each replica gets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from plait.config import PlaitConfig
from plait.deployments import deployments
from plait.errors import PlaitError
from plait.gpu_shares import placement_line, pods_with_gpus, running_cluster, with_gpus
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, task_of
from plait_serving.deployments import ray_internals
from support.tensor_headers import write_header

GB = 10**9
SIZES = {"base": 7 * GB, "edges": GB, "depth": 2 * GB}
RANKING = {"models": {"shop": {"folder": "./shop"}, "small": {"folder": "./small", "mode": "whole"}}}


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Models of these sizes in float16; their tensors take no room on the disk."""
    for name, nbytes in SIZES.items():
        write_header(tmp_path / name / "unet" / "model.safetensors", {"w": nbytes})
    return tmp_path


def config_of(folders: Path, *, recommend: Any = RANKING, **images: Any) -> PlaitConfig:
    """A base model with two ControlNets, and two ranking models."""
    nets = {name: {"folder": str(folders / name)} for name in ("edges", "depth")}
    given = {"model": str(folders / "base"), "controlnets": nets, **images}
    return PlaitConfig.model_validate({"images": given, "recommend": recommend})


def cluster(*gpus: int, model: str = "") -> ClusterState:
    """Nodes with so many GPUs."""
    return ClusterState(
        [ClusterNode(name=str(i), cpu_milli=0, memory_mib=0, gpus=n, gpu_model=model) for i, n in enumerate(gpus)]
    )


def shares(config: PlaitConfig, *gpus: int, model: str = "") -> dict[str, float]:
    """What a replica of each deployment asks Ray for."""
    rows = deployments(with_gpus(config, cluster(*gpus, model=model)))
    return {row.name: row.num_gpus for row in rows if row.num_gpus}


ALL = {"engine", "controlnet-edges", "controlnet-depth", "hn-shop", "whole-small"}


def test_without_a_gpu_everything_runs_on_cpus(folders: Path) -> None:
    """By name: Ray does not hide GPUs from a replica that asks for none."""
    config = with_gpus(config_of(folders), cluster(0))
    rows = {row.name: row for row in deployments(config)}
    assert {row.num_gpus for row in rows.values()} == {0.0}
    assert rows["engine"].args["source"].keywords["images"].device == "cpu"
    assert rows["controlnet-edges"].args["device"] == "cpu"
    assert rows["hn-shop"].args["device"] == rows["whole-small"].args["device"] == "cpu"


def test_with_enough_each_has_its_own(folders: Path) -> None:
    """And replicas count."""
    assert shares(config_of(folders), 8) == dict.fromkeys(ALL, 1.0)
    assert shares(config_of(folders, replicas=4), 4, 4) == dict.fromkeys(ALL, 1.0)
    rows = {row.name: row for row in deployments(with_gpus(config_of(folders), cluster(8)))}
    assert rows["engine"].args["source"].keywords["images"].device == rows["controlnet-edges"].args["device"] == "auto"


def test_one_gpu_is_shared_by_what_replicas_hold(folders: Path) -> None:
    """Weights and room to work; together at most the device."""
    found = shares(config_of(folders), 1)
    assert set(found) == ALL
    assert 0.98 < sum(found.values()) <= 1.0
    assert found["engine"] > found["controlnet-depth"] > found["controlnet-edges"] > found["hn-shop"]


@pytest.mark.parametrize("gpus", [(1,), (2,), (3,), (2, 1), (8,)])
@pytest.mark.parametrize("replicas", [1, 3])
def test_whatever_the_order_every_replica_has_room(folders: Path, gpus: tuple[int, ...], replicas: int) -> None:
    """Serve starts them in any, and Ray takes the fullest device with room."""
    config = with_gpus(config_of(folders, replicas=replicas), cluster(*gpus))
    tasks = [
        task_of(row.name, num_cpus=0, num_gpus=row.num_gpus)
        for row in deployments(config)
        for _ in range(row.max_replicas if row.num_gpus else 0)
    ]
    for order in itertools.islice(itertools.permutations(tasks), 0, None, 7 if len(tasks) > 5 else 1):
        state = cluster(*gpus)
        for task in order:
            at = state.first_fit(task)
            assert at is not None, (gpus, [it.gpu_milli for it in order])
            state.place(task, at)


def test_what_was_given_is_kept_and_0_means_a_cpu(folders: Path) -> None:
    """The others get what is left."""
    found = shares(config_of(folders, num_gpus=0.5, recommend=None), 1)
    assert found["engine"] == 0.5
    assert sum(found.values()) <= 1.0
    assert set(shares(config_of(folders, num_gpus=0), 1)) == ALL - {"engine"}
    assert set(shares(config_of(folders, device="cpu"), 1)) == {"hn-shop", "whole-small"}
    assert set(shares(config_of(folders, device="cuda:1"), 2)) == {"hn-shop", "whole-small"}


@pytest.mark.parametrize(
    ("images", "gpus", "model", "said"),
    [
        ({"num_gpus": 1}, (0,), "", "there are 0 GPUs, and num_gpus asks for more: engine 1 x 1; set num_gpus: 0"),
        ({"num_gpus": 2}, (1, 1), "", "there are 2 GPUs, and num_gpus asks for more: engine 1 x 2"),
        ({"num_gpus": 1, "replicas": 2}, (1,), "", "there are 1 GPUs, and num_gpus asks for more: engine 2 x 1"),
        ({"num_gpus": 1.5}, (2,), "", "engine: 1.5 GPUs; above 1 Ray takes whole numbers only"),
        ({"num_gpus": 1}, (1,), "", "1 deployments have taken theirs, and what can use one does not fit"),
        ({}, (1,), "P4", "there are 1 GPUs of 8 GB, and what can use one does not fit: engine 1 x 7.6 GB, "),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    folders: Path, images: dict[str, Any], gpus: tuple[int, ...], model: str, said: str
) -> None:
    """Before anything is deployed: a replica without room would wait for ever."""
    with pytest.raises(PlaitError) as caught:
        with_gpus(config_of(folders, **images), cluster(*gpus, model=model))
    assert said in str(caught.value)


def test_the_line_says_where_everything_runs(folders: Path) -> None:
    """As it is printed at the start, and by --show-deployments."""
    state = cluster(8, model="H100")
    rows = deployments(with_gpus(config_of(folders, replicas=2, recommend=None), state))
    assert placement_line(rows, state) == (
        "on 8 GPU(s) (H100): engine 2 x 1, controlnet-edges 1 x 1, controlnet-depth 1 x 1; on CPUs: ingress"
    )
    assert placement_line(deployments(config_of(folders, recommend=None)), None).startswith("no GPU; on CPUs: ingress")


def test_pods_have_gpus_once_something_asks_for_one(folders: Path) -> None:
    """Then a ControlNet that says nothing is on one of them, too, and not on a CPU in float16."""
    assert pods_with_gpus(config_of(folders)) is None
    config = config_of(folders, num_gpus=1, recommend=None)
    found = with_gpus(config, pods_with_gpus(config))
    assert {row.name: row.num_gpus for row in deployments(found)} == {
        "ingress": 0.0, "engine": 1.0, "controlnet-edges": 1.0, "controlnet-depth": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(("most", "gpus"), [(3, 6), (-1, 512), (0, 1)])
def test_nodes_that_an_autoscaler_may_add_count(monkeypatch: pytest.MonkeyPatch, most: int, gpus: int) -> None:
    """Of a cluster that has one GPU so far."""
    ray = pytest.importorskip("ray")
    group = ray.core.generated.autoscaler_pb2.NodeGroupConfig(name="gpus", resources={"GPU": 2}, max_count=most)
    config = ray.core.generated.autoscaler_pb2.ClusterConfig(node_group_configs=[group])
    here = {"NodeID": "ab" * 28, "Alive": True, "Resources": {"GPU": 1.0}}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [here])
    monkeypatch.setattr(ray._private.state.state, "get_cluster_config", lambda: config)
    found = running_cluster()
    assert found is not None
    assert int(found.gpus.sum()) == gpus
    assert ray_internals.node_groups()[0][1] == 2
