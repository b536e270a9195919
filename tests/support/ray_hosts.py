"""A Ray whose nodes are hosts of `fabric_hosts`: each has an address, a folder and an identity of its own, so that they
reach each other over TCP only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from support.cluster import TESTS
from support.fabric_hosts import Hosts, hosts

_PORT = 6379
_OBJECTS_BYTES = 80 << 20
_PATIENCE_S = 120.0
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # a server that a test started in this process may have said 0: one host
    # For busy machines: Serve gives its proxy 5 s to begin and 10 s to answer, Ray its processes 30 and 60.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_register_timeout_seconds": "240",
    # A dead host is given up after some seconds, one that is only slow not before half a minute.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "6",
}
_STARTED = "Ray runtime started"
_ENTER = 'mount --bind "$0" "$1" && mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id && shift && exec "$@"'
"""Its own folder at the path that all hosts know, and a boot id, by which plait tells hosts apart."""


class RayHosts:
    """Host 1 is Ray's head."""

    def __init__(self, made: Hosts, folder: Path) -> None:
        self.hosts = made
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
        (folder / "ray").mkdir()

    @property
    def address(self) -> str:
        """Where nodes and drivers attach."""
        return f"{self.hosts.address(1)}:{_PORT}"

    def join(self, host: int, *, cpus: int, gpus: int = 0, labels: Mapping[str, str]) -> None:
        """Starts a host's node and waits until it is there. Host 1 first; one at a time, since Ray gives a node 30 s to
        come up, and a second chance, since that may be too little on a very busy machine."""
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command = [
            *ray,
            *([*head, f"--temp-dir={self._folder / 'ray'}"] if host == 1 else [f"--address={self.address}"]),
            f"--node-ip-address={self.hosts.address(host)}",
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
            f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
            f"--object-store-memory={_OBJECTS_BYTES}",
            "--include-log-monitor=false",
        ]
        if not (self._comes_up(host, command) or self._comes_up(host, command)):
            raise AssertionError(f"Ray did not start on host {host}\n{self.log(host)}")

    def _comes_up(self, host: int, command: list[str]) -> bool:
        before = self.log(host, 1 << 30).count(_STARTED)
        node = self.run(host, *command)
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s and node.poll() is None:
            if self.log(host, 1 << 30).count(_STARTED) > before:
                return True
            time.sleep(0.2)
        self.kill(host)
        return False

    def run(self, host: int, *command: str, pipes: bool = False) -> subprocess.Popen[str]:
        """Starts a program on a host."""
        own = self._folder / str(host)
        if not own.exists():
            (own / "tmp").mkdir(parents=True)
            (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        common = self._folder / "ray"
        enter = ["ip", "netns", "exec", self.hosts.name(host), "sh", "-c", _ENTER, str(own), str(common)]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | _ENVIRONMENT | self._token | {"TMPDIR": str(common / "tmp"), "PYTHONPATH": path}
        with (own / "log").open("a") as log:
            pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
            made = subprocess.Popen(
                [*enter, *command],
                stdin=pipe,
                stdout=pipe if pipes else log,
                stderr=log,
                env=environment,
                text=True,
                bufsize=1,
            )
        self._started.append(made)
        return made

    def log(self, host: int, characters: int = 4_000) -> str:
        """What the programs of a host printed last."""
        path = self._folder / str(host) / "log"
        return path.read_text(errors="replace")[-characters:] if path.exists() else ""

    def kill(self, host: int) -> None:
        """Kills all processes of a host, as a machine dies that loses power."""
        while found := self._processes(host):  # some may be starting others
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)

    def _processes(self, host: int) -> list[int]:
        command = ["ip", "netns", "pids", self.hosts.name(host)]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]

    def stop(self, count: int) -> None:
        """Kills everything."""
        for host in range(1, count + 1):
            self.kill(host)
        for process in self._started:
            process.wait(_PATIENCE_S)


@contextmanager
def ray_hosts(count: int) -> Iterator[RayHosts]:
    """Hosts without a Ray yet; everything is gone afterwards. Raises `NotPermitted`."""
    folder = Path(tempfile.mkdtemp(prefix="rh-"))
    try:
        with hosts(count) as made:
            rays = RayHosts(made, folder)
            try:
                yield rays
            finally:
                rays.stop(count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
