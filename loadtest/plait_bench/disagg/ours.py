"""plait without Ray: the packaged model behind plait's own application.

With `split` the dense half runs in a process of its own, or in several. `apart`: the serving process handles only HTTP,
as the ingress of `plait serve` does, so that HTTP and the model do not share the GIL. Processes communicate over shared
memory.
"""

from __future__ import annotations

import atexit
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait_bench.benchmark import said, started
from plait_bench.disagg.peer import announce
from plait_bench.errors import SystemFailed
from plait_disagg.package.read import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from plait_disagg.workers.whole import WholeCore
from plait_fabric import connect, listen, new_secret
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from plait_serving.deployments.fabric_endpoints import FABRIC
from plait_serving.deployments.process import shorten_gil_interval
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService, ServedRanker

Dial = Callable[[frozenset[str]], ReplicaLink]

_LOOK_S, _PATIENCE_S = 0.02, 60.0
_CHILDREN = ExitStack()
atexit.register(_CHILDREN.close)


def whole(package: Package, threads: int) -> Ranker:
    """Open a ranker with both halves in this process."""
    knobs = WorkerKnobs(threads=threads)
    return CoreRanker(WholeCore(package.card(), package.sparse(), package.dense(prepares=True), knobs=knobs))


def split(package: Package, threads: int, hns: Sequence[int]) -> Ranker:
    """Open a ranker with the sparse half in this process and the dense half in one child per entry of `hns`, its
    threads; waits until all are connected. Raises `SystemFailed`."""
    dials = {f"hn-{number}": start_child(package, count, "hn") for number, count in enumerate(hns)}

    def connect_to_one(left_out: frozenset[str]) -> ReplicaLink:
        for name, dial in dials.items():
            if name not in left_out:
                return replace(dial(left_out), replica=name)
        raise NoReplica("there is no other")

    knobs = WorkerKnobs(threads=threads)
    core = CnCore(package.card(mode="split"), package.sparse(), connect_to_one, hns=len(hns), knobs=knobs)
    _wait(lambda: core.metrics()["hns"] == len(hns), f"not all of {len(hns)} HNs can be reached")
    return CoreRanker(core)


def apart(package: Package, threads: int) -> Ranker:
    """Open a ranker with both halves in one child."""
    ranker = CoreRanker(RemoteCore(package.manifest.name, start_child(package, threads, "whole")))
    _wait(lambda: ranker.core.ready() is None, "the worker is not ready")
    return ranker


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise SystemFailed(otherwise)
        time.sleep(_LOOK_S)


_SECRET = new_secret()


def start_child(package: Package, threads: int, role: str) -> Dial:
    """Start a worker, `hn` or `whole`, in a child, which ends with this process; return what connects to it over shared
    memory. Raises `SystemFailed`."""
    address = f"shm://{tempfile.mkdtemp(prefix='plait-bench-')}/{role}"
    said(_CHILDREN.enter_context(started(_serve_worker, package.folder, threads, role, address, _SECRET)))
    return lambda _: ReplicaLink(replica=role, channel=connect(address, secret=_SECRET, options=FABRIC))


def _serve_worker(folder: Path, threads: int, role: str, address: str, secret: bytes) -> None:
    """Run a worker in the child: prints `ready` once it listens, and ends with its standard input."""
    shorten_gil_interval()  # as the server's processes do
    package = open_package(folder)
    listener, knobs = listen(address, secret=secret, options=FABRIC), WorkerKnobs(threads=threads)
    stop: Callable[..., object]
    if role == "hn":
        stop = HnWorker(package.card(), {"": package.dense(prepares=True)}, [listener], knobs=knobs).stop
    else:
        core = WholeCore(package.card(), package.sparse(), package.dense(prepares=True), knobs=knobs)
        stop = CoreServer(core, [listener]).stop
        _wait(lambda: core.ready() is None, "the worker is not ready")
    print("ready", flush=True)
    sys.stdin.read()
    stop(drain_s=0)


def serve(folder: Path, opened: Callable[..., Ranker], *how: Any) -> None:
    """Serve the package by `whole`, `split` or `apart`, and announce the address."""
    shorten_gil_interval()
    package = open_package(folder)
    model = ServedRanker(ranker=opened(package, *how), items=package.items)
    announce(create_app(None, HttpSettings(), ranking=LocalRankingService({package.manifest.name: model})))
