"""The files of the page, read once. A request names a file by looking it up here, so no path leads anywhere else."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

__all__ = ["WEB_FOLDER", "WebFile", "read_files"]

WEB_FOLDER = Path(__file__).parents[2] / "web"
_PACKED = ".gz"

MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
        ".webmanifest": "application/manifest+json",
    }
)
"""What is sent, by ending; a file with another ending (a licence) is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A file as it is sent. `etag` changes with its bytes. `packed`: its gzip, if the package has it so."""

    body: bytes
    packed: bytes | None
    media_type: str
    etag: str


def read_files(folder: Path = WEB_FOLDER) -> Mapping[str, WebFile]:
    """Return the files below `folder` by their path relative to it, with `/` between its parts and without `.gz`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_packed = path.suffix == _PACKED
        name = path.relative_to(folder).as_posix().removesuffix(_PACKED)
        media_type = MEDIA_TYPES.get(PurePosixPath(name).suffix)
        if media_type is not None and path.is_file():
            raw = path.read_bytes()
            body = gzip.decompress(raw) if is_packed else raw
            etag = f'"{hashlib.sha256(raw).hexdigest()[:32]}"'
            packed = raw if is_packed else None
            found[name] = WebFile(body=body, packed=packed, media_type=media_type, etag=etag)
    return MappingProxyType(found)
