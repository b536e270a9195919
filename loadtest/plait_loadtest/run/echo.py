"""The control request: our own echo, queried at a steady rate beside the load.

It shares only the machine with the generator, neither process nor interpreter lock; whatever it takes longer than
usual, this host adds to every latency of the run.
"""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from types import TracebackType

import numpy as np

from plait_loadtest.run import echo_process
from plait_loadtest.run.processes import fresh_processes, start_deaf
from plait_loadtest.values import Echo

RATE_PER_S = 20.0
"""Enough for a p95 within ten seconds, at the cost of 0.1 % of a core."""

_ANSWER_S = 5.0


class EchoClock:
    """The echo process; a context manager. It only observes: if it dies, the run continues without it."""

    def __init__(self, *, rate_per_s: float = RATE_PER_S) -> None:
        context = fresh_processes()
        self._pipe: Pipe
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=echo_process.main, args=(theirs, int(1e9 / rate_per_s)), name="loadtest-echo", daemon=True
        )
        start_deaf(self._process)
        theirs.close()

    def __enter__(self) -> EchoClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join(_ANSWER_S)

    def wait_ready(self) -> None:
        """Wait until it can be started, for a few seconds at most."""
        self._ask()

    def start(self, start_ns: int) -> None:
        """Send control requests from `start_ns` on."""
        self._tell(start_ns)

    def stop(self) -> Echo:
        """Return what it measured; nothing if it died."""
        self._tell("stop")
        seen = self._ask()
        scheduled_ns, latency_ns = seen if isinstance(seen, tuple) else ([], [])
        return Echo(
            scheduled_ns=np.array(scheduled_ns, dtype=np.int64), latency_ns=np.array(latency_ns, dtype=np.int64)
        )

    def _tell(self, word: int | str) -> None:
        try:
            self._pipe.send(word)
        except OSError:
            return

    def _ask(self) -> object:
        try:
            return self._pipe.recv() if self._pipe.poll(_ANSWER_S) else None
        except (EOFError, OSError):
            return None
