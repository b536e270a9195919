"""Inside a worker process: builds the system and answers requests, JSON over a pipe, until the pipe closes.

`python -m plait_bench.fleet.child FD` is the same in another Python environment, which needs no more than what its
system imports: the first message on the pipe names the factory and its settings.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection

from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.fleet.values import FleetWorker, ItemOutcome, Json, Settles

__all__ = ["serve"]

# Libraries must neither chat nor call home while they are measured.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def serve(pipe: Connection, factory: str, settings: Mapping[str, Json]) -> None:
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
    if question["op"] == "settle":
        if isinstance(worker, Settles):
            worker.settle()
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


def main() -> None:
    """Serve on the inherited file descriptor."""
    pipe = Connection(int(sys.argv[1]))
    asked = json.loads(pipe.recv_bytes())
    serve(pipe, asked["factory"], asked["settings"])


if __name__ == "__main__":
    main()
