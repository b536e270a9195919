"""Placement on a Ray of three nodes with Serve: what is stranded, and who is restarted."""

from __future__ import annotations

import pytest

from plait_bench.placement.live.play import PLAIT, SPREAD, play
from plait_bench.placement.live.scenario import SMALL
from support.ray_nodes import ray_nodes

__all__ = ["ray_nodes"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_planner_moves_what_lost_its_node_and_nothing_else(ray_nodes):
    """Six deployments grow, lose a node, get another one and shrink: all replicas run after each step, on GPUs that
    they share with nobody else, and none ended that had its node and was wanted."""
    phases = play(PLAIT, SMALL, ray_nodes, say=print, patience_s=240)
    assert [phase.name for phase in phases] == ["start", "more", "lost", "added", "fewer"]
    assert [phase.without for phase in phases] == [0] * 5
    assert [phase.restarted for phase in phases] == [0] * 5
    assert [phase.gpus for phase in phases] == [12, 12, 8, 12, 12]


@pytest.mark.parametrize("system", [SPREAD, "ray-pack"])
def test_serve_by_itself_strands_no_less(ray_nodes, system):
    """The same start, placed by Serve: what the planner strands of it is in the other test's reach."""
