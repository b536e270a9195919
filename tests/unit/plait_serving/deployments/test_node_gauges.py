"""The gauges of nodes in an ingress: asked in the background, and not at all without GPUs."""

from __future__ import annotations

import asyncio

from fakes.broadcast import BroadcastHandle
from plait_deploy.on_ray.nodes import CPUS, DEVICES, GPUS, NODE, node_number
from plait_serving.deployments.node_gauges import NodeGauges
from plait_serving.replica_metrics import exposition

NODE_ID = "4" + "0" * 55
NODES = [{"NodeID": NODE_ID, "Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}, "Labels": {}}]


def said(num_gpus):
    """Of where a replica is, by itself."""
    return {NODE: node_number(NODE_ID), DEVICES: 1.0, CPUS: 0.5, GPUS: num_gpus}


async def settled(gauges, done):
    """Asks until `done`, as a Prometheus does."""
    async with asyncio.timeout(60.0):
        while not done(text := exposition(await gauges.families())):  # noqa: ASYNC110  # nobody is told
            await asyncio.sleep(0.01)
    return text


async def test_replicas_say_where_they_are_and_one_that_fails_is_left_out():
    """Also a deployment that has no replica; and nobody is asked twice within seconds."""
    there = BroadcastHandle("whereabouts", said(0.6), TimeoutError())
    nobody, unknown = BroadcastHandle("whereabouts"), BroadcastHandle("whereabouts")
    unknown.answers = RuntimeError("no replica")
    gauges = NodeGauges({"engine": there, "edges": unknown, "cn": nobody}, nodes=lambda: NODES, clock=lambda: 1.0)
    text = await settled(gauges, lambda text: "idle_gpus{" in text)
    assert f'plait_node_idle_gpus{{class="",node="{NODE_ID[:12]}"}} 0.4\n' in text
    assert f'plait_node_stranded_gpus{{class="",node="{NODE_ID[:12]}"}} 0.4\n' in text
    await gauges.families()
    await gauges._asking
    assert there.calls == 1  # the clock stands still


async def test_without_gpus_nobody_is_asked():
    """The families are there, empty."""
    handle = BroadcastHandle("whereabouts")
    looked = []
    cpus = [{**NODES[0], "Resources": {"CPU": 4.0}}]
    gauges = NodeGauges({"engine": handle}, nodes=lambda: looked.append(1) or cpus)
    text = await settled(gauges, lambda _: looked)
    assert handle.calls == 0
    assert text.count("# TYPE plait_node_") == 3


async def test_nodes_that_cannot_be_asked_leave_what_was_known():
    """An error is logged, and the text stays."""
    looked = []

    def nodes():
        looked.append(1)
        if len(looked) > 1:
            raise RuntimeError("Ray does not answer")
        return NODES

    now = iter(range(0, 10_000, 100))
    gauges = NodeGauges({"engine": BroadcastHandle("whereabouts", said(0.6))}, nodes=nodes, clock=lambda: next(now))
    text = await settled(gauges, lambda text: "idle_gpus{" in text)
    await settled(gauges, lambda _: len(looked) > 2)
    assert exposition(await gauges.families()) == text
