"""Imports that take seconds, made shorter."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Switch the garbage collector off within the context, and exempt from it for good what was made there.

    An import makes hundreds of thousands of objects that stay, and the collector looks at all of them again and
    again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
