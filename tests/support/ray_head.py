"""A Ray head as an operator starts one: `ray start --head` with a dashboard and a token, on loopback."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from plait.server.environment import RAY_ENVIRONMENT
from support.server import free_port

_START_S = 120.0


@dataclass(frozen=True)
class RayHead:
    """Where its dashboard and its node's metrics are, where nodes join, and the environment in which commands find its
    token."""

    dashboard: str
    metrics: str
    address: str
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

    @contextmanager
    def node(self, num_cpus: int, *, drain_s: int) -> Iterator[subprocess.Popen[bytes]]:
        """Another node, as a pod starts one; asked to end it has `drain_s`."""
        options = {
            "address": self.address,
            "dashboard-agent-listen-port": free_port(),
            "dashboard-agent-grpc-port": free_port(),
            "metrics-export-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "node-ip-address": self.address.partition(":")[0],
            "num-cpus": num_cpus,
            "object-store-memory": 200 << 20,
        }
        environ = {**self.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(drain_s)}
        command = [*_START, *_options(options)]
        process = subprocess.Popen(command, env=environ, start_new_session=True, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            assert any(b"Ray runtime started" in line for line in process.stdout), "the node did not start"
            yield process
        finally:
            _end(process)


_START = (Path(sys.executable).parent / "ray", "start", "--block")


def _options(options: Mapping[str, object]) -> list[str]:
    return [f"--{key}={value}" for key, value in options.items()]


@contextmanager
def ray_head(num_cpus: int = 6, *, host: str = "127.0.0.1") -> Iterator[RayHead]:
    """A head of our own, gone with all its processes afterwards (`ray stop` would end everybody's). `host`: its
    address, which is not loopback if nodes are to join."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        environ = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **RAY_ENVIRONMENT}
        # Ray takes loopback for a mistake where other machines may join (`plait.server.cluster`).
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0" if host == "127.0.0.1" else "1"
        environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # else it waits for 30 s for replicas to move elsewhere
        dashboard, metrics, port = free_port(), free_port(), free_port()
        options = {
            "port": port,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "dashboard-agent-grpc-port": free_port(),
            "metrics-export-port": metrics,
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "node-ip-address": host,
            "num-cpus": num_cpus,
            "object-store-memory": 200 << 20,
            "temp-dir": f"{folder}/r",
        }
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*_START, "--head", "--include-dashboard=true", *_options(options)],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
            try:
                head = RayHead(
                    dashboard=f"http://127.0.0.1:{dashboard}",
                    metrics=f"http://127.0.0.1:{metrics}/metrics",
                    address=f"{host}:{port}",
                    environ=environ,
                )
                _wait(head, process, Path(folder) / "log")
                yield head
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
    _kill_session(process.pid)


def _wait(head: RayHead, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{head.dashboard}/api/gcs_healthz", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise AssertionError(f"Ray did not start:\n{log.read_text()[-3000:]}")


def _kill_session(leader: int) -> None:
    """Kill what is left of the session that the head led."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                pid = int(entry.name)
                if os.getsid(pid) == leader:
                    os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
