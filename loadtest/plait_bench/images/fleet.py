"""A system's worker processes: started, controlled over pipes, paused, stopped; and what runs inside them.

A fleet has the processes of one layout, so that no layout leaves another what it has loaded, compiled or peaked at.
Standard library only, so that a worker may run in another Python environment.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeAlias

from plait_bench.benchmark import started
from plait_bench.errors import BenchError, SystemFailed, SystemUnavailable

Item: TypeAlias = Any
"""One unit of work, and what is made of it: they cross the pipes."""

# Loading a model may take minutes on a slow disk, a round of a slow system on a slow machine too.
ANSWER_TIMEOUT_S = 1800.0
# A worker may have processes of its own to end: a whole server.
_STOP_TIMEOUT_S = 60.0
_PROC = Path("/proc")
_PACKAGES = Path(__file__).resolve().parents[2]
"""Where another environment's Python finds this package."""

# Libraries must neither chat nor call home while they are measured.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """`processes` workers with `threads` compute threads each (0: it is the system's own choice); `variant` is one of
    the choices that the system offers."""

    processes: int
    threads: int
    variant: str = ""

    def __str__(self) -> str:
        if not self.threads:
            return self.variant
        return f"{self.processes}x{self.threads}" + (f" {self.variant}" if self.variant else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemList:
    """A workload: `items` in arrival order, all at once, or `one_by_one` (the next when the last is done).

    `warm_up` are shorter items that touch everything that `items` touch. `settings`: what its systems are built with
    beside their own. `trial_items`: how many items a trial of a layout runs; 0: all. `max_processes` of a system;
    `is_wide`: no layout leaves cores idle. `settle_s`: how long each system runs the items, uncounted, before the
    rounds: some adapt to their load.
    """

    name: str
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...]
    one_by_one: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    trial_items: int = 0
    settle_s: float = 0.0
    max_processes: int = 4
    is_wide: bool = False

    def layouts(self, cores: int) -> tuple[ProcessLayout, ...]:
        """List the processes x threads worth trying, in which every process has work: one core, and all of them as 1, 2
        or 4 processes."""
        most = min(cores, self.max_processes, 1 if self.one_by_one else len(self.items))
        wide = [ProcessLayout(processes=n, threads=cores // n) for n in (1, 2, 4) if n <= most]
        narrow = [] if self.is_wide else [ProcessLayout(processes=1, threads=1)]
        return tuple(dict.fromkeys([*narrow, *wide]))


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One of the systems compared. `factory` is `module:class` of its `FleetWorker`, which is made of `settings` and
    the layout's `threads` and `variant`; it may use the host as it sees fit.

    `share(items, n)` divides the items' indices into n lists, one for each process, in the order of execution.
    `variants`: choices other than threads and processes (a memory format) that make a difference to a workload; the
    best is selected. `is_own_layout`: it divides the machine itself, and has no layouts. `interpreter`: returns the
    Python of its own environment, and may take minutes to make one; raises `SystemUnavailable`.
    """

    name: str
    factory: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    share: Callable[[Sequence[Item], int], list[list[int]]]
    variants: Callable[[ItemList], tuple[str, ...]] = lambda _: ("",)
    is_own_layout: bool = False
    interpreter: Callable[[], Path] | None = None

    def given(self, settings: Mapping[str, Any]) -> Self:
        """Return it with further settings."""
        return replace(self, settings={**self.settings, **settings})


class FleetWorker:
    """A system inside a worker process."""

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[Item]:
        """Run all items; return what was made of each if it is to be kept, else nothing."""
        raise NotImplementedError

    def prepared(self) -> None:
        """Wait for what the first run has set off, and later ones run on."""

    def resumed(self) -> None:
        """Wait until all is as it was before the processes were stopped and continued."""

    def close(self) -> None:
        """Stop what was started."""


class WorkerFleet:
    """The worker processes of a system, in a layout."""

    def __init__(self, system: System, layout: ProcessLayout) -> None:
        """Start the processes side by side and wait. Raises `SystemUnavailable` or `SystemFailed`, and leaves none
        running."""
        self._system = system.given({"threads": layout.threads, "variant": layout.variant})
        self._is_paused = False
        self._processes = [_Process(self._system) for _ in range(layout.processes)]
        try:
            for worker in self._processes:
                worker.answer()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [worker.pid for worker in self._processes]

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool = False) -> tuple[float, list[Item]]:
        """Divide the items among the processes; return the seconds until all had ended, and what was made of each if it
        is kept. Raises `SystemFailed`."""
        shares = self._system.share(items, len(self._processes))
        busy = [(worker, share) for worker, share in zip(self._processes, shares, strict=True) if share]
        started_s = time.monotonic()
        for worker, share in busy:
            worker.ask("run", items=[items[i] for i in share], one_by_one=one_by_one, keep=keep)
        answers = [(share, worker.answer()) for worker, share in busy]
        taken_s = time.monotonic() - started_s
        _tell([worker for worker, _ in busy], "prepared")
        made = {i: each for share, answer in answers if keep for i, each in zip(share, answer, strict=True)}
        return taken_s, [made[i] for i in sorted(made)]

    def peak_bytes(self) -> int:
        """Return the most resident memory of the processes and of their children."""
        return peak_memory_of(self.pids)

    def pause(self) -> None:
        """Stop the processes and all that they started: they take no time from anybody until `resume`. Idempotent."""
        if not self._is_paused:
            self._is_paused = True
            stopped: set[int] = set()
            while new := with_descendants(self.pids) - stopped:  # one that still ran may have started another
                _send(new, signal.SIGSTOP)
                stopped |= new

    def resume(self) -> None:
        """Let them run again, and wait until they are as they were. Idempotent. Raises `SystemFailed`."""
        if not self._is_paused:
            return
        self._go_on()
        _tell(self._processes, "resumed")

    def close(self) -> None:
        """Stop all processes. Idempotent."""
        self._go_on()
        for worker in self._processes:
            worker.stop()

    def _go_on(self) -> None:
        if self._is_paused:
            self._is_paused = False
            _send(with_descendants(self.pids), signal.SIGCONT)


class _Process:
    """One process and the pipe to it. Every request has one reply."""

    def __init__(self, system: System) -> None:
        self._name, self._running = system.name, ExitStack()
        self._pipe, theirs = Pipe()
        own: dict[str, Any] = {}
        if system.interpreter is not None:
            own = {"python": system.interpreter(), "paths": [str(_PACKAGES)]}
        with theirs:
            child = started(main, theirs.fileno(), system.factory, system.settings, pass_fds=[theirs.fileno()], **own)
            self._process = self._running.enter_context(child)
        self.pid = self._process.pid

    def ask(self, method: str, **given: Any) -> None:
        with suppress(OSError):  # that it has died, its answer says
            self._pipe.send((method, given))

    def answer(self) -> Any:
        try:
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                raise SystemFailed(f"{self._name} gave no answer in {ANSWER_TIMEOUT_S:.0f} s")
            said = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            code = self._process.wait(_STOP_TIMEOUT_S)
            raise SystemFailed(f"{self._name}: its process died (exit code {code})") from error
        if isinstance(said, SystemUnavailable):
            raise said
        if isinstance(said, BenchError):
            raise SystemFailed(f"{self._name}: {said}")
        return said

    def stop(self) -> None:
        """Close the pipe, which ends the process; kill it if it does not end in time."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        self._running.close()


def _tell(workers: Sequence[_Process], method: str, **given: Any) -> None:
    """Have all of them do something, side by side."""
    for worker in workers:
        worker.ask(method, **given)
    for worker in workers:
        worker.answer()


# ---- inside a worker process ----------------------------------------------------------------------------------------


def main(fd: int, factory: str, settings: Mapping[str, Any]) -> None:
    """Run a worker process: build the system, and answer requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's; it closes the pipe
    os.dup2(2, 1)  # stdout carries the runner's document
    os.environ.update(_QUIET)
    warnings.simplefilter("ignore")  # libraries' advice to their callers; our tests make warnings errors
    pipe = Connection(fd)
    worker: FleetWorker | None = None
    try:
        module, _, name = factory.partition(":")
        worker = getattr(importlib.import_module(module), name)(settings)
        _reply(pipe, None)
        while True:
            try:
                method, given = pipe.recv()
            except (EOFError, ConnectionError):
                return
            _reply(pipe, getattr(worker, method)(**given))
    except BenchError as error:
        _reply(pipe, error)
    except Exception as error:
        _reply(pipe, SystemFailed(f"{type(error).__name__}: {error}"))
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if worker is not None:
            worker.close()


def _reply(pipe: Connection, said: Any) -> None:
    with suppress(OSError, ValueError):  # the runner is gone; the loop ends at its next question
        pipe.send(said)


# ---- processes and all their descendants, read from /proc -----------------------------------------------------------


def peak_memory_of(pids: Sequence[int]) -> int:
    """Add up the peaks of the resident memory of the processes and their descendants, in bytes, whenever each was: no
    less than what they had at any moment. Pages that they share now count once."""
    return sum(map(_peak_bytes, with_descendants(pids)))


def _peak_bytes(pid: int) -> int:
    now = status_of(pid, file="smaps_rollup")
    return status_of(pid).get("VmHWM", 0) - now.get("Rss", 0) + now.get("Pss", 0)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def with_descendants(pids: Sequence[int]) -> set[int]:
    """Return the processes and all their descendants."""
    import psutil  # which no worker needs

    found = set(pids)
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            found |= {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return found


def status_of(pid: int, *, file: str = "status") -> dict[str, int]:
    """Return the numbers of a process's status file, in bytes where it says kB; none if the process has ended."""
    try:
        fields = [line.split() for line in (_PROC / str(pid) / file).read_text().splitlines()]
    except OSError:
        return {}
    return {
        words[0].rstrip(":"): int(words[1]) * (1024 if words[-1] == "kB" else 1)
        for words in fields
        if len(words) > 1 and words[1].isdigit()
    }
