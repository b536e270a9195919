"""A system's worker processes: spawned, controlled by JSON over pipes, stopped.

A fleet starts as many processes as its widest layout needs. A narrower layout leaves some of them idle, and threads
are set anew for each layout, so that trying layouts does not reload the models.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from plait_bench.errors import BenchError, SystemFailed, SystemUnavailable
from plait_bench.fleet.values import FleetWorker, Item, ItemOutcome, Json, ProcessLayout, RunSample, System

# Loading a model may take minutes on a slow disk, a round of a slow system on a slow machine too.
ANSWER_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 10.0
# Libraries must neither chat nor call home while they are measured.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


class WorkerFleet:
    """A `Fleet` of child processes."""

    def __init__(self, system: System, processes: int) -> None:
        """Start the processes side by side and wait. Raises `SystemUnavailable` or `SystemFailed`, and leaves none
        running."""
        self._system = system
        self._layout = ProcessLayout(processes=1, threads=1)
        self._processes = [_Process(system) for _ in range(processes)]
        try:
            for worker in self._processes:
                worker.answer()
        except BaseException:
            self.close()
            raise

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

    def close(self) -> None:
        """Stop all processes. Idempotent."""
        for worker in self._processes:
            worker.stop()


def sample(started_s: float, outcomes: Sequence[Mapping[str, Json]], *, one_by_one: bool) -> RunSample:
    """Build a run's sample. One by one, an item begins when the one before it is done; otherwise all begin together."""
    ends_s = [float(outcome["finished_s"]) for outcome in outcomes]
    begins_s = [started_s, *ends_s[:-1]] if one_by_one else [started_s] * len(ends_s)
    return RunSample(
        wall_s=max(ends_s) - started_s,
        latencies_s=tuple(end_s - begin_s for begin_s, end_s in zip(begins_s, ends_s, strict=True)),
        results=tuple(outcome["result"] for outcome in outcomes),
    )


class _Process:
    """One process and the pipe to it. Every request has one reply."""

    def __init__(self, system: System) -> None:
        self._name = system.name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve,
            args=(theirs, system.factory, dict(system.settings)),
            name=f"bench-{system.name}",
            daemon=True,
        )
        self._process.start()
        theirs.close()

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


# ---- inside the process ---------------------------------------------------------------------------------------------


def _serve(pipe: Connection, factory: str, settings: Mapping[str, Json]) -> None:
    """Run a worker process: build the system and answer requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's; it closes the pipe
    os.dup2(2, 1)  # stdout carries the runner's document
    os.environ.update(_QUIET)
    warnings.simplefilter("ignore")  # libraries' advice to their callers; our tests make warnings errors
    worker: FleetWorker | None = None
    try:
        worker = _build(factory, settings)
        _reply(pipe, {"answer": None})
        while True:
            try:
                question = json.loads(pipe.recv_bytes())
            except (EOFError, ConnectionError):
                return
            _reply(pipe, {"answer": _answer(worker, question)})
    except SystemUnavailable as error:
        _reply(pipe, {"unavailable": str(error)})
    except Exception as error:
        _reply(pipe, {"error": _sentence(error)})
        if not isinstance(error, BenchError):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        if worker is not None:
            worker.close()


def _build(factory: str, settings: Mapping[str, Json]) -> FleetWorker:
    module, _, name = factory.partition(":")
    built: FleetWorker = getattr(importlib.import_module(module), name)(**settings)
    return built


def _answer(worker: FleetWorker, question: Mapping[str, Json]) -> Json:
    if question["op"] == "configure":
        worker.configure(threads=question["threads"], variant=question["variant"])
        return None
    outcomes: list[ItemOutcome] = worker.run(
        question["items"], one_by_one=question["one_by_one"], keep=question["keep"]
    )
    return [{"finished_s": outcome.finished_s, "result": outcome.result} for outcome in outcomes]


def _reply(pipe: Connection, reply: Mapping[str, Json]) -> None:
    try:
        pipe.send_bytes(json.dumps(reply).encode())
    except (OSError, ValueError):
        return  # the runner is gone; the loop ends at its next question


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, BenchError) else str(error)
