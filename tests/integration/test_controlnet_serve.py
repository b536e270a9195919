"""ControlNets as a Serve deployment: real replicas, found through Serve, asked over the fabric, killed with -9."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait_serving.cores import socket_folder
from plait_serving.deployments.fabric_endpoints import ServeReplicas
from plait_serving.deployments.handles import AllReplicas
from plait_serving.deployments.images.controlnet import ControlNetDeployment, ControlNetKnobs
from plait_serving.deployments.scaling import PRESSURE
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.protocols import Residuals
from support import controlnet as kit
from support.cluster import SharedServe
from support.paused import pause
from support.prometheus import total
from support.waiting import wait_for

pytestmark = pytest.mark.cluster

PATIENCE_S = 600.0


@pytest.fixture(scope="module")
def cluster(shared_serve: SharedServe) -> Any:
    """Serve."""
    return shared_serve.serve


@pytest.fixture(scope="module")
def handle(cluster: Any, tiny_sd_controlnets: tuple[Path, Path]) -> Iterator[Any]:
    """Two replicas of a tiny ControlNet. When Serve takes them away, a client is told so, and their sockets are
    gone."""
    deployment = cluster.deployment(ControlNetDeployment).options(
        name="controlnet-edges",
        num_replicas=2,
        ray_actor_options={"num_cpus": 0.5},
        user_config=ControlNetKnobs(threads=1).model_dump(),
        health_check_period_s=2.0,
    )
    bound = deployment.bind(name="edges", folder=str(tiny_sd_controlnets[0]), dtype="float32", device="cpu")
    yield (handle := cluster.run(bound, name="controlnets", route_prefix=None))
    find = ServeReplicas("edges", handle)
    client, ask = RemoteControlNetClient("edges", find.connect), kit.make_ask(3, width=32)
    session = ask.open(client)
    assert isinstance(client.start([ask.call(session)])()[0], Residuals)
    pids = [replica.pid for replica in find.replicas()]
    cluster.delete("controlnets")
    assert isinstance(client.start([ask.call(session)])()[0], ControlNetUnavailable)
    wait_for(lambda: not any(path for pid in pids for path in socket_folder().glob(f"controlnet-{pid}-*")), PATIENCE_S)


def test_residuals_from_a_serve_replica_are_exact(handle: Any, tiny_sd_controlnets: tuple[Path, Path]) -> None:
    """A base replica that knows only Serve's handle gets `ControlNetModel.forward` x scale, bit for bit."""
    find = ServeReplicas("edges", handle)
    wait_for(lambda: len(find.replicas()) == 2, PATIENCE_S)  # another test may have killed one
    replicas = find.replicas()
    assert len({replica.pid for replica in replicas}) == 2
    assert [[address.partition(":")[0] for address in replica.addresses] for replica in replicas] == [
        ["shm", "tcp"]
    ] * 2
    assert len({replica.secret for replica in replicas}) == 2
    client, ask = RemoteControlNetClient("edges", find.connect), kit.make_ask(1, width=32, n=2, scale=0.8)
    answer = client.start([ask.call(ask.open(client))])()[0]
    assert kit.same_bits(answer, kit.twin_answers(kit.load_twin(tiny_sd_controlnets[0]), [ask])[0])
    assert sum(replica.channels for replica in find.replicas()) == 1
    client.shutdown()


def test_each_replica_says_what_its_audits_found_and_how_busy_it_is(handle: Any) -> None:
    """For `/metrics` of the ingress, by the name of its process; and for Serve."""
    found: dict[str, Any] = {}

    def both() -> bool:
        found.update({it.replica: it.families for it in asyncio.run(AllReplicas(handle).answers())})
        return len(found) == 2

    wait_for(both, PATIENCE_S)
    assert [total(families, "plait_audit_drifted_total", model="edges") for families in found.values()] == [0, 0]
    told = handle.broadcast("record_autoscaling_stats").results(timeout_s=PATIENCE_S)  # as Serve asks where both scale
    assert [0 <= each[PRESSURE] <= 1 for each in told] == [True, True]


def test_kill_nine_in_mid_step_is_retried_on_another(handle: Any, tiny_sd_controlnets: tuple[Path, Path]) -> None:
    """The replica that holds our step is killed: another answers the same, and goes on."""
    find = ServeReplicas("edges", handle)
    wait_for(lambda: len(find.replicas()) == 2, PATIENCE_S)
    client, ask = RemoteControlNetClient("edges", find.connect), kit.make_ask(2, width=32)
    expected = kit.twin_answers(kit.load_twin(tiny_sd_controlnets[0]), [ask])[0]
    session = ask.open(client)
    before = find.replicas()
    ours = next(replica for replica in before if replica.channels)
    pause(ours.pid)  # so that it cannot answer before it dies
    pending = client.start([ask.call(session)])
    os.kill(ours.pid, signal.SIGKILL)
    assert kit.same_bits(pending()[0], expected)
    assert kit.same_bits(client.start([ask.call(session)])()[0], expected)
    assert ours.pid not in {replica.pid for replica in find.replicas()}
    client.shutdown()
