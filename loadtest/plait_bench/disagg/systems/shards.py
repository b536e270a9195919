"""A package's tables on shards, each in a process of its own, over shared memory.

`python -m plait_bench.disagg.systems.shards FOLDER SHARDS NUMBER ADDRESS` is one of them. Its first input line is the
secret; it prints `ok` when it listens, and ends with its standard input.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from plait_bench.disagg.systems.worker_pipes import PipedProcess
from plait_disagg.package import Package, open_package
from plait_disagg.package.halves import CompiledSparse
from plait_disagg.package.sharding import Sharding, held_pieces, identity, plan_of, remote_tables
from plait_disagg.tables.remote import RemoteShard, wait_for_shards
from plait_disagg.tables.rows_wire import ShardIdentity
from plait_disagg.workers.shard import ShardWorker
from plait_fabric import connect, listen, new_secret
from plait_fabric.gil import shorten_gil_interval
from plait_fabric.rpc.replicas import ReplicaLink
from plait_serving.deployments.fabric_endpoints import FABRIC

__all__ = ["on_shards"]

_MODULE = "plait_bench.disagg.systems.shards"


@contextmanager
def on_shards(package: Package, count: int) -> Iterator[tuple[CompiledSparse, list[int]]]:
    """Start so many shards; yields the CN half that asks them, in this process, and their process ids."""
    secret, made = new_secret(), list[RemoteShard]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-bench-"))
        addresses = [f"shm://{folder}/{number}" for number in range(count)]
        children = []
        for number, address in enumerate(addresses):
            arguments = (str(package.folder), str(count), str(number), address)
            children.append(PipedProcess(f"shard {number}", _MODULE, *arguments))
            stack.callback(children[-1].end)
        for child in children:
            if (failed := child.tell(secret.hex())) is not None:
                raise failed

        def reach(identity: ShardIdentity) -> RemoteShard:
            address = addresses[identity.shard]
            made.append(RemoteShard(lambda _: _link(address, secret), identity))
            stack.callback(made[-1].close)
            return made[-1]

        tables = remote_tables(package, plan_of(package, Sharding(shards=count)), reach)
        tables.version = package.manifest.version
        wait_for_shards(made)
        yield package.sparse(tables), [child.pid for child in children]


def _link(address: str, secret: bytes) -> ReplicaLink:
    return ReplicaLink(replica=address, channel=connect(address, secret=secret, options=FABRIC))


def main(folder: str, count: str, number: str, address: str) -> None:
    """Serve one shard."""
    shorten_gil_interval()  # as the deployments do
    secret = bytes.fromhex(sys.stdin.readline().strip())
    package = open_package(Path(folder), ahead=False)
    plan = plan_of(package, Sharding(shards=int(count)))
    listener = listen(address, secret=secret, options=FABRIC)
    who, pieces = identity(package, plan, int(number)), held_pieces(package, plan, int(number))
    worker = ShardWorker(who, pieces, [listener], version=package.manifest.version)
    print("ok", flush=True)
    sys.stdin.read()
    worker.stop(drain_s=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
