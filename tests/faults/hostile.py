"""What attackers send: files that cost far more to read than to send, prompts and sizes. Pure."""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Iterator
from itertools import product

from PIL import Image

__all__ = [
    "PROMPTS",
    "PROMPT_CHARS",
    "distinct_sizes",
    "large_body",
    "repeated_scans",
    "scans_of",
    "text_chunks",
]

PROMPT_CHARS = 32_000
"""The longest text that the API takes."""

_BRACKETS = (")", "(a)x", "((a)) ", "(a:1.1)", "[(:)]", "):", "\\:", "<a:<", "<lora:noto:1>", "BREAK ", "[a|b", "(:1")

PROMPTS = tuple((text * PROMPT_CHARS)[:PROMPT_CHARS] for text in _BRACKETS)
"""Prompts of the longest kind whose marks take the most time to read, or did once."""

_SCAN = re.compile(rb"\xff\xda(?:[^\xff]|\xff[\x00\xd0-\xd7])*")
_PNG = b"\x89PNG\r\n\x1a\n"


def scans_of(jpeg: bytes) -> list[bytes]:
    """Return the scans of a JPEG: each from its marker to the next one that is no restart."""
    return _SCAN.findall(jpeg)


def repeated_scans(*, edge: int = 4000, repeats: int = 1300) -> bytes:
    """Return a grey progressive JPEG whose last scan comes so many times again: every time, all blocks are gone over,
    for some hundred bytes of the file."""
    buffer = io.BytesIO()
    Image.new("L", (edge, edge), 128).save(buffer, "JPEG", progressive=True)
    plain = buffer.getvalue()
    end = plain.rindex(b"\xff\xd9")
    return plain[:end] + scans_of(plain)[-1] * repeats + plain[end:]


def text_chunks(*, count: int = 900_000) -> bytes:
    """Return a PNG of one pixel behind so many empty texts."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    pixel = _chunk(b"IDAT", zlib.compress(b"\0\0"))
    return _PNG + head + _chunk(b"tEXt", b"k\0") * count + pixel + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def distinct_sizes(multiple: int, *, edges: int = 46) -> Iterator[str]:
    """Return sizes, each once, the smallest first; 2,116 of 46 edges."""
    pairs = product(range(1, edges + 1), repeat=2)
    for width, height in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair)):
        yield f"{width * multiple}x{height * multiple}"


def large_body(nbytes: int) -> bytes:
    """Return the body of a request for an image that is so long, nearly all of it a control image."""
    start = b'{"prompt": "fish", "controlnets": [{"name": "edges", "image": "'
    end = b'"}]}'
    return start + b"A" * (nbytes - len(start) - len(end)) + end
