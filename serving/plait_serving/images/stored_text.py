"""The text about its making that an image file carries, where A1111 and plait store it: read without a decoder, in time
linear in the file."""

from __future__ import annotations

import json
import re
from itertools import islice

from plait_serving.images.trimming import chunks, tiff_entries, tiff_of

MAX_TEXT_BYTES = 256 << 10
"""Twice what a prompt and a negative prompt of the longest kind take."""

_KEY = b"parameters"
_NOTES = frozenset({b"EXIF", b"\xe1"})
_UNICODE = b"UNICODE\0"
_EXIF_DIRECTORY, _USER_COMMENT = 0x8769, 0x9286
_PAIR = re.compile(r'\s*(\w[\w /-]*):\s*("(?:[^"\\]|\\.)*"|[^,]*)(?:,|\Z)')
_FEWEST_PAIRS = 3
"""Of a line that is settings: a prompt may end with `style: oil`."""
_NEGATIVE = "Negative prompt:"


def read_parameters(raw: bytes) -> str | None:
    """Return the parameters that `encode_image` (or A1111) stored in an image, or None: a PNG's text of that name, or
    EXIF's user comment."""
    for what, chunk in chunks(raw):
        if len(chunk) > MAX_TEXT_BYTES:
            continue
        if what in (b"tEXt", b"iTXt") and chunk[8:].startswith(_KEY + b"\0"):
            body = chunk[8 + len(_KEY) + 1 : -4]
            if what == b"tEXt":
                return body.decode("latin-1")
            if body[:1] == b"\0":  # not deflated, then method, language and translated key
                return body[2:].split(b"\0", 2)[-1].decode("utf-8", "replace")
        elif what in _NOTES and (comment := _comment(chunk)).startswith(_UNICODE):
            return comment[len(_UNICODE) :].decode("utf-16-be", "replace")
    return None


def _comment(note: bytes) -> bytes:
    """Return EXIF's user comment, empty if it has none."""
    tiff, order = tiff_of(note)
    for outer in islice(tiff_entries(tiff, order, tiff[4:8], _EXIF_DIRECTORY), 1):
        for found in tiff_entries(tiff, order, outer[8:], _USER_COMMENT):
            length, at = int.from_bytes(found[4:8], order), int.from_bytes(found[8:], order)
            return tiff[at : at + length]
    return b""


def settings_of(text: str) -> dict[str, str]:
    """Return what such a text says, by A1111's keys: `Prompt`, `Negative prompt`, `Steps` and so on."""
    *lines, last = text.strip().split("\n")
    pairs: dict[str, str] = {}
    at = 0
    while (pair := _PAIR.match(last, at)) is not None and pair.end() > at:
        pairs[pair[1]] = _unquoted(pair[2])
        at = pair.end()
    if len(pairs) < _FEWEST_PAIRS:
        lines, pairs = [*lines, last], {}
    begins = next((i for i, line in enumerate(lines) if line.startswith(_NEGATIVE)), len(lines))
    prompt, negative = "\n".join(lines[:begins]), "\n".join(lines[begins:]).removeprefix(_NEGATIVE)
    return {"Prompt": prompt.strip(), _NEGATIVE[:-1]: negative.strip(), **pairs}


def _unquoted(value: str) -> str:
    """Take the quotes of JSON off a value."""
    try:
        return str(json.loads(value)) if value.startswith('"') else value.strip()
    except ValueError:
        return value
