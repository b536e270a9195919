"""Decompression of bodies within a bound."""

from __future__ import annotations

import zlib

from plait_disagg.errors import BadInput
from plait_serving.ranking.codec import TooLarge

__all__ = ["inflate"]

_ENCODINGS = ("gzip", "deflate")
# zlib's manual, inflateInit2: 32 more than the window's 15 bits reads the formats of gzip and zlib alike. HTTP's
# "deflate" is the zlib format (RFC 9110, 8.4.1.2).
_WINDOW_BITS = 15 + 32


def inflate(raw: bytes, encoding: str, *, max_bytes: int) -> bytes:
    """Decompress a body of that content-encoding to at most `max_bytes` + 1 bytes. Raises `BadInput`."""
    if encoding.strip().lower() not in _ENCODINGS:
        detail = f"content-encoding: only {' and '.join(_ENCODINGS)} are understood"
        raise BadInput(detail, param="content-encoding")
    unpacker = zlib.decompressobj(_WINDOW_BITS)
    try:
        body = unpacker.decompress(raw, max_bytes + 1)
    except zlib.error as error:
        raise BadInput(f"the body is not {encoding}: {error}", param="content-encoding") from error
    if len(body) > max_bytes:
        raise TooLarge(f"the body is larger than {max_bytes} bytes when it is unpacked")
    if not unpacker.eof or unpacker.unused_data:
        detail = "ends too early" if not unpacker.eof else "goes on after its end"
        raise BadInput(f"the compressed body {detail}", param="content-encoding")
    return body
