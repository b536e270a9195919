"""The gauges of nodes, against a sum by hand."""

from __future__ import annotations

from plait_deploy.on_ray.gauges import gauges
from plait_deploy.on_ray.nodes import CPUS, DEVICES, GPUS, LABEL, NODE, living_nodes, node_number

FIRST, SECOND, HOST, DEAD = (f"{at}{'0' * 55}" for at in "3579")


def nodes():
    def of(identity, gpus, alive=True):
        resources = {"CPU": 8.0, "memory": 2.0**34, **({"GPU": float(gpus)} if gpus else {})}
        return {"NodeID": identity, "Alive": alive, "Resources": resources, "Labels": {LABEL: "a"}}

    return living_nodes([of(FIRST, 2), of(SECOND, 1), of(HOST, 0), of(DEAD, 8, alive=False)])


def replica(gpus, **where):
    return {CPUS: 1.0, GPUS: gpus, **where}


def values(families):
    return {(it.name, *it.labels.values()): it.value for family in families for it in family.samples}


def test_a_rest_too_small_for_most_replicas_is_stranded_for_them():
    """0.7 are taken of a device: 0.3 are left, which 1 of 4 replicas could use, and whole devices, which all could."""
    elsewhere = [replica(0.7), replica(0.7), replica(0.2)]
    found = values(gauges(nodes(), [replica(0.7, **{NODE: node_number(FIRST), DEVICES: 2.0}), *elsewhere]))
    first, second = ((each[:12], "a") for each in (FIRST, SECOND))
    assert found["plait_node_gpus", *first] == 2
    assert found["plait_node_idle_gpus", *first] == 1.3
    assert found["plait_node_stranded_gpus", *first] == 0.225  # 0.3 x 3/4
    assert (found["plait_node_idle_gpus", *second], found["plait_node_stranded_gpus", *second]) == (1, 0)
    assert len(found) == 6  # neither the host without GPUs nor the dead node


def test_reports_of_different_moments_do_no_harm():
    """Of two replicas on one device, of one on a node that is gone and of one without numbers, what can be is."""
    said = [{NODE: node_number(FIRST), DEVICES: 1.0}] * 2 + [{NODE: node_number(DEAD), DEVICES: 1.0}, {}]
    found = values(gauges(nodes(), [replica(0.7, **where) for where in said]))
    assert found["plait_node_idle_gpus", FIRST[:12], "a"] == 1.3
    named = values(gauges(nodes(), [replica(0.7, **{NODE: node_number(SECOND)})]))
    assert named["plait_node_idle_gpus", SECOND[:12], "a"] == 0.3


def test_without_gpus_the_families_are_there_and_empty():
    """So that a dashboard finds their names anywhere."""
    families = gauges((), ())
    assert values(families) == {}
    assert [family.name for family in families] == [f"plait_node_{it}gpus" for it in ("", "idle_", "stranded_")]


def test_ids_that_differ_late_enough_are_different_numbers():
    """52 bits survive as a float."""
    assert node_number("fffffffffffff" + "0" * 43) - node_number("ffffffffffffe" + "0" * 43) == 1.0
