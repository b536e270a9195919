"""Reading what nobody vouches for: the time that it takes is bounded by its length, whatever it says.

Python's integers have no largest one. A few hundred sizes of 4,300 digits in a file's header multiply to numbers whose
product alone holds the interpreter for minutes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

MAX_DIGITS = 19
"""Of an integer: 2^63 has as many. Every size and offset of a file fits."""


def load_json(text: str | bytes, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parse JSON; `pairs` makes the objects, as `object_pairs_hook` does. Raises ValueError, also for an integer of
    more than `MAX_DIGITS` digits, and RecursionError."""
    return json.loads(text, parse_int=_integer, object_pairs_hook=pairs)


def product(sizes: Iterable[int], *, limit: int) -> int:
    """Return the product of sizes of at least 0, or `limit + 1` if it is larger."""
    result, is_larger = 1, False
    for size in sizes:
        if size == 0:
            return 0
        if not is_larger:
            result *= size
            is_larger = result > limit
    return limit + 1 if is_larger else result


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"the integer {digits[:MAX_DIGITS]}... has {len(digits)} digits")
    return int(digits)
