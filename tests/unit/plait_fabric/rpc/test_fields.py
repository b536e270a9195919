"""Header fields and greetings are foreign input: each reader returns its type, or names the field that is wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_fabric.rpc import fields
from plait_fabric.rpc.fields import WireError, greeting, read_greeting
from plait_fabric.rpc.outages import Backoff

Reader = Callable[[dict[str, Any]], object]

READERS: dict[str, Reader] = {
    "integer": lambda header: fields.integer(header, "x", 1, 9),
    "integers": lambda header: fields.integers(header, "x", 9),
    "entries": lambda header: fields.entries(header, "x", 3),
    "text": lambda header: fields.text(header, "x", 3),
    "boolean": lambda header: fields.boolean(header, "x"),
    "number": lambda header: fields.number(header, "x"),
}


@pytest.mark.parametrize(
    ("reader", "value", "expected"),
    [
        ("integer", 1, 1), ("integer", 9, 9), ("integers", [], ()), ("integers", [0, 9], (0, 9)),
        ("entries", [None, "a", 1], [None, "a", 1]), ("text", "abc", "abc"), ("text", "", ""),
        ("boolean", False, False), ("number", 2, 2.0), ("number", -0.5, -0.5),
    ],
)  # fmt: skip
def test_what_is_right_is_returned(reader: str, value: Any, expected: object) -> None:
    """At the ends of its range too."""
    assert READERS[reader]({"x": value}) == expected


@pytest.mark.parametrize(
    ("reader", "value"),
    [
        ("integer", 0), ("integer", 10), ("integer", True), ("integer", 1.0), ("integer", "1"), ("integer", None),
        ("integers", [-1]), ("integers", [10]), ("integers", [True]), ("integers", "1"), ("integers", None),
        ("entries", [1] * 4), ("entries", {}), ("text", "abcd"), ("text", 1), ("text", None), ("boolean", 1),
        ("boolean", None), ("number", True), ("number", "1"), ("number", math.nan), ("number", math.inf),
        ("number", 10**400), ("number", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(reader: str, value: Any) -> None:
    """The error says which field."""
    with pytest.raises(WireError, match="x must be"):
        READERS[reader]({"x": value})


def test_lists_may_be_absent_and_others_may_not() -> None:
    """What is left out reads as an empty list, or as the default that the caller gave."""
    assert fields.integers({}, "x") == ()
    assert fields.entries({}, "x") == []
    assert fields.text({}, "x", default="d") == "d"
    for reader in ("integer", "text", "boolean", "number"):
        with pytest.raises(WireError, match="x must be"):
            READERS[reader]({})


def test_unknown_fields_are_refused() -> None:
    """As are those that lack."""
    fields.only({"a": 1, "b": 2}, {"a", "b"})
    for header in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with pytest.raises(WireError, match="fields"):
            fields.only(header, {"a", "b"})


def test_greetings_carry_what_the_workload_says() -> None:
    """The payload comes back as it was given; another version or another message does not pass."""
    hello = greeting("hello", 3, {"role": "a"})
    assert read_greeting("hello", 3, hello | {"_tensors": []}) == {"role": "a"}
    for header in ({}, greeting("welcome", 3, {}), greeting("hello", 4, {}), {"op": "hello"}):
        with pytest.raises(WireError, match="version"):
            read_greeting("hello", 3, header)


@given(header=st.dictionaries(st.sampled_from(["op", "version", "x"]), st.none() | st.integers() | st.text()))
def test_whatever_comes_first_is_read_or_refused(header: dict[str, Any]) -> None:
    """No header makes a reader fail in any other way than `WireError`."""
    for read in (*READERS.values(), lambda given: read_greeting("hello", 1, given)):
        try:
            read(header)
        except WireError:
            continue


def test_the_pause_is_cut_at_random_by_half_at_most() -> None:
    """So that clients of one dead server do not come back together."""
    backoff, rng = Backoff(first_s=1.0, max_s=4.0), random.Random(0)
    waits = [backoff.wait_s(3, rng) for _ in range(200)]
    assert 2.0 <= min(waits) < 2.2
    assert 3.8 < max(waits) <= 4.0
    assert [backoff.wait_s(failures) for failures in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 4.0]
