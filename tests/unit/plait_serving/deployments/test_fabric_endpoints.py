"""How replicas and their clients find each other: listeners, left-over sockets, what is asked of Serve's handle."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID

from fakes.broadcast import BroadcastHandle
from plait_fabric import Unsupported, listen, new_secret
from plait_fabric.rpc.replicas import NoReplica, Replica
from plait_serving.cores import remove_stale_sockets
from plait_serving.deployments.fabric_endpoints import ServeReplicas, host_id, open_listeners

SECRET = new_secret()


def test_listens_on_nixl_where_that_is_wanted(tmp_path: Path) -> None:
    """With it and, for clients that lack it, on TCP; a replica that lacks it does not come up with less."""
    where = {"kind": "rank", "ip_address": "127.0.0.1", "folder": tmp_path / "sockets", "between_hosts": "nixl"}
    if importlib.util.find_spec("nixl_cu12") is None:
        with pytest.raises(Unsupported, match="nixl"):
            open_listeners(SECRET, **where)
        return
    listeners = open_listeners(SECRET, **where)
    assert [listener.address.partition(":")[0] for listener in listeners] == ["shm", "nixl", "tcp"]
    for listener in listeners:
        listener.close()


def test_without_shared_memory_tcp_is_enough(tmp_path: Path) -> None:
    """A folder that cannot hold a socket costs the shared-memory address, not the start."""
    (only,) = open_listeners(SECRET, kind="controlnet", ip_address="127.0.0.1", folder=tmp_path / ("long" * 40))
    assert only.address.startswith("tcp:")
    only.close()


def test_sockets_of_killed_replicas_are_swept(tmp_path: Path) -> None:
    """What a dead process left behind goes; what a living one uses, and what is not ours, stays."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f"controlnet-{gone.pid}-abc123"
    own, foreign = tmp_path / f"controlnet-{os.getpid()}-abc123", tmp_path / "controlnet-notes"
    for path in (left, own, foreign):
        path.touch()
    remove_stale_sockets(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own, foreign])


def handle_of(answers: list[object] | Exception, *known: ReplicaID) -> BroadcastHandle:
    """A handle whose replicas describe themselves so; Serve has told this process of some of them."""
    handle = BroadcastHandle("describe")
    handle.answers = answers
    routing = SimpleNamespace(curr_replicas=dict.fromkeys(known))
    handle._router = SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=routing))
    return handle


def test_to_look_for_another_replica_costs_no_call_if_there_is_none() -> None:
    """A replica that fails to describe itself does not hide the others; one of those is dialled. Clients look all the
    time, since the number of replicas may change: what Serve has told this process costs no call."""
    ids = [ReplicaID(unique_id=name, deployment_id=DeploymentID(name="cn", app_name="app")) for name in ("a", "b")]
    one, other = (each.to_full_id_str() for each in ids)
    with listen("tcp://127.0.0.1:0", secret=SECRET) as listener:
        well = Replica(name=other, host=host_id(), addresses=(listener.address,), secret=SECRET)
        handle = handle_of([RuntimeError("died"), well], *ids)
        replicas = ServeReplicas("edges", handle, chance=random.Random(0))
        with pytest.raises(NoReplica, match="there is no other replica"):
            replicas.connect(frozenset({one, other}))
        assert handle.calls == 0
        link = replicas.connect(frozenset({one}))
        assert (link.replica, handle.calls) == (other, 1)
        link.channel.close()


async def test_asking_works_inside_an_event_loop() -> None:
    """A Serve constructor runs on an event loop, where Serve refuses to wait for results; asking works there too."""
    replica = Replica(name="r", host="h", addresses=(), secret=b"")
    assert ServeReplicas("edges", handle_of([replica])).replicas() == [replica]


@pytest.mark.parametrize("answers", [[], [RuntimeError("died")], TimeoutError("late"), RuntimeError("no deployment")])
def test_no_replica_is_unavailable(answers: list[object] | Exception) -> None:
    """Whatever Serve says when there is nobody becomes `NoReplica`, which clients tell as their own."""
    with pytest.raises(NoReplica, match="edges"):
        ServeReplicas("edges", handle_of(answers)).connect(frozenset())


def test_clients_of_a_busy_replica_hear_of_a_free_one() -> None:
    """By the clients that all say they have now; not all of them move."""
    found: list[object] = [
        Replica(name=name, host="h", addresses=(), secret=b"", channels=count) for name, count in (("a", 10), ("b", 0))
    ]
    replicas = ServeReplicas("edges", handle_of(found), chance=random.Random(0))
    moves = {name: {replicas.worth_moving(name) for _ in range(50)} for name in "ab"}
    assert moves == {"a": {True, False}, "b": {False}}
