"""Small matrices on one thread: more threads slow them down, and would take cores from the trials."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit numpy, scipy, scikit-learn and torch to one thread in this block, then restore the previous limits."""
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
    """Return the controller; finding the libraries takes milliseconds, so it is cached."""
    return ThreadpoolController()
