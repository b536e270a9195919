"""The peers, closed loops without pauses: Locust's fast client with two processes, and wrk with two threads."""

from __future__ import annotations

import shutil
from pathlib import Path

from plait_bench.commands import environment
from plait_bench.errors import SystemUnavailable
from plait_bench.loadtest.window import NoopServer, ThroughputWindow, measure

LOCUST = "locust==2.47.0"
PROCESSES = 2
USERS = (16, 64, 256)
"""The numbers of concurrent callers to try; the best one is measured."""

_SETTLE_S = 3.0  # users start within the first second; then the rate is steady
_LOCUSTFILE = '''"""A user that asks without a pause."""

from locust import FastHttpUser, constant, task


class Asks(FastHttpUser):
    """See above."""

    wait_time = constant(0)

    @task
    def ask(self):
        """The one request."""
        self.client.get("/")
'''


def install_locust(folder: Path) -> Path:
    """Install Locust into its own virtual environment; return the path of its command. Raises `SystemUnavailable`."""
    command = environment(folder / LOCUST.replace("==", "-"), (LOCUST,)).with_name("locust")
    (folder / "locustfile.py").write_text(_LOCUSTFILE, encoding="utf-8")
    return command


def locust(command: Path, server: NoopServer, users: int, *, seconds: float) -> ThroughputWindow:
    """Run Locust once. Raises `SystemFailed`."""
    whole_s = int(seconds + _SETTLE_S + 2)
    arguments = ["--locustfile", str(command.parents[2] / "locustfile.py"), "--host", server.url, "--headless"]
    arguments += ["--users", str(users), "--spawn-rate", str(users), "--processes", str(PROCESSES)]
    arguments += ["--run-time", f"{whole_s}s", "--only-summary", "--loglevel", "ERROR"]
    window, _ = measure([str(command), *arguments], server, settle_s=_SETTLE_S, seconds=seconds)
    return window


def find_wrk() -> Path:
    """Return the wrk on PATH (Debian: `apt install wrk`). Raises `SystemUnavailable`."""
    found = shutil.which("wrk")
    if found is None:
        raise SystemUnavailable("wrk is not on PATH")
    return Path(found)


def wrk(command: Path, server: NoopServer, connections: int, *, seconds: float) -> ThroughputWindow:
    """Run wrk once. Raises `SystemFailed`."""
    whole_s = int(seconds + 3)
    arguments = [f"--threads={PROCESSES}", f"--connections={connections}", f"--duration={whole_s}s", server.url]
    window, _ = measure([str(command), *arguments], server, settle_s=1.0, seconds=seconds)
    return window
