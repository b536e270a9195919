"""A model's workers in processes of their own, and a client connected to them over shared memory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from plait_bench.disagg.load.asking import wait_until_ready
from plait_bench.disagg.systems.worker_pipes import PipedProcess
from plait_bench.errors import SystemFailed
from plait_disagg.package import Package
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.workers.remote import RemoteRanker
from plait_fabric import connect, new_secret
from plait_fabric.rpc.replicas import ReplicaLink
from plait_serving.deployments.fabric_endpoints import FABRIC

__all__ = ["WorkerProcess", "served"]


class WorkerProcess(PipedProcess):
    """A process that runs the `worker` module."""

    def __init__(self, folder: Path, role: str, secret: bytes, *addresses: str) -> None:
        """Start the process and wait until it listens. Raises `SystemFailed`."""
        super().__init__(role, "plait_bench.disagg.systems.worker", str(folder), role, *addresses)
        if self.tell(secret.hex()) is not None:
            raise SystemFailed(f"the {role} did not start")

    def configure(self, knobs: WorkerKnobs) -> None:
        """Apply the knobs. Raises `SystemFailed`."""
        if (failed := self.tell(f"knobs {json.dumps(asdict(knobs))}")) is not None:
            raise failed


@contextmanager
def served(package: Package, mode: str) -> Iterator[tuple[RemoteRanker, Sequence[WorkerProcess]]]:
    """Run a model's workers and yield a connected ranker and the processes.

    `mode`: whole, or split into a CN and an HN. Raises `SystemFailed`.
    """
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
            lambda _: ReplicaLink(replica=mode, channel=connect(front, secret=secret, options=FABRIC)),
        )
        stack.callback(ranker.core.stop, drain_s=0.0)
        wait_until_ready(ranker.core)
        yield ranker, processes
