"""An ingress without a cluster: open answers, and the gauges of nodes by what replicas say with their metrics, while
Ray is asked in the background."""

from __future__ import annotations

import asyncio

import pytest

from fakes.images import FakeImageService
from plait_deploy.on_ray.nodes import CPUS, DEVICES, GPUS, NODE, node_number
from plait_serving.deployments.ingress import NodeGauges, OpenResponses
from plait_serving.http.context import HttpSettings, RouteContext
from plait_serving.http.operations import gather
from plait_serving.replica_metrics import ReplicaMetrics, exposition

NODE_ID = "4" + "0" * 55
NODES = [{"NodeID": NODE_ID, "Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}, "Labels": {}}]


def said(num_gpus):
    """Of where a replica is, by itself."""
    return {NODE: node_number(NODE_ID), DEVICES: 1.0, CPUS: 0.5, GPUS: num_gpus}


async def settled(gauges, reports, done):
    """Asks until `done`, as a Prometheus does."""
    async with asyncio.timeout(60.0):
        while not done(text := exposition(gauges.families(reports))):  # noqa: ASYNC110  # nobody is told
            await asyncio.sleep(0.01)
    return text


async def test_nodes_that_cannot_be_asked_leave_what_was_known():
    """What is idle is what no replica says that it has. An error is logged, and the text stays."""
    looked = []

    def nodes():
        looked.append(1)
        if len(looked) > 1:
            raise RuntimeError("Ray does not answer")
        return NODES

    gauges = NodeGauges(nodes)
    text = await settled(gauges, [said(0.6)], lambda text: "idle_gpus{" in text)
    assert f'plait_node_idle_gpus{{class="",node="{NODE_ID[:12]}"}} 0.4\n' in text
    assert f'plait_node_stranded_gpus{{class="",node="{NODE_ID[:12]}"}} 0.4\n' in text
    await settled(gauges, [said(0.6)], lambda _: len(looked) > 2)
    assert exposition(gauges.families([])) == text


async def test_a_scrape_hands_on_where_replicas_are():
    """Of those that say so: no ingress has a GPU."""
    service, given = FakeImageService(), []

    async def counts():
        return [ReplicaMetrics(replica="e", families=(), at=said(0.6)), ReplicaMetrics(replica="i", families=())]

    service.counts = counts
    await gather(RouteContext(images=service, settings=HttpSettings(), nodes=lambda at: given.append(at) or ()))
    assert given == [[said(0.6)]]


async def test_serve_ingress_counts_open_answers():
    """Draining waits for the answers that are not sent yet, also for those that fail, and no longer than asked."""
    release = asyncio.Event()

    async def app(scope, receive, send):
        await release.wait()
        raise RuntimeError

    answers = OpenResponses()
    assert await answers.wait_until_none(0.01)
    task = asyncio.ensure_future(answers.count(app)({"type": "http"}, None, None))
    await asyncio.sleep(0)
    assert not await answers.wait_until_none(0.01)
    release.set()
    assert await answers.wait_until_none(1.0)
    with pytest.raises(RuntimeError):
        await task
