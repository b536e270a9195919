"""What is read of an image file: the pixels of its first frame, and which way up they are.

A decoder's work follows what a file declares, not its bytes: a scan of a JPEG of 30 bytes passes over all pixels, and
Pillow looks at each chunk of a PNG in Python. So before a decoder sees a file it is walked over once, in time linear in
its bytes. One of too many chunks or scans is refused, and what the pixels do not depend on (texts, profiles,
thumbnails, further frames) is left out unread. Of what remains, the bound on pixels bounds the work: a PNG is one
inflation that ends with the last row, a WebP one frame, a JPEG at most `MAX_SCANS` passes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal

from plait_serving.diffusion.errors import RequestError

MAX_SCANS = 32
"""Encoders write at most a dozen. With each bit plane of three components on its own there would be 32."""

MAX_CHUNKS = 10_000
"""Of a PNG or WebP, frames included; segments of a JPEG. A PNG of 20 MB in libpng's pieces of 8 KiB has 2,500."""

_SOS, _EOI, _HEAD = b"\xda", b"\xd9", b""
# Of JPEGs baseline, extended and progressive frames, whose codes are Huffman's: a pass over arithmetic ones costs many
# times as much, and no browser reads them. Then tables and restarts.
_JPEG = (b"\xc0", b"\xc1", b"\xc2", b"\xc4", b"\xdb", b"\xdd", _SOS, _EOI)
_PIXELS = frozenset({_HEAD, b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND", *_JPEG})
# The last two are JFIF's and Adobe's, by which decoders tell colour spaces.
_FIRST = frozenset({b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF", b"\xe0", b"\xee"})

_NOTES = frozenset({b"eXIf", b"iTXt", b"EXIF", b"XMP ", b"\xe1"})
"""Where EXIF and XMP are; the first few, of the length that a JPEG's can have, are searched for the orientation."""
_MAX_NOTES, _MAX_NOTE_BYTES = 4, 64 << 10
_XMP = re.compile(rb"tiff:Orientation(?:=\"|>)([1-8])")
_TIFF = re.compile(rb"II\*\0|MM\0\*")
"""What EXIF begins with."""
_ORIENTATION, _SHORT = 0x112, 3
Order = Literal["little", "big"]

_MARKER = re.compile(rb"\xff([^\x00\xff\xd0-\xd7])", re.DOTALL)
SEARCHED_BYTES = 64 << 10
"""Of a JPEG's coded data, at a time."""
_BARE = frozenset({_EOI, b"\xd8", b"\x01"})
"""Markers of no length, beside those within a scan."""


def trimmed(raw: bytes, *, param: str) -> tuple[bytes, int]:
    """Return a PNG, JPEG or WebP file with nothing in it but its first frame, any other as it is; and EXIF's number of
    its orientation, 1 to 8. Raises `RequestError` naming `param` for one of too many chunks or scans."""
    walk = _walk_of(raw)
    if walk is None:
        return raw, 1
    kept: list[bytes] = []
    notes: list[bytes] = []
    seen: Counter[bytes] = Counter()
    for what, chunk in islice(walk(raw), MAX_CHUNKS + 1):
        seen[what] += 1
        if what in _PIXELS or (what in _FIRST and seen[what] == 1):
            kept.append(chunk)
        elif what in _NOTES and len(chunk) <= _MAX_NOTE_BYTES and len(notes) < _MAX_NOTES:
            notes.append(chunk)
    if seen.total() > MAX_CHUNKS:
        raise RequestError(f"the image has more than {MAX_CHUNKS:,} chunks or frames", param=param)
    if seen[_SOS] > MAX_SCANS:
        raise RequestError(f"the JPEG has {seen[_SOS]:,} scans; at most {MAX_SCANS} are read", param=param)
    body = b"".join(kept)
    body = b"RIFF" + len(body).to_bytes(4, "little") + body if walk is _webp_chunks else body
    return body, next(filter(None, map(_orientation, notes)), 1)


def chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield what each part of a PNG, JPEG or WebP file is, and its bytes: the first `MAX_CHUNKS`."""
    walk = _walk_of(raw)
    return iter(()) if walk is None else islice(walk(raw), MAX_CHUNKS)


def _walk_of(raw: bytes) -> Callable[[bytes], Iterator[tuple[bytes, bytes]]] | None:
    return next((walk for magic, walk in _WALKS.items() if raw.startswith(magic)), None)


def _png_chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield what each part of the file is, and its bytes."""
    yield _HEAD, raw[:8]
    at, what = 8, _HEAD
    while at < len(raw) and what != b"IEND":
        what, end = raw[at + 4 : at + 8], at + 12 + int.from_bytes(raw[at : at + 4], "big")
        yield what, raw[at:end]
        at = end


def _webp_chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    yield _HEAD, raw[8:12]
    at, last = 12, min(len(raw), 8 + int.from_bytes(raw[4:8], "little"))
    while at < last:
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        end = at + 8 + size + size % 2
        yield raw[at : at + 4], raw[at : min(end, last)]
        at = end


def _jpeg_chunks(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the segments by their markers, a scan's with the coded data behind it, up to the end of the first image."""
    yield _HEAD, raw[:2]
    at, what = 2, _HEAD
    while what != _EOI and (found := _next_marker(raw, at)) is not None:
        start, at, what = found.start(), found.end(), found[1]
        if what not in _BARE:
            at += int.from_bytes(raw[at : at + 2], "big")
        if what == _SOS:
            following = _next_marker(raw, at)
            at = len(raw) if following is None else following.start()
        yield what, raw[start:at]


def _next_marker(raw: bytes, at: int) -> re.Match[bytes] | None:
    """Search in pieces: other threads wait for the whole of each."""
    ends = range(at + SEARCHED_BYTES, len(raw) + SEARCHED_BYTES, SEARCHED_BYTES)
    return next(filter(None, (_MARKER.search(raw, end - SEARCHED_BYTES, end + 1) for end in ends)), None)


_WALKS = {b"\x89PNG\r\n\x1a\n": _png_chunks, b"\xff\xd8\xff": _jpeg_chunks, b"RIFF": _webp_chunks}


def _orientation(note: bytes) -> int | None:
    """Return what EXIF or XMP says; None if it says nothing. Pillow would remember a warning for each broken entry."""
    if (said := _XMP.search(note)) is not None:
        return int(said[1])
    tiff, order = tiff_of(note)
    entries = tiff_entries(tiff, order, tiff[4:8], _ORIENTATION)
    values = (int.from_bytes(it[8:10], order) for it in entries if int.from_bytes(it[2:4], order) == _SHORT)
    return next((value for value in values if 1 <= value <= 8), None)


def tiff_of(note: bytes) -> tuple[bytes, Order]:
    """Return EXIF, empty if a chunk has none, and the order of its numbers' bytes."""
    head = _TIFF.search(note, 0, 32)
    return (b"", "big") if head is None else (note[head.start() :], "little" if head[0] == b"II*\0" else "big")


def tiff_entries(tiff: bytes, order: Order, place: bytes, tag: int) -> Iterator[bytes]:
    """Yield the entries of that tag, 12 bytes each, in the directory at a place."""
    first = int.from_bytes(place, order) + 2
    for at in range(first, min(first + 12 * int.from_bytes(tiff[first - 2 : first], order), len(tiff)), 12):
        if int.from_bytes(tiff[at : at + 2], order) == tag:
            yield tiff[at : at + 12]
