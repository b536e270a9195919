"""ControlNets as a Serve deployment: real replicas, found through Serve, asked over the fabric, killed with -9."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plait_serving.cores import socket_folder
from plait_serving.deployments.fabric_endpoints import ServeReplicas
from plait_serving.deployments.images.controlnet import ControlNetDeployment, ControlNetKnobs
from plait_serving.deployments.metrics import AllReplicas
from plait_serving.deployments.scaling import autoscaling
from plait_serving.diffusion.controlnet import remote
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.protocols import Residuals
from plait_serving.sections import Replicas
from support import controlnet as kit
from support.closeness import EQUAL
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
    yield (handle := _deploy(cluster, tiny_sd_controlnets[0], app="controlnets", replicas=2))
    find = ServeReplicas("edges", handle)
    client, ask = RemoteControlNetClient("edges", find.connect), kit.make_ask(3, width=32)
    session = ask.open(client)
    assert isinstance(client.start([ask.call(session)]).wait()[0], Residuals)
    pids = [replica.pid for replica in find.replicas()]
    cluster.delete("controlnets")
    assert isinstance(client.start([ask.call(session)]).wait()[0], ControlNetUnavailable)
    wait_for(lambda: not any(path for pid in pids for path in socket_folder().glob(f"controlnet-{pid}-*")), PATIENCE_S)


def _deploy(cluster: Any, folder: Path, *, app: str, replicas: int | Replicas) -> Any:
    count = {"num_replicas": replicas} if isinstance(replicas, int) else {"autoscaling_config": autoscaling(replicas)}
    deployment = cluster.deployment(ControlNetDeployment).options(
        name="controlnet-edges",
        **count,
        ray_actor_options={"num_cpus": 0.5},
        user_config=ControlNetKnobs(threads=1).model_dump(),
        health_check_period_s=2.0,
    )
    bound = deployment.bind(name="edges", folder=str(folder), dtype="float32", device="cpu")
    return cluster.run(bound, name=app, route_prefix=None)


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
    answer = client.start([ask.call(ask.open(client))]).wait()[0]
    assert kit.same_bits(answer, kit.twin_answers(kit.load_twin(tiny_sd_controlnets[0]), [ask])[0])
    assert sum(replica.channels for replica in find.replicas()) == 1
    client.shutdown()


def test_each_replica_says_what_its_audits_found(handle: Any) -> None:
    """For `/metrics` of the ingress, by the name of its process."""

    found: dict[str, Any] = {}

    def both() -> bool:
        found.update({it.replica: it.families for it in asyncio.run(AllReplicas(handle).answers())})
        return len(found) == 2

    wait_for(both, PATIENCE_S)
    assert [total(families, "plait_audit_drifted_total", model="edges") for families in found.values()] == [0, 0]


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
    assert kit.same_bits(pending.wait()[0], expected)
    assert kit.same_bits(client.start([ask.call(session)]).wait()[0], expected)
    assert ours.pid not in {replica.pid for replica in find.replicas()}
    client.shutdown()


@pytest.mark.slow
def test_a_busy_controlnet_grows_and_its_clients_move(
    cluster: Any, tiny_sd_controlnets: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four engines keep the only replica busy: a second one comes, each has some of them, and residuals stay right."""
    monkeypatch.setattr(remote, "_MOVE_EVERY_S", 0.5)  # each time, a client moves or stays by chance
    growing = Replicas(min=1, max=2, up_after_s=0.0, down_after_s=600.0)
    handle = _deploy(cluster, tiny_sd_controlnets[0], app="growing", replicas=growing)
    find, stop = ServeReplicas("edges", handle), threading.Event()
    asked = [kit.make_ask(seed, width=32) for seed in (4, 5, 6, 7)]
    expected = [kit.twin_answers(kit.load_twin(tiny_sd_controlnets[0]), [ask])[0] for ask in asked]

    def engine(number: int) -> int:
        replicas, steps = ServeReplicas("edges", handle), 0
        client = RemoteControlNetClient("edges", replicas.connect, worth_moving=replicas.worth_moving)
        while not stop.is_set():  # an image each, as sessions move only where they begin
            call = asked[number].call(asked[number].open(client))
            for _ in range(20):
                answer = client.start([call]).wait()[0]
                steps += 1
            assert kit.ulps(answer, expected[number]) <= EQUAL  # it may have been computed in company
        client.shutdown()
        return steps

    def both_have_some() -> bool:
        clients = [replica.channels for replica in find.replicas()]
        return len(clients) == 2 and all(clients)

    with ThreadPoolExecutor(len(asked)) as threads:
        running = [threads.submit(engine, number) for number in range(len(asked))]
        try:
            wait_for(lambda: both_have_some() or any(it.done() for it in running), PATIENCE_S)
        finally:
            stop.set()
        assert all(it.result() for it in running)
    cluster.delete("growing")
