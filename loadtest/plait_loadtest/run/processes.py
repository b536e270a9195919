"""Starting processes that Ctrl-C does not reach: the terminal sends it to the whole group, the coordinator decides."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess


def start_deaf(process: BaseProcess) -> None:
    """Starts it with SIGINT ignored from its first instruction on, imports included."""
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
    """The first Ctrl-C calls ``stop``, the second is a KeyboardInterrupt. Outside the main thread nothing changes."""
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
