"""`GET /`, `/docs` and `/ui/...`. The browser runs and loads nothing but what this server sends."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from plait_serving.http.edge.auth import FILES_OF_THE_PAGE
from plait_serving.http.edge.errors import ApiError

router = APIRouter(include_in_schema=False)

_SAME_FOR_BOTH = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "manifest-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
PAGE_POLICY = _SAME_FOR_BOTH + "; require-trusted-types-for 'script'; trusted-types 'none'"
"""No script may turn text into markup either. Swagger UI does (it writes descriptions as markup), so `/docs` lacks
this part."""
DOCS_POLICY = _SAME_FOR_BOTH

_HEADERS: Mapping[str, str] = {
    # Asked for each time, answered with 304 while it is the same: a new version of the server is seen at once.
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


@router.get("/")
async def page(request: Request) -> Response:
    """Return the page."""
    return _sent(request, read_files()["index.html"], PAGE_POLICY)


@router.get("/docs")
async def docs(request: Request) -> Response:
    """Return the interactive documentation of all routes."""
    return _sent(request, read_files()["docs.html"], DOCS_POLICY)


@router.get(FILES_OF_THE_PAGE + "{name:path}")
async def file(request: Request, name: str) -> Response:
    """Return a style, a module or an icon of the page."""
    found = read_files().get(name)
    if found is None or name.endswith(".html"):
        raise ApiError(404, "the page has no such file", code="unknown_route")
    return _sent(request, found, PAGE_POLICY)


def _sent(request: Request, file: WebFile, policy: str) -> Response:
    headers = {**_HEADERS, "etag": file.etag, "content-security-policy": policy}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    if file.packed is not None:
        headers["vary"] = "accept-encoding"
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(file.packed, media_type=file.media_type, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)


WEB_FOLDER = Path(__file__).parents[2] / "web"
_PACKED = ".gz"

MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
"""What is sent, by ending; a file with another ending (a licence) is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """A file as it is sent. `etag` changes with its bytes. `packed`: its gzip, if the package has it so."""

    body: bytes
    packed: bytes | None
    media_type: str
    etag: str


@cache
def read_files() -> Mapping[str, WebFile]:
    """Return the files below `WEB_FOLDER` by their path relative to it, with `/` between its parts and without `.gz`.

    A request names a file by looking it up here, so no path leads anywhere else.
    """
    found = {}
    for path in sorted(WEB_FOLDER.rglob("*")):
        is_packed = path.suffix == _PACKED
        name = path.relative_to(WEB_FOLDER).as_posix().removesuffix(_PACKED)
        media_type = MEDIA_TYPES.get(PurePosixPath(name).suffix)
        if media_type is not None and path.is_file():
            raw = path.read_bytes()
            body = gzip.decompress(raw) if is_packed else raw
            etag = f'"{hashlib.sha256(raw).hexdigest()[:32]}"'
            packed = raw if is_packed else None
            found[name] = WebFile(body=body, packed=packed, media_type=media_type, etag=etag)
    return found
