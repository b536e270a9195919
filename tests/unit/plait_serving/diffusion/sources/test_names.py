"""What a LoRA, or a model in a folder, may be called."""

from __future__ import annotations

import logging
import unicodedata

import pytest

from plait_serving.diffusion.sources.names import LeftOut, composed, is_name
from support.names import NO_NAMES, ODD_NAMES


@pytest.mark.parametrize("name", [*ODD_NAMES, "a" * 200, "花" * 200, "...", "a  b"])
def test_names_of_any_script_are_names(name):
    """Whatever can be written down, up to 200 characters."""
    assert is_name(name)
    assert composed(name) == name


@pytest.mark.parametrize("name", NO_NAMES, ids=ascii)
def test_paths_and_what_nobody_sees_are_none(name):
    """No separators, no tags, nothing that has no width or turns text around, no spaces at the ends."""
    assert not is_name(name)


def test_every_character_is_judged_by_the_rule():
    """One after the other, between two letters: forbidden are five marks, and control, format and surrogate
    characters."""
    for code in (*range(0x3100), *range(0xD700, 0xE010), *range(0xFB00, 0x10200), 0x1F34E, 0xE0001, 0x10FFFF):
        text = f"a{chr(code)}b"
        wanted = chr(code) not in "/\\:<>" and unicodedata.category(chr(code)) not in ("Cc", "Cf", "Cs")
        assert is_name(text) == (wanted and unicodedata.normalize("NFC", text) == text), hex(code)


def test_what_is_far_too_long_is_not_composed():
    """That would take the square of its length."""
    assert composed("e\u0301" * 200) == "é" * 200
    assert composed("e\u0301" * 100_000) == "e\u0301" * 100_000


def test_what_is_left_out_is_said_once(tmp_path, caplog):
    """And once more after it had gone; line breaks and broken bytes in file names stay within the line."""
    left_out = LeftOut(logging.getLogger("plait.test"), tmp_path)
    broken = b"a\nb\xff".decode("utf-8", "surrogateescape")
    for reasons in ({"x": "one"}, {"x": "one", broken: "two"}, {"x": "one"}, {}, {"x": "one"}, {"x": "three"}):
        left_out.tell(reasons)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{tmp_path}/{what}" for what in (
            "x is ignored: one", "a\\nb\\udcff is ignored: two", "x is ignored: one", "x is ignored: three",
        )
    ]  # fmt: skip
