"""How long the start of a node of Ray may take."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from ray._private import services
from ray._private.node import Node

from plait.errors import ServeError
from plait.server import environment, processes
from plait.server.environment import patient_start

LIMITS = ("RAY_gcs_server_port_wait_time_s", "RAY_agent_register_timeout_ms")


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A node that joins at `joins_s` of a clock that moves by waiting; `lives`: whether its raylet does."""
    clock = SimpleNamespace(now_s=0.0)
    found = SimpleNamespace(joins_s=0.0, lives=True, clock=clock)

    def get_node(address: str, node_id: str) -> dict[str, str]:
        if clock.now_s < found.joins_s:
            raise RuntimeError("no node")
        return {"address": address, "id": node_id}

    def sleep(seconds: float) -> None:
        clock.now_s += seconds

    for name in LIMITS:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(environment, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=sleep))
    monkeypatch.setattr(processes, "has_child", lambda name: found.lives and name == "raylet")
    return found


def test_a_node_may_take_as_long_as_a_start(node: SimpleNamespace) -> None:
    """Ray itself would ask for 30 s; afterwards it asks as ever."""
    node.joins_s, before = 500.0, services.get_node
    with patient_start(600.0):
        assert services.get_node("here", "1") == {"address": "here", "id": "1"}
        assert node.clock.now_s == pytest.approx(500.0, abs=1)
        assert [os.environ[name] for name in LIMITS] == ["600", "600000"]
    assert services.get_node is before


def test_a_node_that_does_not_join_is_given_up(node: SimpleNamespace) -> None:
    """After that time, with Ray's own error, which names what may be wrong. No limit is shorter than Ray's own."""
    node.joins_s = 1e9
    with patient_start(20.0), pytest.raises(RuntimeError, match="no node"):
        services.get_node("here", "1")
    assert 20.0 < node.clock.now_s < 21.0
    assert [os.environ[name] for name in LIMITS] == ["30", "100000"]


def test_a_raylet_that_ended_is_not_waited_for(node: SimpleNamespace) -> None:
    """At once, and without Ray's asking again."""
    node.joins_s, node.lives = 1e9, False
    with patient_start(600.0), pytest.raises(ServeError, match="raylet ended"):
        services.get_node("here", "1")
    assert node.clock.now_s == 0.0


def test_agents_are_told_their_ports(node: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the raylet too: one that waits for them to be said ends after 15 s. A port that was chosen stays."""
    told: list[dict[str, object]] = []
    commands: list[list[str]] = []

    def start_raylet(*_: object, **named: object) -> None:
        told.append(named)
        services.start_ray_process(["raylet", "--a=1"], "raylet")

    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(services, "start_ray_process", lambda command, _: commands.append(command))
    with patient_start(600.0):
        services.start_raylet("address", is_head_node=True, metrics_agent_port=None, metrics_export_port=4711)
        services.start_ray_process(["another"], "dashboard")
    (named,) = told
    assert (named.pop("is_head_node"), named.pop("metrics_export_port")) == (True, 4711)
    assert named.keys() == {"metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port"}
    assert all(isinstance(port, int) and port >= 1024 for port in named.values())
    assert commands == [
        ["raylet", "--a=1", f"--dashboard_agent_listen_port={named['dashboard_agent_listen_port']}"],
        ["another"],
    ]


def test_what_nobody_uses_is_not_started(node: SimpleNamespace) -> None:
    """Ray's own methods are back afterwards: another Ray of this process is whole."""
    whole = (Node.start_monitor, Node.start_log_monitor)
    with patient_start(600.0):
        head = Node.__new__(Node)
        head.all_processes = {}
        head.start_monitor()
        head.start_log_monitor()
        assert head.all_processes == {}
    assert (Node.start_monitor, Node.start_log_monitor) == whole
