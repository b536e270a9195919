"""plait without Ray: the packaged model behind plait's own application.

`python -m plait_bench.disagg.systems.ours FOLDER THREADS whole|split [in_children]` prints its port. `whole` runs
both halves in this process; with `split` the dense half runs in a process of its own (`dense`), or in several.
`in_children`: this process handles only HTTP, as the ingress of `plait serve` does, so that HTTP and the model do
not share the GIL. THREADS is the number per process, or, for `split`, `CN+HN`, or, without `in_children`, `CN+HN+HN`
and so on. Processes communicate over shared memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from plait_bench.disagg.systems.served import served
from plait_bench.disagg.systems.serving import announce
from plait_bench.errors import SystemFailed
from plait_disagg.package import Package, open_package
from plait_disagg.protocols import Ranker
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeRanker
from plait_fabric import connect, listen, new_secret
from plait_fabric.gil import shorten_gil_interval
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from plait_serving.deployments.fabric_endpoints import FABRIC
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import ServedRanker


def whole(package: Package, threads: int) -> Ranker:
    """Open a ranker with both halves in this process."""
    return WholeRanker(
        package.card(), package.sparse(), package.dense(prepares=True), knobs=WorkerKnobs(threads=threads)
    )


@contextmanager
def in_children(package: Package, mode: str, threads: int, hn_threads: int) -> Iterator[Ranker]:
    """Open a ranker with both halves in one child, or each half in its own child."""
    with served(package, mode) as (ranker, processes):
        for process in processes:
            process.configure(WorkerKnobs(threads=hn_threads if process.role == "hn" else threads))
        yield ranker


def split(package: Package, threads: int, hns: Sequence[int]) -> Ranker:
    """Open a ranker with the sparse half in this process and the dense half in one child per entry of `hns`, its
    threads; waits until all are connected. Raises `SystemFailed`."""
    dials = {f"hn-{number}": start_dense(package, count) for number, count in enumerate(hns)}

    def connect_to_one(left_out: frozenset[str]) -> ReplicaLink:
        for name, dial in dials.items():
            if name not in left_out:
                return replace(dial(left_out), replica=name)
        raise NoReplica("there is no other")

    knobs = WorkerKnobs(threads=threads)
    core = CnCore(package.card(mode="split"), package.sparse(), connect_to_one, hns=len(hns), knobs=knobs)
    until_s = time.monotonic() + _PATIENCE_S
    while core.metrics()["hns"] < len(hns):
        if time.monotonic() > until_s:
            raise SystemFailed(f"not all of {len(hns)} HNs can be reached")
        time.sleep(_LOOK_S)
    return CoreRanker(core)


def start_dense(package: Package, threads: int) -> Callable[[frozenset[str]], ReplicaLink]:
    """Start a child with the dense half, which ends with this process; return what connects to it over shared
    memory."""
    address = f"shm://{tempfile.mkdtemp(prefix='plait-bench-')}/hn"
    secret = new_secret()
    command = [
        sys.executable,
        "-m",
        "plait_bench.disagg.systems.ours",
        str(package.folder),
        str(threads),
        "dense",
        address,
    ]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(secret.hex().encode() + b"\n")
    child.stdin.flush()
    child.stdout.readline()
    _CHILDREN.append(child)
    return lambda _: ReplicaLink(replica="hn", channel=connect(address, secret=secret, options=FABRIC))


_LOOK_S, _PATIENCE_S = 0.02, 60.0

_CHILDREN: list[subprocess.Popen[bytes]] = []
"""The child processes, kept because a child exits when its standard input is closed."""


def serve_dense(package: Package, threads: int, address: str) -> None:
    """Run the dense half in the child: prints `ready` once it listens, and ends with its standard input."""
    secret = bytes.fromhex(sys.stdin.readline().strip())
    worker = HnWorker(
        package.card(),
        package.dense(prepares=True),
        [listen(address, secret=secret, options=FABRIC)],
        knobs=WorkerKnobs(threads=threads),
    )
    print("ready", flush=True)
    sys.stdin.read()
    worker.stop(drain_s=0)


def main(folder: Path, threads: str, mode: str, *rest: str) -> None:
    """Serve the package in one of the modes and announce the address."""
    shorten_gil_interval()  # as the server's processes do
    package = open_package(folder)
    own, *hns = map(int, threads.split("+"))
    hns = hns or [own]
    if mode == "dense":
        serve_dense(package, own, *rest)
        return
    with ExitStack() as stack:
        if rest:
            ranker: Ranker = stack.enter_context(in_children(package, mode, own, hns[0]))
        else:
            ranker = split(package, own, hns) if mode == "split" else whole(package, own)
        model = ServedRanker(ranker=ranker, items=package.items)
        announce(create_app(None, HttpSettings(), ranking=LocalRankingService({package.manifest.name: model})))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
