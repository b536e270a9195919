"""Hosts on one machine: network namespaces with a cable each to one switch. Needs root and the `ip` command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_SOURCES = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("disagg", "kernels", "tests")]


class Hosts:
    """Hosts 1 to ``count`` with the addresses 10.213.0.1 and on; none of them reaches anything else."""

    def __init__(self, prefix: str, count: int) -> None:
        self._prefix = prefix
        self._count = count

    def name(self, host: int) -> str:
        """Of the namespace."""
        return f"{self._prefix}{host}"

    @staticmethod
    def address(host: int) -> str:
        """Where the others reach it."""
        return f"10.213.0.{host}"

    def build(self) -> None:
        """Makes the switch (namespace 0) and the hosts. Raises CalledProcessError."""
        self._ip("netns", "add", self.name(0))
        self._ip("-n", self.name(0), "link", "add", "switch", "type", "bridge")
        self._ip("-n", self.name(0), "link", "set", "switch", "up")
        for host in range(1, self._count + 1):
            name = self.name(host)
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", f"port{host}")
            self._ip("-n", name, "link", "set", f"port{host}", "netns", self.name(0))
            self._ip("-n", self.name(0), "link", "set", f"port{host}", "master", "switch", "up")
            self._ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "cable")
            self._ip("-n", name, "link", "set", "cable", "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    def plug(self, host: int, *, connected: bool) -> None:
        """Pulls a host's cable out of the switch, or puts it in: nobody is told, packets just go nowhere."""
        master = ("master", "switch") if connected else ("nomaster",)
        self._ip("-n", self.name(0), "link", "set", f"port{host}", *master)

    def start(self, host: int, code: str, *arguments: str) -> subprocess.Popen[str]:
        """Runs Python code on a host, with pipes."""
        command = ["ip", "netns", "exec", self.name(host), sys.executable, "-c", code, *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(_SOURCES)}
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
        )

    def remove(self) -> None:
        """Takes everything down; what is not there does not matter."""
        for host in range(self._count + 1):
            subprocess.run(["ip", "netns", "del", self.name(host)], check=False, capture_output=True)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """That many hosts. Skips the test where there can be none."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command (iproute2)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = Hosts(f"plait-{os.getpid()}-", count)
    try:
        try:
            made.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted: {error.cmd}: {error.stderr.strip()}")
        yield made
    finally:
        made.remove()


def said(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Gives a process a line."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def stop(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ends them."""
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
