"""What `plait deploy render` prints, given to `serve deploy` on a Ray that an operator started: it answers, and a new
version takes over without losing a request."""

from __future__ import annotations

import base64
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ray.util import get_node_ip_address

from plait.cli import main as root
from plait.demo.run import PEOPLE
from plait.server.environment import RAY_ENVIRONMENT
from plait_serving.ranking.config import STARTER_RANKING_FOLDER
from support.asking import ask
from support.server import REPOSITORY, free_port
from support.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@dataclass(frozen=True)
class RayHead:
    """Where its dashboard and its node's metrics are, its address, and the environment in which commands find its
    token."""

    dashboard: str
    metrics: str
    host: str
    port: int
    environ: Mapping[str, str]

    def serve(self, *arguments: str) -> str:
        """Ray's own `serve` command against this head."""
        done = subprocess.run(
            [Path(sys.executable).parent / "serve", *arguments, "-a", self.dashboard],
            capture_output=True,
            text=True,
            env=dict(self.environ),
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(self, num_cpus: int, *, drain_s: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Another node, as a pod starts one; asked to end it has `drain_s`."""
        environ = {**self.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_s)}
        return ray_node(self.host, num_cpus, environ, address=f"{self.host}:{self.port}")


@contextmanager
def ray_node(
    host: str, num_cpus: int, environ: Mapping[str, str], *flags: str, **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A node that has started, gone with all its processes afterwards (`ray stop` would end everybody's). A busy host
    exceeds Ray's own limits, which no option raises: it is started again."""
    options = {
        "dashboard_agent_listen_port": free_port(), "dashboard_agent_grpc_port": free_port(),
        "metrics_export_port": free_port(), "min_worker_port": 0, "max_worker_port": 0, "node_ip_address": host,
        "num_cpus": num_cpus, "object_store_memory": 200 << 20, **options,
    }  # fmt: skip
    named = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    command = [Path(sys.executable).parent / "ray", "start", "--block", *flags, *named]
    for _ in range(3):
        process = subprocess.Popen(command, env=environ, start_new_session=True, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            if any(b"Ray runtime started" in line for line in process.stdout):
                yield process
                return
        finally:
            _end(process)
    raise AssertionError("the node did not start")


@contextmanager
def ray_head() -> Iterator[RayHead]:
    """A head of our own, which other nodes may join."""
    host = get_node_ip_address()  # for nodes, loopback will not do
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        environ = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **RAY_ENVIRONMENT}
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"  # other machines may join (`plait.server.cluster`)
        environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # else it waits for 30 s for replicas to move elsewhere
        dashboard, metrics, port = free_port(), free_port(), free_port()
        more = {
            "port": port, "dashboard_host": "127.0.0.1", "dashboard_port": dashboard, "metrics_export_port": metrics,
            "ray_client_server_port": free_port(), "temp_dir": f"{folder}/r",
        }  # fmt: skip
        with ray_node(host, 6, environ, "--head", "--include-dashboard=true", **more):
            head = RayHead(
                dashboard=f"http://127.0.0.1:{dashboard}",
                metrics=f"http://{host}:{metrics}/metrics",
                host=host,
                port=port,
                environ=environ,
            )
            wait_for(lambda: _answers(f"{head.dashboard}/api/gcs_healthz"))
            yield head


def _answers(url: str) -> bool:
    try:
        return ask(url).status == 200
    except OSError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
    for pid in _session_of(process):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _session_of(leader: subprocess.Popen[bytes]) -> Iterator[int]:
    """The processes of the session that it leads."""
    for entry in Path("/proc").iterdir():
        with suppress(ValueError, OSError):
            if os.getsid(int(entry.name)) == leader.pid:
                yield int(entry.name)


READY_S = 300.0
REFUSED = -1
"""An answer that says when to come back."""
TWO_OF_EACH = """
version: 1
server: {host: 127.0.0.1, port: %d, drain_s: 30, ingress_replicas: 2}
images: {executor: torch, controlnets: {}, replicas: 2, name: emoji, limits: {max_steps: %d}}
recommend: {models: {picks: {folder: %s, mode: split, cn: {replicas: 2}}}}
"""


@dataclass
class Cluster:
    """A head, and the port at which Serve answers on it."""

    head: RayHead
    port: int
    folder: Path

    def deploy(self, capsys, *, max_steps: int) -> None:
        """Renders a plait.yaml and hands it to Serve; returns once this version answers, and no other."""
        config, manifest = self.folder / "plait.yaml", self.folder / "serve.yaml"
        config.write_text(TWO_OF_EACH % (self.port, max_steps, STARTER_RANKING_FOLDER))
        capsys.readouterr()
        assert root.main(["deploy", "render", "--target", "serve", str(config)]) == 0
        manifest.write_text(capsys.readouterr().out)
        self.head.serve("deploy", str(manifest))
        self.wait(lambda: "DEPLOYING" not in self.head.serve("status"), "not deployed")
        self.wait(lambda: self.ask("/health")[0] == 200 and self.max_steps() == max_steps, "not ready")
        self.wait(lambda: "UPDATING" not in self.head.serve("status"), "not all there")

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """GET, or POST if there is a body: status and JSON."""
        try:
            answer = ask(f"http://127.0.0.1:{self.port}{path}", body, timeout_s=READY_S)
        except OSError as error:
            return 0, str(error)
        if answer.status < 400:
            return answer.status, answer.json()
        status = REFUSED if answer.headers.get("retry-after") else answer.status
        return status, answer.text[:300]

    def image(self) -> tuple[int, Any]:
        """A small image."""
        return self.ask("/v1/images/generations", {"prompt": "red apple", "num_inference_steps": 2, "seed": 1})

    def ranking(self) -> tuple[int, Any]:
        """Films for the demo's first person."""
        return self.ask(
            "/v1/recommend", {"model": "picks", "user": PEOPLE[0].features(), "candidates": "all", "top_k": 5}
        )

    def max_steps(self) -> int | None:
        """What the version that answers says about itself; None if nothing answers."""
        status, found = self.ask("/v1/models")
        if status != 200:
            return None
        return next((it["limits"]["max_steps"] for it in found["data"] if "limits" in it), None)

    def wait(self, done, what: str) -> None:
        wait_for(done, READY_S, what=lambda: f"{what}: {self.head.serve('status')[-3000:]}")


def test_what_serve_deploy_runs_answers_and_spreads_and_moves_without_a_loss(tmp_path, capsys):
    """Through Ray's REST API with a token, as on a cluster: two of every role that scales. A burst has its share from
    each engine. Then under a load that never stops a second version takes over, on two nodes, and one of these is asked
    to end: its replicas move within the time that a pod gives it, and every request is answered, none asked to come
    back."""
    with ray_head() as head:
        cluster = Cluster(head, free_port(), tmp_path)
        cluster.deploy(capsys, max_steps=39)
        status, image = cluster.image()
        assert status == 200, image
        assert base64.b64decode(image["data"][0]["b64_json"]).startswith(b"\x89PNG")
        status, ranked = cluster.ranking()
        assert status == 200, ranked
        scores = [it["score"] for it in ranked["items"]]
        assert scores == sorted(scores, reverse=True)
        burst(cluster)
        with head.node(6, drain_s=240) as node, loaded(cluster) as found:
            cluster.wait(lambda: found["image", 200] > 1 and found["ranking", 200] > 10, "no load")
            cluster.deploy(capsys, max_steps=41)
            there = replicas_of(node)
            assert there, "no replica is on the node"
            print(there)
            before = Counter(found)
            node.send_signal(signal.SIGTERM)
            cluster.wait(lambda: node.poll() is not None, "the node does not end")
            wanted = {"image": 5, "ranking": 100}
            cluster.wait(lambda: all((found - before)[kind, 200] >= wanted[kind] for kind in wanted), "no load")


def burst(cluster: Cluster) -> None:
    """`deploy/burst.py` against two replicas of the engine: Ray's own counts say who had what."""
    command = [sys.executable, REPOSITORY / "deploy" / "burst.py", "--url", f"http://127.0.0.1:{cluster.port}"]
    options = ["--replicas", "2", "--metrics", cluster.head.metrics]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def replicas_of(node: subprocess.Popen[bytes]) -> set[str]:
    """The deployments that have a replica on a node."""
    titles = [Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in _session_of(node)]
    return {name for title in titles for name in re.findall(r"^ray::ServeReplica:plait:([^ .#\0]+)", title)}


@contextmanager
def loaded(cluster: Cluster) -> Iterator[Counter]:
    """Images and rankings meanwhile, without a pause; at the end each was answered, and none asked to come back. Counts
    answers by kind and status."""
    stop, found = threading.Event(), Counter()
    wrong: list[Any] = []

    def load(one, pause_s):
        while not stop.is_set():
            status, answer = one()
            found[one.__name__, status] += 1
            if status != 200:
                wrong.append((one.__name__, status, answer))
            stop.wait(pause_s)

    loads = [(cluster.image, 0.3), (cluster.ranking, 0.05), (cluster.ranking, 0.05)]
    threads = [threading.Thread(target=load, args=each) for each in loads]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join(READY_S)
    print(dict(found))
    assert wrong == []
