"""The gauges of nodes in an ingress: asked in the background, and not at all without GPUs."""

from __future__ import annotations

import asyncio

from plait_deploy.on_ray.whereabouts import DEVICES, NODE, node_number
from plait_serving.deployments.node_gauges import NodeGauges, Reserved
from plait_serving.replica_metrics import exposition

NODE_ID = "4" + "0" * 55
NODES = [{"NodeID": NODE_ID, "Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}, "Labels": {}}]


class Handle:
    """Serve's handle of a deployment."""

    def __init__(self, answers):
        self.answers, self.asked = answers, 0

    def broadcast(self, method):
        assert method == "whereabouts"
        self.asked += 1
        if self.answers is None:
            raise RuntimeError("no replica")
        return self

    def results(self, *, timeout_s, return_exceptions):
        return self.answers


def reserved(handle, num_gpus):
    return Reserved(num_cpus=0.5, num_gpus=num_gpus, handle=handle)


async def settled(gauges, done):
    """Asks until `done`, as a Prometheus does."""
    for _ in range(3000):
        if done(text := exposition(await gauges.families())):
            return text
        await asyncio.sleep(0.01)
    raise AssertionError(text)


def test_replicas_say_where_they_are_and_one_that_fails_is_left_out():
    """Also a deployment that has no replica; and nobody is asked twice within seconds."""

    async def run():
        there = Handle([{NODE: node_number(NODE_ID), DEVICES: 1.0}, TimeoutError()])
        models = {"engine": reserved(there, 0.6), "edges": reserved(Handle(None), 0.5), "cn": reserved(Handle([]), 0)}
        gauges = NodeGauges(models, nodes=lambda: NODES, clock=lambda: 1.0)
        text = await settled(gauges, lambda text: "idle_gpus{" in text)
        assert f'plait_node_idle_gpus{{class="",node="{NODE_ID[:12]}"}} 0.4\n' in text
        assert f'plait_node_stranded_gpus{{class="",node="{NODE_ID[:12]}"}} 0.4\n' in text
        await gauges.families()
        assert there.asked == 1  # the clock stands still

    asyncio.run(run())


def test_a_server_without_gpus_asks_nobody():
    """The families are there, empty."""

    async def run():
        handle = Handle([])
        text = exposition(await NodeGauges({"engine": reserved(handle, 0.0)}).families())
        await asyncio.sleep(0.05)
        assert handle.asked == 0
        assert text.count("# TYPE plait_node_") == 3

    asyncio.run(run())


def test_nodes_that_cannot_be_asked_leave_what_was_known():
    """An error is logged, and the text stays."""

    async def run():
        seen = [NODES]

        def nodes():
            if not seen:
                raise RuntimeError("Ray does not answer")
            return seen.pop()

        now = iter(range(0, 10_000, 100))
        handle = Handle([{NODE: node_number(NODE_ID), DEVICES: 1.0}])
        gauges = NodeGauges({"engine": reserved(handle, 0.6)}, nodes=nodes, clock=lambda: next(now))
        text = await settled(gauges, lambda text: "idle_gpus{" in text)
        await settled(gauges, lambda _: handle.asked > 2)
        assert exposition(await gauges.families()) == text

    asyncio.run(run())
