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
    """Where its dashboard and its node's metrics are, and the environment in which commands find its token."""

    dashboard: str
    metrics: str
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
def ray_head(num_cpus: int = 6) -> Iterator[RayHead]:
    """A head of our own, gone with all its processes afterwards (`ray stop` would end everybody's)."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(secrets.token_hex(32))
        environ = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **RAY_ENVIRONMENT}
        # Ray takes loopback for a mistake where other machines may join (`plait.server.cluster`).
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # else it waits for 30 s for replicas to move elsewhere
        dashboard, metrics = free_port(), free_port()
        command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", "--include-dashboard=true"]
        options = {
            "port": free_port(),
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "dashboard-agent-grpc-port": free_port(),
            "metrics-export-port": metrics,
            "ray-client-server-port": free_port(),
            "min-worker-port": 0,
            "max-worker-port": 0,
            "node-ip-address": "127.0.0.1",
            "num-cpus": num_cpus,
            "object-store-memory": 200 << 20,
            "temp-dir": f"{folder}/r",
        }
        with (Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                [*command, *(f"--{key}={value}" for key, value in options.items())],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )
            try:
                head = RayHead(f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{metrics}/metrics", environ)
                _wait(head, process, Path(folder) / "log")
                yield head
            finally:
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
