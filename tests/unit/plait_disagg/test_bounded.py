"""What is read from files of strangers costs what its length says: no number in it makes it cost more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_disagg.bounded import MAX_DIGITS, load_json, product


@given(st.lists(st.integers(0, 1 << 63), max_size=8), st.integers(0, 1 << 64))
def test_the_product_is_the_product_up_to_the_limit(sizes, limit):
    """Beyond it, it is one more."""
    assert product(sizes, limit=limit) == min(math.prod(sizes), limit + 1)


def test_the_product_stops_multiplying_where_it_is_larger():
    """A hundred thousand sizes cost a hundred thousand comparisons, not a number of millions of digits."""
    seen = []

    class Size(int):
        def __rmul__(self, other: int) -> int:
            seen.append(other)
            return other * int(self)

    assert product([Size(1 << 62)] * 100_000, limit=1 << 40) == (1 << 40) + 1
    assert len(seen) == 1
    assert product([1 << 62] * 1000 + [0], limit=5) == 0


def test_integers_have_a_size():
    """The longest of 64 bits is read; longer ones are named and never become numbers. Floats are as ever, and objects
    may be made by the caller."""
    assert load_json('{"a": 1, "a": 2}', pairs=list) == [("a", 1), ("a", 2)]
    assert load_json(f"[{2**63 - 1}, {-(2**63)}, 1.5, 1e30]") == [2**63 - 1, -(2**63), 1.5, 1e30]
    for digits in (MAX_DIGITS + 1, 4_300, 1_000_000):
        with pytest.raises(ValueError, match=rf"the integer 9{{{MAX_DIGITS}}}\.\.\. has {digits} digits"):
            load_json(f'{{"shape": [{"9" * digits}]}}')
