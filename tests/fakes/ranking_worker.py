"""Workers of the tiny model in processes of their own. ``python -m fakes.ranking_worker`` imports everything once and
forks a worker for each line ``cn|hn|whole ADDRESS SECRET SLOW_S HN...`` that it reads. It answers with the worker's id
when that listens, of a CN when all HNs are there too. Workers work until they are killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from fakes import ranking_model as kit
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.whole import WholeCore
from plait_fabric import Unreachable, connect, listen
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink

_QUICK = Backoff(first_s=0.05, max_s=0.2)


def work(ready: int, role: str, address: str, secret_hex: str, slow_s: str, *hns: str) -> None:
    """One worker; it writes to ``ready``. ``slow_s``: what a batch takes, of a CN's and a whole one's lookups."""
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

    worker: object
    if role == "hn":
        worker = HnWorker(kit.CARD, kit.FakeDense(slow_s=float(slow_s)), [listener])
    elif role == "whole":
        sparse = kit.FakeSparse(slow_s=float(slow_s))
        worker = CoreServer(WholeCore(kit.CARD, sparse, kit.FakeDense()), [listener])
    else:
        core = CnCore(kit.CARD, kit.FakeSparse(slow_s=float(slow_s)), dial, hns=len(hns), backoff=_QUICK)
        worker = CoreServer(core, [listener])
        while core.metrics()["hns"] < len(hns):
            time.sleep(0.02)
    os.write(ready, b"x")
    threading.Event().wait()
    del worker


def main() -> None:
    """See the module docstring."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work(write, *line.split())
            finally:
                os._exit(1)
        os.close(write)
        os.read(read, 1)
        os.close(read)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
