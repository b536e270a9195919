"""A model's workers in processes of their own, and a client that is connected to them over shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from plait_bench.disagg.asking import wait_until_ready
from plait_bench.errors import SystemFailed
from plait_disagg.fabric import connect, new_secret
from plait_disagg.package import Package
from plait_disagg.replicas import Link
from plait_disagg.workers.knobs import WorkerKnobs
from plait_disagg.workers.remote import RemoteRanker
from plait_serving.deployments.reach import FABRIC

__all__ = ["WorkerProcess", "served"]


class WorkerProcess:
    """A process of `worker`, and a `Fleet` of one."""

    def __init__(self, folder: Path, role: str, secret: bytes, *addresses: str) -> None:
        """Waits until it listens. Raises `SystemFailed`."""
        command = [sys.executable, "-m", "plait_bench.disagg.worker", str(folder), role, *addresses]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._role = role
        if self._told(secret.hex()) is not None:
            raise SystemFailed(f"the {role} did not start")

    def stage(self, folder: Path) -> Mapping[str, Exception | None]:
        """See `Fleet`."""
        return {self._role: self._told(f"stage {folder}")}

    def switch(self, version: str) -> Mapping[str, Exception | None]:
        """See `Fleet`."""
        return {self._role: self._told(f"switch {version}")}

    def configure(self, knobs: WorkerKnobs) -> None:
        """Raises `SystemFailed`."""
        if (failed := self._told(f"knobs {json.dumps(asdict(knobs))}")) is not None:
            raise failed

    def end(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()

    def _told(self, line: str) -> SystemFailed | None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(line + "\n")
        stdin.flush()
        said = stdout.readline().strip()
        return None if said == "ok" else SystemFailed(said or "the worker ended")


@contextmanager
def served(package: Package, mode: str) -> Iterator[tuple[RemoteRanker, Sequence[WorkerProcess]]]:
    """``mode``: whole, or split into a CN and an HN. Raises `SystemFailed`."""
    secret = new_secret()
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as sockets, ExitStack() as stack:
        front, hn = f"shm://{sockets}/front", f"shm://{sockets}/hn"
        roles = [("whole", front)] if mode == "whole" else [("hn", hn), ("cn", front, hn)]
        processes: list[WorkerProcess] = []
        for role, *addresses in roles:
            processes.append(WorkerProcess(package.folder, role, secret, *addresses))
            stack.callback(processes[-1].end)
        ranker = RemoteRanker(
            package.manifest.name,
            lambda _: Link(replica=mode, channel=connect(front, secret=secret, options=FABRIC)),
        )
        stack.callback(ranker.core.stop, drain_s=0.0)
        wait_until_ready(ranker.core)
        yield ranker, processes
