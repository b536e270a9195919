"""The measuring process: answers requests on the pipe that it inherited, all in JSON.

A request is the name of a method and its arguments; those of `check`, the first one, say also how the measurer is made.
The reply is any number of `["say", text]` and one `["ok", result]`, or a text after `refused`, `memory` or `failed`.
When the job's process has died (end of file), the measurer is interrupted, restores and closes; once that is done,
or after `PARTING_S`, the whole process group ends. Nothing outlives a `kill -9` of the job by more than that.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from plait_autoconfig.errors import JobError
from plait_autoconfig.jobs.exit_status import mentions_out_of_memory
from plait_autoconfig.jobs.measurer import MeasurementTask, Measurer
from plait_autoconfig.jobs.spec import JobSpec

PARTING_S = 30.0
_TASK = TypeAdapter(MeasurementTask)


class Child:
    """A measurer and the requests for it, in the main thread."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        self._tell = tell
        self._measurer: Measurer | None = None

    def answer(self, what: str, *arguments: Any) -> None:
        """Carry out a request and report the result."""
        try:
            done = self._do(what, *arguments)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self._tell(*_described(error))
        else:
            self._tell("ok", done)

    def part(self) -> None:
        """Restore and close, as far as that works."""
        if self._measurer is None:
            return
        for act in (self._measurer.restore, self._measurer.close):
            try:
                act()
            except Exception:
                traceback.print_exc()

    def _do(self, what: str, *arguments: Any) -> Any:
        if what == "check":
            factory, folder, given, spec = arguments
            module, _, function = factory.partition(":")
            self._measurer = getattr(import_module(module), function)(folder=Path(folder), **given)
            arguments = (JobSpec.model_validate_json(spec),)
        if what == "measure":
            arguments = (_TASK.validate_python(*arguments), lambda text: self._tell("say", text))
        return getattr(self._measurer, what)(*arguments)


def _described(error: BaseException) -> tuple[str, str]:
    """Return refused, memory or failed, and a text."""
    text = str(error) or type(error).__name__
    if isinstance(error, JobError):
        return "refused", text
    memory = isinstance(error, MemoryError) or mentions_out_of_memory(f"{type(error).__name__}: {text}")
    return "memory" if memory else "failed", f"{type(error).__name__}: {text}"


def _listen(connection: Connection, requests: queue.SimpleQueue[Any], main: int) -> None:
    """Pass requests on; at the end of file interrupt the main thread and give the group `PARTING_S` to end."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(from_json(connection.recv_bytes()))
    threading.Timer(PARTING_S, os.killpg, (os.getpgid(0), signal.SIGKILL)).start()
    signal.pthread_kill(main, signal.SIGINT)


def main(descriptor: int) -> None:
    """Answer requests until the other side of the pipe `descriptor` is closed."""
    connection = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writing = threading.Lock()

    def tell(kind: str, what: Any) -> None:
        with writing:
            connection.send_bytes(to_json((kind, what)))

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    child = Child(tell)
    try:
        listener = threading.Thread(target=_listen, args=(connection, requests, threading.get_ident()), daemon=True)
        listener.start()
        while True:
            child.answer(*requests.get())
    except (KeyboardInterrupt, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child.part()
    finally:
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # multiprocessing's sockets, which its own exit would remove
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(os.getpgid(0), signal.SIGKILL)  # threads and processes that the measurer left, and this one
