"""No pattern that reads what clients send takes time with the square of it: any field may have 32,000 characters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from re import _constants as sre
from re import _parser
from types import ModuleType
from typing import Any

import pytest

from plait.tuning.service import untrusted
from plait_autoconfig import objective
from plait_serving.diffusion import admission, prompt_syntax, request_fields, values
from plait_serving.http.edge import hosts, request_id
from plait_serving.http.images import edit_body
from plait_serving.images import codec, infotext, results
from plait_serving.ranking import codec as ranking


class Counted:
    """A pattern that is tried in Python; `looks`: at how many characters of texts it looked."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._tree = list(_parser.parse(pattern.pattern, pattern.flags))
        self._folds = bool(pattern.flags & re.IGNORECASE)
        self.looks = 0

    def find(self, text: str) -> list[str]:
        """What it finds."""
        self._text, found, at = text.lower() if self._folds else text, [], 0
        while at <= len(text):
            end = next(self._match(self._tree, 0, at), None)
            if end is not None:
                found.append(text[at:end])
            at = at + 1 if end is None or end == at else end
        return found

    def follow(self, text: str) -> list[str]:
        """What it finds at the start, where that ended, and so on."""
        self._text, found, at = text.lower() if self._folds else text, [], 0
        while (end := next(self._match(self._tree, 0, at), None)) is not None and end > at:
            found.append(text[at:end])
            at = end
        return found

    def _match(self, nodes: Sequence[Any], which: int, at: int) -> Iterator[int]:
        """The places where the rest of the nodes may end, the first choice first."""
        if which == len(nodes):
            yield at
            return
        kind, what = nodes[which]
        if kind is sre.MAX_REPEAT and _is_character(what[2]):
            low, high, item = what
            run = 0
            while run < high and self._is(item[0], at + run):
                run += 1
            for count in range(run, low - 1, -1):
                self.looks += 1
                yield from self._match(nodes, which + 1, at + count)
            return
        for end in self._ends(kind, what, at):
            yield from self._match(nodes, which + 1, end)

    def _ends(self, kind: Any, what: Any, at: int) -> Iterator[int]:
        if kind is sre.SUBPATTERN:
            folds, self._folds = self._folds, self._folds or bool(what[1] & re.IGNORECASE)
            yield from self._match(list(what[3]), 0, at)
            self._folds = folds
        elif kind is sre.BRANCH:
            for branch in what[1]:
                yield from self._match(list(branch), 0, at)
        elif kind is sre.MAX_REPEAT:
            yield from self._repeated(*what, at)
        elif kind is sre.ASSERT_NOT:
            if next(self._match(list(what[1]), 0, at), None) is None:
                yield at
        elif kind is sre.AT:
            self.looks += 1
            if what in (sre.AT_END_STRING, sre.AT_END):
                holds = at == len(self._text)
            elif what is sre.AT_BEGINNING:
                holds = at == 0
            else:
                assert what is sre.AT_BOUNDARY
                holds = self._is_word(at - 1) != self._is_word(at)
            if holds:
                yield at
        elif self._is((kind, what), at):
            yield at + 1

    def _repeated(self, low: int, high: int, item: Sequence[Any], at: int) -> Iterator[int]:
        for end in self._match(list(item), 0, at) if high else ():
            if end > at:
                yield from self._repeated(low - 1, high - 1, item, end)
        if low <= 0:
            yield at

    def _is_word(self, at: int) -> bool:
        return 0 <= at < len(self._text) and (self._text[at].isalnum() or self._text[at] == "_")

    def _is(self, node: Any, at: int) -> bool:
        """Whether the character there is what the node wants."""
        self.looks += 1
        if at >= len(self._text):
            return False
        kind, what = node
        char = self._text[at].lower() if self._folds else self._text[at]
        if kind is sre.IN:
            wants = [each for each in what if each[0] is not sre.NEGATE]
            return any(_takes(each, char) for each in wants) == (len(wants) == len(what))
        return _takes(node, char)


def _is_character(item: Sequence[Any]) -> bool:
    return len(item) == 1 and item[0][0] in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY)


def _takes(node: Any, char: str) -> bool:
    kind, what = node
    if kind is sre.LITERAL:
        return ord(char) == what
    if kind is sre.NOT_LITERAL:
        return ord(char) != what
    if kind is sre.ANY:
        return char != "\n"
    if kind is sre.RANGE:
        return bool(what[0] <= ord(char) <= what[1])
    assert kind is sre.CATEGORY, node
    if what is sre.CATEGORY_WORD:
        return char.isalnum() or char == "_"
    return char.isspace() if what is sre.CATEGORY_SPACE else char.isdecimal()


def patterns_of(*modules: ModuleType) -> dict[str, re.Pattern[str]]:
    found = {f"{module.__name__}.{name}": each for module in modules for name, each in vars(module).items()}
    return {
        name: each for name, each in found.items() if isinstance(each, re.Pattern) and isinstance(each.pattern, str)
    }


DIGITS = re.compile(ranking._DIGITS.pattern.decode())
SEARCHED = {**patterns_of(prompt_syntax), "ranking": DIGITS, "control": request_fields._CONTROL}
MATCHED = patterns_of(
    admission, codec, edit_body, hosts, objective, request_fields, request_id, results, infotext, untrusted, values
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
        if is_searched and len(piece) == 2 and piece > piece[::-1]:
            continue  # but for its ends the same text as of the other way round
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
