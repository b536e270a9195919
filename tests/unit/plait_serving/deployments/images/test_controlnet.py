"""The Serve side of ControlNets without Serve: listeners, left-over sockets, what is asked of a handle."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from plait_fabric import Unsupported, connect, listen, new_secret
from plait_fabric.rpc.replicas import NoReplica, Replica
from plait_serving.cores import remove_stale_sockets
from plait_serving.deployments.fabric_endpoints import ServeReplicas, host_id, open_listeners
from plait_serving.deployments.images.controlnet import ControlNetKnobs


def test_listens_on_shared_memory_and_tcp(tmp_path: Path) -> None:
    """A replica can be reached both ways with its secret."""
    secret = new_secret()
    listeners = open_listeners(secret, kind="controlnet", ip_address="127.0.0.1", folder=tmp_path / "sockets")
    assert [listener.address.partition(":")[0] for listener in listeners] == ["shm", "tcp"]
    for listener in listeners:
        with listener, connect(listener.address, secret=secret), listener.accept(60):
            pass


def test_listens_on_nixl_where_that_is_wanted(tmp_path: Path) -> None:
    """With it and, for clients that lack it, on TCP; a replica that lacks it does not come up with less."""
    folder = tmp_path / "sockets"
    if importlib.util.find_spec("nixl_cu12") is None:
        with pytest.raises(Unsupported, match="nixl"):
            open_listeners(new_secret(), kind="rank", ip_address="127.0.0.1", folder=folder, between_hosts="nixl")
        return
    listeners = open_listeners(new_secret(), kind="rank", ip_address="127.0.0.1", folder=folder, between_hosts="nixl")
    assert [listener.address.partition(":")[0] for listener in listeners] == ["shm", "nixl", "tcp"]
    for listener in listeners:
        listener.close()


def test_without_shared_memory_tcp_is_enough(tmp_path: Path) -> None:
    """A folder that cannot hold a socket costs the shared-memory address, not the start."""
    listeners = open_listeners(new_secret(), kind="controlnet", ip_address="127.0.0.1", folder=tmp_path / ("long" * 40))
    assert [listener.address.partition(":")[0] for listener in listeners] == ["tcp"]
    listeners[0].close()


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


def test_knobs_refuse_what_they_do_not_know() -> None:
    """A misspelt or impossible knob is an error, not a default."""
    for bad in ({"thread": 1}, {"threads": -1}, {"largest_batch_rows": 0}):
        with pytest.raises(ValidationError):
            ControlNetKnobs.model_validate(bad)


class Handle:
    """What `ServeReplicas` uses of a Serve handle; its replicas answer with what they are given, or raise it."""

    def __init__(self, answers: list[object] | Exception) -> None:
        self.answers = answers

    def broadcast(self, method: str) -> Handle:
        assert method == "describe"
        if isinstance(self.answers, Exception):
            raise self.answers
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[object]:
        with pytest.raises(RuntimeError):  # as Serve's own does
            asyncio.get_running_loop()
        assert return_exceptions
        assert timeout_s > 0
        assert not isinstance(self.answers, Exception)
        return self.answers


def test_living_replicas_are_found_beside_dead_ones() -> None:
    """A replica that fails to describe itself does not hide the others; one of those is dialled."""
    secret = new_secret()
    with listen("tcp://127.0.0.1:0", secret=secret) as listener:
        well = Replica(name="well", host=host_id(), addresses=(listener.address,), secret=secret)
        replicas = ServeReplicas("edges", Handle([RuntimeError("died"), well]), chance=random.Random(0))
        link = replicas.connect(frozenset())
        assert link.replica == "well"
        link.channel.close()
        with pytest.raises(NoReplica):
            replicas.connect(frozenset({"well"}))


async def test_asking_works_inside_an_event_loop() -> None:
    """A Serve constructor runs on an event loop, where Serve refuses to wait for results; asking works there too."""
    replica = Replica(name="r", host="h", addresses=(), secret=b"")
    assert ServeReplicas("edges", Handle([replica])).replicas() == [replica]


@pytest.mark.parametrize("answers", [[], [RuntimeError("died")], TimeoutError("late"), RuntimeError("no deployment")])
def test_no_replica_is_unavailable(answers: list[object] | Exception) -> None:
    """Whatever Serve says when there is nobody becomes `NoReplica`, which clients tell as their own."""
    with pytest.raises(NoReplica, match="edges"):
        ServeReplicas("edges", Handle(answers)).connect(frozenset())
