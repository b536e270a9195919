"""A CN or an HN in a process of its own, whose knobs can be changed.

``python -m plait_bench.disagg.overload_worker FOLDER cn|hn ADDRESS [HN_ADDRESS]``. The first line in is the secret,
every other one is knobs as JSON; one line out when it listens, and one for each of them: ``ok``. It ends with its
standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from plait_disagg.fabric import connect, listen
from plait_disagg.package import open_package
from plait_disagg.replicas import Link
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.front import Front
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.knobs import WorkerKnobs
from plait_serving.deployments.reach import FABRIC


def worker(folder: Path, role: str, secret: bytes, address: str, *hn: str) -> CnCore | HnWorker:
    """Starts a worker on one compute thread; it ends with the process."""
    package = open_package(folder)
    listener = listen(address, secret=secret, options=FABRIC)
    if role == "hn":
        return HnWorker(package.card(), package.dense(), [listener])
    core = CnCore(
        package.card(mode="split"),
        package.sparse(),
        lambda _: Link(replica="hn", channel=connect(hn[0], secret=secret, options=FABRIC)),
    )
    Front(core, [listener])
    return core


def main(folder: str, role: str, *addresses: str) -> None:
    """See the module docstring."""
    secret = bytes.fromhex(sys.stdin.readline().strip())
    found = worker(Path(folder), role, secret, *addresses)
    print("ok", flush=True)
    for line in sys.stdin:
        found.reconfigure(WorkerKnobs(**json.loads(line)))
        print("ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
