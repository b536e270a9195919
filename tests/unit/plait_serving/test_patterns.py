"""No pattern that reads what clients send takes time with the square of it: any field may have 32,000 characters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from types import ModuleType

import pytest

from plait.tuning.service import untrusted
from plait_autoconfig import objective
from plait_serving.diffusion import admission, prompt_syntax, request_fields, values
from plait_serving.http.edge import hosts, request_id
from plait_serving.http.images import edit_body
from plait_serving.images import codec, results, stored_text
from plait_serving.ranking import codec as ranking
from support.patterns import Counted


def patterns_of(*modules: ModuleType) -> dict[str, re.Pattern[str]]:
    found = {f"{module.__name__}.{name}": each for module in modules for name, each in vars(module).items()}
    return {
        name: each for name, each in found.items() if isinstance(each, re.Pattern) and isinstance(each.pattern, str)
    }


DIGITS = re.compile(ranking._DIGITS.pattern.decode())
SEARCHED = {**patterns_of(prompt_syntax), "ranking": DIGITS, "control": request_fields._CONTROL}
MATCHED = patterns_of(
    admission, codec, edit_body, hosts, objective, request_fields, request_id, results, stored_text, untrusted, values
)
PIECES = ["".join(piece) for count in (1, 2) for piece in product("([)<>:\\a1. ", repeat=count)]
"""Of what most of these patterns are about."""
WORST = [
    *PIECES, "<lora:", "<lora:a", "<lora:a:", "<lora:a:1", "BREAK", " BREAK", "AND ", "(: 1 ", "(a:1 ", "((a", "((a)",
    "\\: 1 ", '"', 'a:"', 'a: "b', 'a: "b\\"', "a: b,", 'a: "b",', "a[", "a[1][a", "images.knobs.a", "max  a", "a<=1",
    "1x1", "-", "recommend.models.a.cn.a",
]  # fmt: skip


def texts(piece: str, count: int) -> Iterator[str]:
    for head, tail in product(("", "("), ("", ":1)")):
        yield head + piece * count + tail


@pytest.mark.parametrize("name", sorted({**SEARCHED, **MATCHED}))
def test_no_pattern_looks_at_a_character_again_and_again(name):
    """Twice the text is twice the characters that are looked at, however it is made up to be tried in vain. The
    matcher that counts them finds what Python's does."""
    pattern, is_searched = {**MATCHED, **SEARCHED}[name], name in SEARCHED
    count = 15 if is_searched else 70  # more than any bounded part of those has
    for piece in WORST:
        for once, twice in zip(texts(piece, count), texts(piece, 2 * count), strict=True):
            looks = []
            for text in (once, twice):
                counted = Counted(pattern)
                found = counted.find(text) if is_searched else counted.follow(text)
                assert found == list(python_finds(pattern, text, is_searched)), text
                looks.append(counted.looks)
            assert looks[1] <= 2.2 * looks[0] + 40, once


def python_finds(pattern: re.Pattern[str], text: str, is_searched: bool) -> Iterator[str]:
    if is_searched:
        yield from (each[0] for each in pattern.finditer(text))
        return
    at = 0
    while (each := pattern.match(text, at)) is not None and each.end() > at:
        yield each[0]
        at = each.end()


def test_a_pattern_that_looks_again_and_again_is_seen():
    """What the test above goes by."""
    short, long = Counted(re.compile("a+b")), Counted(re.compile("a+b"))
    assert short.find("a" * 15) == long.find("a" * 30) == []
    assert long.looks > 3 * short.looks
