"""Keeping OpenMP fast: which threads may have a team of workers.

GCC's OpenMP gives every thread that ever ran a parallel operation workers of its own and keeps them until the thread
ends. As long as all of them together fit the cores, workers spin for the next operation; beyond that, they sleep and
are woken by the kernel, which costs more than the operations of a small model.

So exactly one thread of a process computes with several threads; all others compute single-threaded, or end.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from plait_kernels.cores import usable_cores

T = TypeVar("T")

_log = logging.getLogger(__name__)

_GIVES_WAY = 10
"""The nice value: a tenth of an ordinary thread's share where they compete."""


def set_threads(threads: int) -> None:
    """Set the calling thread's share of cores; 0: all of them.

    torch fixes a thread's number at the thread's first query or parallel operation; until then another
    thread's later setting (a decode or loader thread's 1) would overwrite it. Querying once pins it.
    """
    torch.set_num_threads(threads or usable_cores())
    torch.get_num_threads()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside: between the calls of another library that has threads of its own.

    A team's workers spin for milliseconds after each operation, on the cores that the other library is to use next, and
    an operation that finds them busy waits for a core: a product of a few kilobytes then takes as long as a step.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def lower_priority() -> None:
    """Lower the calling thread's priority, so that it runs where others leave a core idle.

    This cannot be undone: use a thread that ends.
    """
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(_GIVES_WAY, os.getpriority(os.PRIO_PROCESS, thread)))


def pin_to_cores(cores: Sequence[int]) -> None:
    """Bind the calling thread, and its future team, to those cores; none: to all that the process may use.

    A team that already exists stays where it is. Cores that the process may not use are left out; if none is left,
    that is logged and nothing changes.
    """
    allowed = os.sched_getaffinity(os.getpid())
    wanted = set(cores) & allowed if cores else allowed
    if not wanted:
        _log.warning("cores %s are not among %s: not bound", sorted(cores), sorted(allowed))
        return
    os.sched_setaffinity(0, wanted)


def run_on_own_thread(function: Callable[[], T]) -> T:
    """Call `function` on a thread that then ends along with its workers; return or raise what it does."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="plait-load") as pool:
        return pool.submit(function).result()
