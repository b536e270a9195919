"""The files of the page, read once. A request names a file by looking it up here, so no path leads anywhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["WEB_FOLDER", "WebFile", "read_files"]

WEB_FOLDER = Path(__file__).parents[2] / "web"

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
    """A file as it is sent. `etag` changes with its bytes."""

    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path = WEB_FOLDER) -> Mapping[str, WebFile]:
    """Return the files below `folder` by their path relative to it, with `/` between its parts."""
    found = {}
    for path in sorted(folder.rglob("*")):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None and path.is_file():
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            found[path.relative_to(folder).as_posix()] = WebFile(body=body, media_type=media_type, etag=etag)
    return MappingProxyType(found)
