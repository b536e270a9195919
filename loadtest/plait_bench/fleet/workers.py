"""A system's worker processes: spawned, controlled by JSON over pipes, stopped.

A fleet starts as many processes as its widest layout needs. A narrower layout leaves some of them idle, and threads
are set anew for each layout, so that trying layouts does not reload the models.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from plait_bench.errors import SystemFailed, SystemUnavailable
from plait_bench.fleet.child import serve
from plait_bench.fleet.memory import memory_of
from plait_bench.fleet.process_tree import go_on, stand_still
from plait_bench.fleet.values import Item, Json, MemoryUse, ProcessLayout, RunSample, System

# Loading a model may take minutes on a slow disk, a round of a slow system on a slow machine too.
ANSWER_TIMEOUT_S = 1800.0
# A worker may have processes of its own to end: a whole server.
_STOP_TIMEOUT_S = 60.0
_PACKAGES = Path(__file__).resolve().parents[2]
"""Where another environment's Python finds this package."""


class WorkerFleet:
    """A `Fleet` of child processes."""

    def __init__(self, system: System, processes: int) -> None:
        """Start the processes side by side and wait. Raises `SystemUnavailable` or `SystemFailed`, and leaves none
        running."""
        self._system = system
        self._layout = ProcessLayout(processes=1, threads=1)
        interpreter = None if system.interpreter is None else system.interpreter()
        started_s = time.monotonic()
        self._is_paused = False
        self._processes = [_Process(system, interpreter) for _ in range(processes)]
        try:
            for worker in self._processes:
                worker.answer()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - started_s

    def configure(self, layout: ProcessLayout) -> None:
        """Send the layout to the processes that it uses. Raises ValueError if there are too few."""
        active = self._processes[: layout.processes]
        if len(active) < layout.processes:
            raise ValueError(f"{self._system.name} has {len(active)} processes, not {layout.processes}")
        for worker in active:
            worker.ask({"op": "configure", "threads": layout.threads, "variant": layout.variant})
        for worker in active:
            worker.answer()
        self._layout = layout

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool = False) -> RunSample:
        """Divide the items among the processes and wait for all of them. Raises `SystemFailed`."""
        shares = self._system.share(items, self._layout.processes)
        busy = [(worker, share) for worker, share in zip(self._processes, shares, strict=False) if share]
        started_s = time.monotonic()
        for worker, share in busy:
            worker.ask({"op": "run", "items": [items[i] for i in share], "one_by_one": one_by_one, "keep": keep})
        outcomes: dict[int, Mapping[str, Json]] = {}
        for worker, share in busy:
            outcomes.update(zip(share, worker.answer(), strict=True))
        return sample(started_s, [outcomes[i] for i in range(len(items))], one_by_one=one_by_one)

    def pause(self) -> None:
        """Stop the processes and all that they started."""
        if not self._is_paused:
            self._is_paused = True
            stand_still(self._pids())

    def resume(self) -> None:
        """Let them run again, and wait until they are as they were. Raises `SystemFailed`."""
        if not self._is_paused:
            return
        self._go_on()
        for worker in self._processes:
            worker.ask({"op": "settle"})
        for worker in self._processes:
            worker.answer()

    def memory(self) -> MemoryUse:
        """Return the memory of the processes that the layout uses, and of their children."""
        return memory_of([worker.pid for worker in self._processes[: self._layout.processes]])

    def close(self) -> None:
        """Stop all processes. Idempotent."""
        self._go_on()
        for worker in self._processes:
            worker.stop()

    def _go_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            go_on(self._pids())

    def _pids(self) -> list[int]:
        return [worker.pid for worker in self._processes]


def sample(started_s: float, outcomes: Sequence[Mapping[str, Json]], *, one_by_one: bool) -> RunSample:
    """Build a run's sample. One by one, an item begins when the one before it is done; otherwise all begin together."""
    ends_s = [float(outcome["finished_s"]) for outcome in outcomes]
    begins_s = [started_s, *ends_s[:-1]] if one_by_one else [started_s] * len(ends_s)
    return RunSample(
        wall_s=max(ends_s) - started_s,
        latencies_s=tuple(end_s - begin_s for begin_s, end_s in zip(begins_s, ends_s, strict=True)),
        results=tuple(outcome["result"] for outcome in outcomes),
    )


class _Child(Protocol):
    """What `_Process` needs of a child process."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...


class _OtherPython:
    """A child process in another Python environment."""

    def __init__(self, interpreter: Path, fd: int) -> None:
        command = [str(interpreter), "-m", "plait_bench.fleet.child", str(fd)]
        environ = {**os.environ, "PYTHONPATH": str(_PACKAGES)}
        self._process = subprocess.Popen(command, pass_fds=[fd], env=environ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()


class _Process:
    """One process and the pipe to it. Every request has one reply."""

    def __init__(self, system: System, interpreter: Path | None) -> None:
        self._name = system.name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        settings = dict(system.settings)
        if interpreter is not None:
            self._process: _Child = _OtherPython(interpreter, theirs.fileno())
            self.ask({"factory": system.factory, "settings": settings})
        else:
            spawned = context.Process(
                target=serve, args=(theirs, system.factory, settings), name=f"bench-{system.name}", daemon=True
            )
            spawned.start()
            self._process = spawned
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, question: Mapping[str, Json]) -> None:
        try:
            self._pipe.send_bytes(json.dumps(question).encode())
        except OSError as error:
            raise SystemFailed(f"{self._name}: its process died") from error

    def answer(self) -> Any:
        try:
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                raise SystemFailed(f"{self._name} gave no answer in {ANSWER_TIMEOUT_S:.0f} s")
            reply = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._process.join(_STOP_TIMEOUT_S)
            raise SystemFailed(f"{self._name}: its process died (exit code {self._process.exitcode})") from error
        if "unavailable" in reply:
            raise SystemUnavailable(reply["unavailable"])
        if "error" in reply:
            raise SystemFailed(f"{self._name}: {reply['error']}")
        return reply["answer"]

    def stop(self) -> None:
        """Close the pipe, which ends the process; kill it if it does not end in time."""
        self._pipe.close()
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
