"""Finished images that are fetched by URL, for a while: files of one folder, here or wherever fsspec leads. All fsspec
calls for them are made here.

A file's name says when it ends and is otherwise random, so any process that sees the folder can serve it and remove
it: other replicas, and a server that was started again. Nothing else is kept about it.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from plait_serving.diffusion.errors import EngineError, Refused
from plait_serving.images.codec import OutputFormat
from plait_serving.images.config import ResultsSection

_NAME = re.compile(r"(?P<ends>[0-9a-f]{9})-[A-Za-z0-9_-]{32}\.(?P<format>png|jpeg|webp)")
_TOKEN_BYTES = 24
_COUNTED_FOR_S = 10.0
"""How old the count of bytes may be: listing a bucket takes longer than storing an image. What other replicas store
meanwhile can exceed the bound."""


class StoreFailed(EngineError):
    """The store cannot be used, which its operator must mend; the message has no paths and credentials."""

    code = "store_failed"


class StoreFull(StoreFailed, Refused):
    """There is no room; `retry_after_s`: when the first of the kept images ends."""

    code = "store_full"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResult:
    """A kept image; it ends in `left_s` seconds."""

    body: bytes
    output_format: OutputFormat
    left_s: float


class ResultStore:
    """Keeps images under unguessable names until they end. Methods block; call them in threads, from any of them."""

    def __init__(
        self,
        settings: ResultsSection,
        *,
        now_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._now_s = now_s
        self._monotonic_s = monotonic_s
        # What the folder holds, as far as this process knows.
        self._lock = threading.Lock()
        self._counted_at_s, self._nbytes, self._first_end_s = float("-inf"), 0, float("inf")
        self._opened: tuple[Any, str] | None = None

    def check(self) -> None:
        """Raise `StoreFailed` if nothing could be kept now. Removes what has ended."""
        with self._lock:
            self._count_if_old()
            self._check_room(1)

    def put(self, body: bytes, output_format: OutputFormat) -> str:
        """Keep an image and return its name. Raises `StoreFailed`."""
        ends_s = int(self._now_s() + self._settings.lifetime_s) + 1
        name = f"{ends_s:09x}-{secrets.token_urlsafe(_TOKEN_BYTES)}.{output_format.value}"
        with self._lock:
            self._count_if_old()
            self._check_room(len(body))
            self._nbytes += len(body)  # now, so that others who write at once see it
            self._first_end_s = min(self._first_end_s, ends_s)
        files, folder = self._files()
        with _reported("keep an image"):
            files.pipe_file(f"{folder}/{name}", body)
        return name

    def get(self, name: str) -> StoredResult | None:
        """Return a kept image; None if there is none of that name, or its time is over. Raises `StoreFailed`."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        left_s = int(match["ends"], 16) - self._now_s()
        if left_s <= 0:
            return None
        files, folder = self._files()
        with _reported("read an image"):
            try:
                body = files.cat_file(f"{folder}/{name}")
            except FileNotFoundError:
                return None
        return StoredResult(body=body, output_format=OutputFormat(match["format"]), left_s=left_s)

    def _files(self) -> tuple[Any, str]:
        """Return fsspec's file system and the folder in it, which is made if it is missing."""
        if self._opened is None:
            import fsspec.core

            with _reported("open its folder"):
                place = self._settings.url or str(self._settings.folder)
                files, folder = fsspec.core.url_to_fs(place, use_listings_cache=False)
                files.makedirs(folder, exist_ok=True)
            self._opened = files, folder.rstrip("/")
        return self._opened

    def _check_room(self, nbytes: int) -> None:
        most = self._settings.max_bytes
        if self._nbytes + nbytes <= most:
            return
        retry_after_s = min(max(1.0, self._first_end_s - self._now_s()), self._settings.lifetime_s)
        message = f"the store of results is full ({most:,} bytes); ask for b64_json, or again later"
        raise StoreFull(message, retry_after_s=retry_after_s)

    def _count_if_old(self) -> None:
        """Count what is there, and remove what has ended: whoever comes first does it for all."""
        if self._monotonic_s() - self._counted_at_s < _COUNTED_FOR_S:
            return
        files, folder = self._files()
        with _reported("list its folder"):
            try:
                entries = files.ls(folder, detail=True)
            except FileNotFoundError:  # removed since it was opened; of an object store, one without objects
                files.makedirs(folder, exist_ok=True)
                entries = []
        nbytes, first_end_s = 0, float("inf")
        for entry in entries:
            match = _NAME.fullmatch(entry["name"].rsplit("/", 1)[-1])
            if match is None:  # not ours
                continue
            if (ends_s := int(match["ends"], 16)) <= self._now_s():
                with _reported("remove an image"), suppress(FileNotFoundError):  # another replica was first
                    files.rm_file(entry["name"])
                continue
            nbytes += int(entry["size"] or 0)
            first_end_s = min(first_end_s, ends_s)
        self._counted_at_s, self._nbytes, self._first_end_s = self._monotonic_s(), nbytes, first_end_s


@contextmanager
def _reported(doing: str) -> Iterator[None]:
    """Translate whatever a file system raises: each has errors of its own."""
    try:
        yield
    except Exception as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise StoreFailed(f"the store of results cannot {doing}: {why}; ask for b64_json") from error
