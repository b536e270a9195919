"""Starting processes quickly, and so that Ctrl-C does not reach them: the terminal sends it to the whole group, but the
coordinator decides."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

_IMPORTED = ["plait_loadtest.run.worker", "plait_loadtest.run.echo_process"]


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


def start_ignoring_sigint(process: BaseProcess) -> None:
    """Start the process with SIGINT ignored from its first instruction on, imports included; slightly later if called
    outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        process.start()  # only the main thread may change what signals do; the process itself ignores it a bit later
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def ctrl_c(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on the first Ctrl-C; the second is a KeyboardInterrupt. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)

    def first(_number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
