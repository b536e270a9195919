"""Workers of the tiny model as processes, for tests that kill or stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from support.cluster import TESTS


class RankProcesses:
    """Forked by one process that has imported everything."""

    def __init__(self, mother: subprocess.Popen[str], secret: bytes) -> None:
        self.secret = secret
        self.pids: list[int] = []
        self._mother = mother

    def start(self, role: str, address: str, *hns: str, slow_s: float = 0.0) -> int:
        """The id of a worker that listens. See `fakes.ranking_worker`."""
        assert self._mother.stdin is not None
        assert self._mother.stdout is not None
        print(role, address, self.secret.hex(), slow_s, *hns, file=self._mother.stdin, flush=True)
        self.pids.append(int(self._mother.stdout.readline()))
        return self.pids[-1]


@contextmanager
def rank_processes(secret: bytes) -> Iterator[RankProcesses]:
    """All are killed in the end."""
    command = [sys.executable, "-m", "fakes.ranking_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TESTS) as mother:
        made = RankProcesses(mother, secret)
        try:
            yield made
        finally:
            for pid in made.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
