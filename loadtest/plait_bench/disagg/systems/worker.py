"""A worker process that can be refreshed and reconfigured like a deployment, through its standard input.

`python -m plait_bench.disagg.systems.worker FOLDER whole|cn|hn ADDRESS [HN_ADDRESS]`. The first input line is the
secret; then `stage FOLDER`, `switch VERSION` or `knobs JSON`. It prints one line when it listens, and one for each
command: `ok`, or an error. It ends with its standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TypeAlias

from plait_bench.disagg.load.asking import wait_until_ready
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.refresh.errors import RefreshError
from plait_disagg.refresh.live_package import LivePackage, open_live
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.refresher import Refresher
from plait_disagg.workers.whole import WholeCore
from plait_fabric import connect, listen
from plait_fabric.gil import shorten_gil_interval
from plait_fabric.rpc.replicas import ReplicaLink
from plait_fabric.threads import run_on_own_thread, set_threads
from plait_serving.deployments.fabric_endpoints import FABRIC

Worker: TypeAlias = CnCore | WholeCore | HnWorker


def worker(live: LivePackage, role: str, secret: bytes, address: str, *hn: str) -> Worker:
    """Start a worker on one compute thread; it ends with the process."""
    listener = listen(address, secret=secret, options=FABRIC)
    dense = live.dense.get(live.dense_version)
    if role == "hn":
        assert dense is not None
        return HnWorker(live.card(), dense, [listener], dense_version=live.dense_version)
    assert live.sparse is not None
    if role == "cn":
        core: CnCore | WholeCore = CnCore(
            live.card(mode="split"),
            live.sparse,
            lambda _: ReplicaLink(replica="hn", channel=connect(hn[0], secret=secret, options=FABRIC)),
            dense_version=live.dense_version,
        )
    else:
        assert dense is not None
        core = WholeCore(live.card(), live.sparse, dense)
    CoreServer(core, [listener])
    wait_until_ready(core)  # its HN
    return core


def run_command(running: Worker, refresher: Refresher, line: str) -> None:
    """Run one command on the calling thread."""
    set_threads(1)
    word, _, argument = line.strip().partition(" ")
    if word == "knobs":
        running.reconfigure(WorkerKnobs(**json.loads(argument)))
    elif word == "stage":
        refresher.stage(Path(argument))
    else:
        refresher.switch(argument)


def main(folder: str, role: str, *addresses: str) -> None:
    """Run one worker and obey the commands that arrive on stdin."""
    shorten_gil_interval()  # as the deployments do
    secret = bytes.fromhex(sys.stdin.readline().strip())
    live = open_live(Path(folder), sparse=role != "hn", dense=role != "cn", prepares=True)
    running = worker(live, role, secret, *addresses)
    refresher = Refresher(live, running)
    print("ok", flush=True)
    for line in sys.stdin:
        try:
            run_on_own_thread(lambda line=line: run_command(running, refresher, line))  # type: ignore[misc]
        except RefreshError as error:
            print(error, flush=True)
        else:
            print("ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
