"""What somebody may have meant."""

from __future__ import annotations

import difflib

import pytest

from plait_serving.ranking import codec
from plait_serving.spelling import hint

MANY = [f"style_{number:04d}_portrait" for number in range(3_000)]


@pytest.mark.parametrize(
    ("name", "near"),
    [("style_1234_portrit", "style_1234_portrait"), ("style_2999portrait", "style_2999_portrait"),
     ("STYLE_0007_PORTRAIT", "style_0007_portrait"), ("zzz", None)],
)  # fmt: skip
@pytest.mark.parametrize("ask", [hint, codec.hint])
def test_of_thousands_of_names_a_few_are_compared(monkeypatch, name, near, ask):
    """A folder of LoRAs may have thousands, and a comparison takes as long as a hundred lines of anything else; those
    next to it in the order of the alphabet are among them."""
    compared = []
    ratio = difflib.SequenceMatcher.set_seq1

    def counted(self, text):
        compared.append(text)
        ratio(self, text)

    monkeypatch.setattr(difflib.SequenceMatcher, "set_seq1", counted)
    says = ask(name, MANY)
    assert len(compared) <= 2 * 64
    assert says.startswith(f"; did you mean {near}?") if near else "did you mean" not in says


def test_of_a_few_names_all_are_compared():
    """As before."""
    assert hint("xoto", ["sketch", "noto"]) == "; did you mean noto?"
    assert hint("", ["sketch"]) == hint("a", []) == ""
