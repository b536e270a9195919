"""Starting processes quickly, and so that signals to end do not reach them: a terminal and a service manager send
these to all processes, but the coordinator decides."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
"""The signals that end a run early, all alike."""

_IMPORTED = ["plait_loadtest.run.worker", "plait_loadtest.run.echo"]


_LONGEST_FOLDER = 70
"""The max bytes of the folder's path. The address of a Unix socket has 108, of which multiprocessing's own names
take 33."""


def fresh_processes() -> ForkServerContext | SpawnContext:
    """Return a context for processes that share nothing with this one, forked from a process that has imported what
    they need and runs nothing: a caller with many short runs, such as the tuner, waits half a second for the first
    only. Where the temporary folder's name is too long for that process's socket, each process is spawned on its
    own."""
    if len(tempfile.gettempdir().encode()) > _LONGEST_FOLDER:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def ignore_ending() -> None:
    """Ignore the signals that end a run, in a process of its own."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def started(main: Callable[..., None], argument: Any, name: str) -> tuple[Pipe, BaseProcess]:
    """Start a process that runs `main(argument, pipe)`, and return the other end of its pipe. The signals that end a
    run are ignored in it from its first instruction on, imports included; slightly later if this is called outside the
    main thread."""
    context = fresh_processes()
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(argument, theirs), name=name, daemon=True)
    with on_ending(signal.SIG_IGN):
        process.start()
    theirs.close()
    return ours, process


def told(pipe: Pipe, word: int | str) -> None:
    """Send a word, if there is still somebody to hear it."""
    with suppress(OSError):
        pipe.send(word)


@contextmanager
def ended_by_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C or SIGTERM; the second is a KeyboardInterrupt. Outside the main thread nothing
    changes."""

    def first(_number: int, _frame: object) -> None:
        for number in ENDING:
            signal.signal(number, signal.default_int_handler)
        stop()

    with on_ending(first):
        yield


@contextmanager
def on_ending(handler: signal.Handlers | Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Handle the signals that end a run while the block runs; only the main thread may change what signals do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in ENDING]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, signal.SIG_DFL if old is None else old)
