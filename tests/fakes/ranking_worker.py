"""A worker of the tiny model in a process of its own: ``python -m fakes.ranking_worker cn|hn ADDRESS SECRET HN...``.

It says "ready" when it listens, a CN when all HNs are there too, and works until it is killed.
"""

from __future__ import annotations

import sys
import threading
import time

from fakes import ranking_model as kit
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_fabric import Unreachable, connect, listen
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink

_QUICK = Backoff(first_s=0.05, max_s=0.2)


def main(role: str, address: str, secret_hex: str, *hns: str) -> None:
    """See the module docstring."""
    secret = bytes.fromhex(secret_hex)
    listener = listen(address, secret=secret)

    def dial(left_out: frozenset[str]) -> ReplicaLink:
        for hn in hns:
            if hn not in left_out:
                try:
                    return ReplicaLink(replica=hn, channel=connect(hn, secret=secret))
                except Unreachable:
                    continue
        raise NoReplica("nobody listens")

    if role == "hn":
        worker: object = HnWorker(kit.CARD, kit.FakeDense(slow_s=0.005), [listener])
    else:
        core = CnCore(kit.CARD, kit.FakeSparse(slow_s=0.001), dial, hns=len(hns), backoff=_QUICK)
        worker = CoreServer(core, [listener])
        while core.metrics()["hns"] < len(hns):
            time.sleep(0.02)
    print("ready", flush=True)
    threading.Event().wait()
    del worker


if __name__ == "__main__":
    main(*sys.argv[1:])
