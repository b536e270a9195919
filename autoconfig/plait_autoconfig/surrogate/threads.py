"""Small matrices on one thread: more threads cost them more than they bring, and would take cores from the trials."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits numpy, scipy, scikit-learn and torch to one thread in this block, and puts back what was."""
    torch = sys.modules.get("torch")  # whose import takes seconds, and which most designers do without
    before = None if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(1)
    try:
        with _controller().limit(limits=1):
            yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


@cache
def _controller() -> ThreadpoolController:
    """Looking for the libraries takes milliseconds, so that is done once."""
    return ThreadpoolController()
