"""How much work a pattern is, counted: the matcher of Python's `re`, as far as patterns of ours need it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any


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
