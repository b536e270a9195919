"""Cluster files, plans and their drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from plait_deploy.errors import ClusterError, PlacementError, TaskError
from plait_deploy.placement.cluster_file import parse_cluster
from plait_deploy.placement.drawing import DRAWN_NODES, draw
from plait_deploy.placement.plan import plan
from plait_deploy.placement.policies import make_policy
from plait_deploy.placement.state import ClusterState
from plait_deploy.placement.values import ClusterNode, Demand, Task, demand_classes, task_of

GROUP = {"name": "g", "cpus": 16, "memory_gib": 64, "gpus": 2, "gpu_model": "L4"}


def test_a_cluster_file_is_read():
    """Groups are numbered, and what others hold is taken on each node."""
    state = parse_cluster(
        {
            "nodes": [
                {**GROUP, "count": 2, "used": {"cpus": 4, "memory_gib": 16, "gpus": [0.25]}},
                {"name": "h", "cpus": 0.5, "memory_gib": 1},
            ],
            "totals": {"nodes": 3, "cpus": 32.5, "memory_gib": 129, "gpus": 4},
        }
    )
    assert [node.name for node in state.nodes] == ["g-1", "g-2", "h"]
    assert state.devices.tolist() == [[750, 1000], [750, 1000], [0, 0]]
    assert state.cpu.tolist() == [12_000, 12_000, 500]
    assert state.memory.tolist() == [48 * 1024, 48 * 1024, 1024]


def test_parts_of_a_core_and_of_a_gib_are_what_the_file_says():
    """Though no float is exactly 64.1: a replica of that many cores fits, and totals are of the numbers as written."""
    nodes = [
        {"name": "g", "count": 3, "cpus": 64.1, "memory_gib": 0.3},
        {"name": "h", "cpus": 96.4, "memory_gib": 0.7, "used": {"cpus": 32.3}},
    ]
    state = parse_cluster({"nodes": nodes, "totals": {"cpus": 288.7, "memory_gib": 1.6}})
    assert state.cpu.tolist() == [64_100] * 4
    assert state.roomy(task_of("a", num_cpus=64.1, num_gpus=0)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "the cluster: must be a valid mapping, not None"),
        ({"nodes": []}, "nodes: .*at least 1 item"),
        ({"nodes": "g"}, "nodes: must be a list, not 'g'"),
        ({"nodes": [GROUP], "racks": 2}, "racks: unknown key"),
        ({"nodes": [GROUP], 2: 2}, "2: "),
        ({"nodes": [{**GROUP, "gpu": 2}]}, r"nodes\.0\.gpu: unknown key"),
        ({"nodes": [{**GROUP, "cpus": "many"}]}, r"nodes\.0\.cpus: must be a valid number, not 'many'"),
        ({"nodes": [{**GROUP, "cpus": True}]}, r"nodes\.0\.cpus: must be a valid number"),
        ({"nodes": [{**GROUP, "cpus": float("nan")}]}, r"nodes\.0\.cpus: must be"),
        ({"nodes": [{**GROUP, "gpus": 1.5}]}, r"nodes\.0\.gpus: must be a valid integer"),
        ({"nodes": [{**GROUP, "gpus": 65}]}, r"nodes\.0\.gpus: must be less than or equal to 64"),
        ({"nodes": [{**GROUP, "count": 0}]}, r"nodes\.0\.count: must be greater than or equal to 1"),
        ({"nodes": [{**GROUP, "gpus": 0}]}, "gpu_model L4, but no gpus"),
        ({"nodes": [{"name": "g", "cpus": 1}]}, r"nodes\.0\.memory_gib: field required"),
        ({"nodes": [{**GROUP, "name": ""}]}, r"nodes\.0\.name"),
        ({"nodes": [GROUP, GROUP]}, "two nodes are named g"),
        ({"nodes": [{**GROUP, "count": 20_000}, {**GROUP, "name": "h"}]}, "more than 20000 nodes"),
        ({"nodes": [GROUP], "totals": {"gpus": 3}}, "totals.gpus is 3, but the nodes add up to 2"),
        ({"nodes": [GROUP], "totals": {"cores": 3}}, "totals.cores.*: must be 'nodes', 'cpus', "),
        ({"nodes": [{**GROUP, "used": {"cpus": 17}}]}, r"nodes\.0: used: more than a node has"),
        ({"nodes": [{**GROUP, "used": {"gpus": [1, 1, 1]}}]}, "3 devices of 2"),
        ({"nodes": [{**GROUP, "used": {"gpus": [1.5]}}]}, r"used\.gpus\.0: must be less than or equal to 1, not 1.5"),
        ({"nodes": [{**GROUP, "used": {"gpus": 1}}]}, r"used\.gpus: must be a list"),
        ({"nodes": [{**GROUP, "used": {"gpus": [-1]}}]}, r"used\.gpus\.0: must be greater than or equal to 0"),
    ],
)
def test_a_description_that_does_not_add_up_is_one_sentence(data, sentence):
    """It names the group and what is wrong."""
    with pytest.raises(ClusterError, match=sentence) as caught:
        parse_cluster(data)
    assert "\n" not in str(caught.value)


def test_resources_become_tasks():
    """Thousandths, rounded up; what Ray refuses is refused."""
    assert task_of("a", num_cpus=0.1, num_gpus=0) == Task(cpu_milli=100)
    assert task_of("a", num_cpus=1 / 3, num_gpus=1 / 3) == Task(cpu_milli=334, gpus=1, gpu_milli=334)
    assert task_of("a", num_cpus=2, num_gpus=2.0) == Task(cpu_milli=2_000, gpus=2, gpu_milli=1_000)
    with pytest.raises(TaskError, match=r"shop: 1\.5 GPUs"):
        task_of("shop", num_cpus=1, num_gpus=1.5)


def demand(name: str, replicas: int, *, cpus: float = 1, gpus: float = 0) -> Demand:
    """Replicas with these resources."""
    return Demand(name=name, task=task_of(name, num_cpus=cpus, num_gpus=gpus), replicas=replicas)


@pytest.fixture
def state() -> ClusterState:
    """Two nodes of two GPUs."""
    return parse_cluster({"nodes": [{**GROUP, "count": 2}]})


def test_stranded_is_what_the_average_replica_could_not_use(state):
    """0.4 beside each 0.6: of no use for another 0.6."""
    demands = [demand("a", 4, gpus=0.6), demand("idle", 1)]
    made = plan(state, demands, make_policy("plait", demand_classes(demands)))
    assert made.before.stranded == 0
    assert made.after.idle == made.after.stranded == pytest.approx(1.6)


def test_nothing_to_place_is_a_sentence(state):
    """An empty configuration is a mistake."""
    with pytest.raises(PlacementError, match="no replica"):
        plan(state, [demand("a", 0)], make_policy("first-fit", ()))


SVG = "{http://www.w3.org/2000/svg}"


def test_the_drawing_shows_every_node_and_demand():
    """It is XML, has a title for each node, a colour for each demand, and names are escaped."""
    state = parse_cluster(
        {"nodes": [{**GROUP, "count": 2, "used": {"gpus": [0.5]}}, {"name": "h", "cpus": 4, "memory_gib": 1}]}
    )
    demands = [demand("a<b&c", 3, gpus=0.5), demand("c", 2), demand("d", 9, gpus=1)]
    made = plan(state, demands, make_policy("plait", demand_classes(demands)))
    root = ET.fromstring(draw(state, made, title="x & y"))
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert [title.split(":")[0] for title in titles] == ["g-1", "g-2", "h"]
    texts = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert "x & y" in texts
    assert any(text.startswith("a<b&c") for text in texts)
    assert any("not placed" in text for text in texts if text.startswith("d"))
    box = [float(number) for number in root.attrib["viewBox"].split()]
    for rect in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert width >= 0
        assert height >= 0
        assert x + width <= box[2] + 0.1
        assert y + height <= box[3] + 0.1


def test_a_large_cluster_is_drawn_in_part():
    """And the drawing says so; it stays small enough for a browser."""
    state = ClusterState(
        [ClusterNode(name=str(at), cpu_milli=1_000, memory_mib=0, gpus=4) for at in range(DRAWN_NODES + 9)]
    )
    demands = [demand("a", 700, cpus=0.1, gpus=0.6)]
    made = plan(state, demands, make_policy("plait", demand_classes(demands)))
    text = draw(state, made, title="large")
    assert f"The {DRAWN_NODES} of {DRAWN_NODES + 9} nodes" in text
    assert text.count("<g>") == DRAWN_NODES
    assert len(text) < 1_000_000
