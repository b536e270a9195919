"""A1111's marks, read in one pass, against the rule as its manual has it: each bracket multiplies what is in it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.prompt_syntax import parse

WEIGHT = re.compile(r":\s*([+-]?[.\d]+)\s*\)")
TOKENS = ["(", ")", "[", "]", ":", "|", "\\", ":1.5)", ": -.5 )", "a", "b ", " "]


def naive(text: str) -> tuple[list[tuple[str, float]], bool]:
    """The twin: each letter with its weight, and whether square brackets hold a colon or a bar of their own. A bracket
    that closes goes over all letters since it opened, and over all colons and bars."""
    letters: list[list] = []
    opened: dict[str, list[tuple[int, int]]] = {"(": [], "[": []}
    marks: list[int] = []
    edits = False
    at = 0

    def close(kind: str, factor: float) -> int:
        count, start = opened[kind].pop()
        for letter in letters[count:]:
            letter[1] *= factor
        return start

    while at < len(text):
        weight = WEIGHT.match(text, at)
        if text[at] == "\\":
            following = text[at + 1 : at + 2]
            if following and following in "()[]\\|:" and not WEIGHT.match(text, at + 1):
                letters.append([following, 1.0])
                at += 1
        elif text[at] in "([":
            opened[text[at]].append((len(letters), at))
        elif weight and opened["("]:
            start = close("(", float(weight[1]))
            marks = [mark for mark in marks if mark < start]
            at = weight.end() - 1
        elif text[at] == ")" and opened["("]:
            start = close("(", 1.1)
            marks = [mark for mark in marks if mark < start]
        elif text[at] == "]" and opened["["]:
            start = close("[", 1 / 1.1)
            edits |= any(mark > start for mark in marks)
        else:
            if text[at] in ":|":
                marks.append(at)
            letters.append([text[at], 1.0])
        at += 1
    for kind, factor in (("(", 1.1), ("[", 1 / 1.1)):
        while opened[kind]:
            close(kind, factor)
    return [(letter, weight) for letter, weight in letters], edits


@given(st.lists(st.sampled_from(TOKENS), max_size=24).map("".join))
def test_every_letter_has_the_weight_of_its_brackets(text):
    """The text and its weights are the twin's; what is editing or alternation is refused, and nothing else is."""
    expected, edits = naive(text)
    if edits:
        with pytest.raises(RequestError, match="is not supported"):
            parse(text, "prompt")
        return
    if any(abs(weight) > 100 for _, weight in expected):
        return
    found = [(letter, span.weight) for span in parse(text, "prompt") for letter in span.text]
    assert [letter for letter, _ in found] == [letter for letter, _ in expected]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in expected], rel=1e-12)
