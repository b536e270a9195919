"""A server that is placed on a Ray of several nodes: what is stranded, and who is restarted.

`plait bench placement` plays longer scenarios, beside Serve's own ways of placing replicas."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from plait.cli import main as root
from plait.server.environment import patient_start
from plait_bench.placement.cluster import NodeSize, attached, deploy, local_nodes
from plait_deploy.on_ray.nodes import LABEL
from support.asking import ask
from support.cluster import TESTS, stop_shared
from support.server import free_port
from support.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

_START_S, PATIENCE_S = 240.0, 300.0
PLACED = """
version: 1
server: {port: %d}
images: {name: emoji, controlnets: {}, replicas: %d, num_gpus: 0.6}
recommend: null
"""
CLUSTER = "nodes: [{name: a, cpus: 8, memory_gib: 8, gpus: 2}, {name: b, cpus: 8, memory_gib: 8, gpus: 2}]"


class Server:
    """A placed server: its configuration, and what it answers."""

    def __init__(self, serve, address, port, folder, capsys):
        self.serve, self.address, self.port, self.folder, self.capsys = serve, address, port, folder, capsys

    def deploy(self, replicas):
        """Renders a plait.yaml for the cluster and hands it to Serve, with the fake engine."""
        (self.folder / "plait.yaml").write_text(PLACED % (self.port, replicas))
        (self.folder / "cluster.yaml").write_text(CLUSTER)
        self.capsys.readouterr()
        files = [str(self.folder / name) for name in ("plait.yaml", "cluster.yaml")]
        assert root.main(["deploy", "render", files[0], "--cluster", files[1]]) == 0
        (application,) = yaml.safe_load(self.capsys.readouterr().out)["applications"]
        deploy(self.serve, {**application, "import_path": "fakes.placed_app:build"})

    def ask(self, path, body=None):
        """GET, or POST if there is a body: status and text; 0 where nothing answers."""
        try:
            answer = ask(f"http://127.0.0.1:{self.port}{path}", body)
        except OSError as error:
            return 0, str(error)
        return answer.status, answer.text

    def gauge(self, name):
        """The values of a gauge of nodes, by class."""
        found = re.findall(rf'^{name}{{class="(\w+)",.*}} (\S+)$', self.ask("/metrics")[1], re.MULTILINE)
        return {of: float(value) for of, value in found}

    def engines(self, classes="ab"):
        """The processes of the engine's replicas on these classes of nodes."""
        found = set()
        for name in classes:
            try:
                handle = self.serve.get_deployment_handle(f"engine@{name}", "plait")
                found |= {said.replica for said in handle.broadcast("metric_families").results(timeout_s=60)}
            except Exception as error:
                print(name, error)  # it has no replica
        return found

    def planned(self):
        """How many engines `plait deploy place --live` finds a place for; another process asks."""
        command = [sys.executable, "-m", "plait.cli.main", "deploy", "place", "--json", "--live", self.address]
        done = subprocess.run(
            [*command, str(self.folder / "plait.yaml")], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return sum(
            it["deployment"] == "engine" and it["node"] is not None for it in json.loads(done.stdout)["replicas"]
        )

    def wait(self, done):
        gauges = ("plait_node_gpus", "plait_node_idle_gpus", "plait_node_stranded_gpus")
        wait_for(done, PATIENCE_S, what=lambda: f"{self.serve.status()} {[*map(self.gauge, gauges)]}")


def test_a_placed_server_grows_and_loses_a_node_without_a_restart(tmp_path, capsys, monkeypatch):
    """Of 2 nodes x 2 GPUs, replicas with 0.6 of a GPU: images are made, `/metrics` has what is idle and stranded on
    each node, a new number of replicas ends none that runs, and neither does a node that is lost, whose replicas come
    back with it."""
    # A process is attached to one Ray at a time. Serve's threads outlive the session's: what they still ask would start
    # another, behind this test's back.
    monkeypatch.setattr("ray._private.auto_init_hook.enable_auto_connect", False)
    stop_shared()
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    port = free_port()
    with (
        patient_start(_START_S),
        local_nodes() as nodes,
        attached(nodes, environ={"PYTHONPATH": path}, port=port) as serve,
    ):
        for name in "ab":
            nodes.add(name, _node(name))
        server = Server(serve, nodes.address, port, tmp_path, capsys)
        server.deploy(replicas=2)
        server.wait(lambda: server.ask("/health")[0] == 200)
        image = {"prompt": "red apple", "num_inference_steps": 2, "seed": 1}
        assert server.ask("/v1/images/generations", image)[0] == 200
        server.wait(lambda: sum(server.gauge("plait_node_idle_gpus").values()) == pytest.approx(4 - 2 * 0.6))
        assert server.gauge("plait_node_gpus") == {"a": 2, "b": 2}
        assert sum(server.gauge("plait_node_stranded_gpus").values()) == pytest.approx(0.8)
        assert server.planned() == 2
        before = server.engines()
        assert len(before) == 2
        server.deploy(replicas=4)
        server.wait(lambda: len(server.engines()) == 4)
        assert before < server.engines()
        assert {server.ask("/v1/images/generations", image)[0] for _ in range(8)} == {200}
        server.wait(lambda: sum(server.gauge("plait_node_stranded_gpus").values()) == pytest.approx(1.6))
        stay = server.engines("a")
        nodes.lose("b")
        server.wait(lambda: server.gauge("plait_node_gpus") == {"a": 2})
        nodes.add("b", _node("b"))
        server.wait(lambda: len(server.engines()) == 4)
        assert server.engines("a") == stay


def _node(name: str) -> NodeSize:
    return NodeSize(cpus=8, gpus=2, labels={LABEL: name})
