"""Hints at names that somebody may have meant."""

from __future__ import annotations

import difflib

from plait_serving import spelling
from plait_serving.spelling import hint


def test_of_thousands_of_names_a_few_are_compared(monkeypatch):
    """A refusal that names a LoRA costs the same beside three thousand; the near ones are found."""
    compared = []
    real = difflib.get_close_matches
    monkeypatch.setattr(
        spelling.difflib, "get_close_matches", lambda word, among, n: compared.extend(among) or real(word, among, n)
    )
    names = [f"Style_{i:04}" for i in range(3000)]
    assert hint("style_04170", reversed(names)) == "; did you mean Style_0417?"
    assert hint("STYLE_2999x", names) == "; did you mean Style_2999?"
    assert hint("aaaaaaaaaa", names) == hint("zzzzzzzzzz", names) == ""
    assert len(compared) <= 4 * 64
    assert hint("sytle_1", names[:3]) == "; did you mean Style_0001?"
