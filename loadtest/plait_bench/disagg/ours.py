"""plait without Ray: the packaged model behind plait's own application.

Started with FOLDER THREADS whole|split [in_children] it prints its port. `whole` runs both halves in this process; with
`split` the dense half runs in a process of its own, or in several. `in_children`: this process handles only HTTP, as
the ingress of `plait serve` does, so that HTTP and the model do not share the GIL. THREADS is the number per process,
or, for `split`, `CN+HN`, or, without `in_children`, `CN+HN+HN` and so on. Processes communicate over shared memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plait_bench.benchmark import child_command
from plait_bench.disagg.peer import announce
from plait_bench.errors import SystemFailed
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.queue.jobs import Core
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteRanker
from plait_disagg.workers.whole import WholeCore, WholeRanker
from plait_fabric import connect, listen, new_secret
from plait_fabric.gil import shorten_gil_interval
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from plait_serving.deployments.fabric_endpoints import FABRIC
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import ServedRanker

Dial = Callable[[frozenset[str]], ReplicaLink]

_LOOK_S, _PATIENCE_S = 0.02, 60.0
_CHILDREN: list[subprocess.Popen[bytes]] = []
"""The child processes, kept because a child exits when its standard input is closed."""


def whole(package: Package, threads: int) -> Ranker:
    """Open a ranker with both halves in this process."""
    knobs = WorkerKnobs(threads=threads)
    return WholeRanker(package.card(), package.sparse(), package.dense(prepares=True), knobs=knobs)


def split(package: Package, threads: int, hns: list[int]) -> Ranker:
    """Open a ranker with the sparse half in this process and the dense half in one child per entry of `hns`, its
    threads; waits until all are connected. Raises `SystemFailed`."""
    dials = {f"hn-{number}": start_child(package, count, "hn")[1] for number, count in enumerate(hns)}

    def connect_to_one(left_out: frozenset[str]) -> ReplicaLink:
        for name, dial in dials.items():
            if name not in left_out:
                return replace(dial(left_out), replica=name)
        raise NoReplica("there is no other")

    knobs = WorkerKnobs(threads=threads)
    core = CnCore(package.card(mode="split"), package.sparse(), connect_to_one, hns=len(hns), knobs=knobs)
    _wait(lambda: core.metrics()["hns"] == len(hns), f"not all of {len(hns)} HNs can be reached")
    return CoreRanker(core)


def in_children(package: Package, mode: str, threads: int, hn_threads: int) -> Ranker:
    """Open a ranker with both halves in one child, or each half in its own child."""
    if mode == "whole":
        dial = start_child(package, threads, "whole")[1]
    else:
        hn_address, _ = start_child(package, hn_threads, "hn")
        dial = start_child(package, threads, "cn", hn_address)[1]
    ranker = RemoteRanker(package.manifest.name, dial)
    wait_until_ready(ranker.core)
    return ranker


def wait_until_ready(core: Core) -> None:
    """Wait until a core can answer. Raises `SystemFailed` if that takes a minute."""
    _wait(lambda: core.ready() is None, "the worker is not ready")


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > until_s:
            raise SystemFailed(otherwise)
        time.sleep(_LOOK_S)


_SECRET = new_secret()


def start_child(package: Package, threads: int, role: str, *hn: str) -> tuple[str, Dial]:
    """Start a worker (`serve_worker`) in a child, which ends with this process; return its address, and what connects
    to it over shared memory. Raises `SystemFailed`."""
    address = f"shm://{tempfile.mkdtemp(prefix='plait-bench-')}/{role}"
    command = child_command(__name__, str(package.folder), str(threads), role, address, *hn)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(_SECRET.hex().encode() + b"\n")
    child.stdin.flush()
    if not child.stdout.readline():
        raise SystemFailed(f"the {role} did not start")
    _CHILDREN.append(child)
    return address, _dial(role, address, _SECRET)


def _dial(replica: str, address: str, secret: bytes) -> Dial:
    return lambda _: ReplicaLink(replica=replica, channel=connect(address, secret=secret, options=FABRIC))


def serve_worker(package: Package, threads: int, role: str, address: str, *hn: str) -> None:
    """Run a worker in the child: prints `ready` once it listens, and ends with its standard input."""
    secret = bytes.fromhex(sys.stdin.readline().strip())
    listener, knobs = listen(address, secret=secret, options=FABRIC), WorkerKnobs(threads=threads)
    stop: Callable[..., object]
    if role == "hn":
        stop = HnWorker(package.card(), package.dense(prepares=True), [listener], knobs=knobs).stop
    else:
        core: CnCore | WholeCore
        if role == "cn":
            dial = _dial("hn", hn[0], secret)
            core = CnCore(package.card(mode="split"), package.sparse(), dial, knobs=knobs)
        else:
            core = WholeCore(package.card(), package.sparse(), package.dense(prepares=True), knobs=knobs)
        stop = CoreServer(core, [listener]).stop
        wait_until_ready(core)
    print("ready", flush=True)
    sys.stdin.read()
    stop(drain_s=0)


def main(folder: str, threads: str, mode: str, *rest: str) -> None:
    """Serve the package in one of the modes and announce the address; or be a child."""
    shorten_gil_interval()  # as the server's processes do
    package = open_package(Path(folder))
    own, *hns = map(int, threads.split("+"))
    hns = hns or [own]
    if mode in ("hn", "cn") or (mode == "whole" and rest and rest[0].startswith("shm:")):
        serve_worker(package, own, mode, *rest)
        return
    if rest:
        ranker = in_children(package, mode, own, hns[0])
    else:
        ranker = split(package, own, hns) if mode == "split" else whole(package, own)
    model = ServedRanker(ranker=ranker, items=package.items)
    announce(create_app(None, HttpSettings(), ranking=LocalRankingService({package.manifest.name: model})))
