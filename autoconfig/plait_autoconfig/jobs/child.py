"""The measuring process: makes the measurer, then answers JSON lines on the socket that it inherited.

A request is `{"do": ...}`; the reply is any number of `{"say": text}` and one `{"ok": ...}` or `{"error": ...}`.
When the job's process has died (end of file), the measurer is interrupted, restores and closes; once that is done,
or after `PARTING_S`, the whole process group ends. Nothing outlives a `kill -9` of the job by more than that.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json

from plait_autoconfig.errors import JobError
from plait_autoconfig.jobs.exit_status import mentions_out_of_memory
from plait_autoconfig.jobs.measurer import MeasurementTask, Measurer
from plait_autoconfig.jobs.spec import JobSpec

PARTING_S = 30.0

_TASK = TypeAdapter(MeasurementTask)


class Child:
    """A measurer and the requests for it, in the main thread."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._tell = tell
        self._measurer: Measurer | None = None

    def answer(self, request: Mapping[str, Any]) -> None:
        """Carry out a request and report the result."""
        try:
            done = self._do(request)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self._tell({"error": _described(error)})
        else:
            self._tell({"ok": done})

    def part(self) -> None:
        """Restore and close, as far as that works."""
        if self._measurer is None:
            return
        for act in (self._measurer.restore, self._measurer.close):
            try:
                act()
            except Exception:
                traceback.print_exc()

    def _do(self, request: Mapping[str, Any]) -> Any:
        what = request["do"]
        if what == "make":
            self._measurer = _made(request["factory"], Path(request["folder"]), request["arguments"])
            return None
        if self._measurer is None:
            raise RuntimeError(f"{what} before make")
        if what == "check":
            return self._measurer.check(JobSpec.model_validate_json(json.dumps(request["spec"])))
        if what == "measure":
            return self._measurer.measure(_TASK.validate_python(request["task"]), self._say)
        if what == "apply":
            return self._measurer.apply(request["config"])
        return self._measurer.restore()

    def _say(self, text: str) -> None:
        self._tell({"say": text})


def _made(factory: str, folder: Path, arguments: Mapping[str, Any]) -> Measurer:
    module, _, function = factory.partition(":")
    made: Measurer = getattr(import_module(module), function)(folder=folder, **arguments)
    return made


def _described(error: BaseException) -> dict[str, Any]:
    """Describe an error as JSON; `kind` is refused, memory or failed."""
    text = str(error) or type(error).__name__
    if isinstance(error, JobError):
        return {"kind": "refused", "text": text}
    memory = isinstance(error, MemoryError) or mentions_out_of_memory(f"{type(error).__name__}: {text}")
    return {"kind": "memory" if memory else "failed", "text": f"{type(error).__name__}: {text}"}


def _listen(connection: socket.socket, requests: queue.SimpleQueue[Any], main: int) -> None:
    """Pass requests on; at the end of file interrupt the main thread and give the group `PARTING_S` to end."""
    with connection.makefile("r", encoding="utf-8") as lines:
        try:
            for line in lines:
                requests.put(json.loads(line))
        except OSError:
            pass
    threading.Timer(PARTING_S, os.killpg, (os.getpgid(0), signal.SIGKILL)).start()
    signal.pthread_kill(main, signal.SIGINT)


def main(descriptor: int) -> None:
    """Answer requests until the other side of the socket `descriptor` is closed."""
    connection = socket.socket(fileno=descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writing = threading.Lock()

    def tell(message: Mapping[str, Any]) -> None:
        with writing:
            connection.sendall(to_json(message) + b"\n")

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    child = Child(tell)
    try:
        listener = threading.Thread(target=_listen, args=(connection, requests, threading.get_ident()), daemon=True)
        listener.start()
        while True:
            child.answer(requests.get())
    except (KeyboardInterrupt, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child.part()
    finally:
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # multiprocessing's sockets, which its own exit would remove
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(os.getpgid(0), signal.SIGKILL)  # threads and processes that the measurer left, and this one
