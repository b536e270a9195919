"""Publishes updates from a process of its own, as the ingress does, beside the workers and their clients.

`python -m plait_bench.disagg.systems.publisher [ROLE:IN:OUT...]`: the pipes of the workers, HNs first. The first
input line is the package's folder, every further one an update to publish. Each line is answered with `ok` or an
error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from plait_bench.disagg.systems.worker_pipes import WorkerPipes
from plait_disagg.package import open_package
from plait_disagg.refresh.errors import RefreshError
from plait_disagg.refresh.publish import publish
from plait_fabric.threads import lower_priority, set_threads

__all__ = ["main"]


def main(*workers: str) -> None:
    """Publish each update folder that arrives on stdin to the workers, and report on stdout."""
    set_threads(1)
    lower_priority()
    fleets = [_pipes_to(*worker.split(":")) for worker in workers]
    package = open_package(Path(sys.stdin.readline().strip()))
    print("ok", flush=True)
    for line in sys.stdin:
        try:
            publish(package, Path(line.strip()), fleets)
        except RefreshError as error:
            print(error, flush=True)
        else:
            print("ok", flush=True)


def _pipes_to(role: str, commands: str, answers: str) -> WorkerPipes:
    return WorkerPipes(role, os.fdopen(int(commands), "w"), os.fdopen(int(answers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
