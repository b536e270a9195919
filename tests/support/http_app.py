"""An application over the fake service, with a fixed clock and seed, and small images to send to it."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from plait_serving.diffusion.values import RgbImage
from plait_serving.http.app import app_from_context
from plait_serving.http.context import HttpSettings, RouteContext

FIXED_SEED = 1234
FIXED_TIME_S = 1_790_000_000.5


def invert(image: RgbImage) -> RgbImage:
    """A preprocessor whose effect is easy to see."""
    return np.asarray(255 - image, dtype=np.uint8)


PREPROCESSORS: Mapping[str, Callable[[RgbImage], RgbImage]] = {"edges": invert}


def make_app(service: FakeImageService, settings: HttpSettings | None = None) -> FastAPI:
    """The real application around ``service``."""
    settings = replace(settings or HttpSettings(), preprocessors=PREPROCESSORS)
    return app_from_context(
        RouteContext(images=service, settings=settings, now_s=lambda: FIXED_TIME_S, random_seed=lambda: FIXED_SEED)
    )


def make_client(service: FakeImageService, settings: HttpSettings | None = None) -> TestClient:
    """A client that gets a 500 as an answer, as over a socket, instead of the exception."""
    return TestClient(make_app(service, settings), raise_server_exceptions=False)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """An image as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int = 16, height: int = 16, colour: tuple[int, int, int] = (200, 10, 30)) -> bytes:
    """A one-coloured PNG."""
    return saved(Image.new("RGB", (width, height), colour))


def b64(raw: bytes) -> str:
    """Plain base64."""
    return base64.b64encode(raw).decode()


def pixels(encoded: str) -> RgbImage:
    """The image in an answer."""
    return np.array(Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB"))


class AsgiCall:
    """One request straight into an ASGI app, whose client can go away at a moment of the test's choosing. Without a
    ``body`` it announces one that never comes."""

    def __init__(
        self, app: FastAPI, body: bytes | None, *, path: str = "/v1/images/generations", key: str | None = None
    ) -> None:
        self.chunks: list[bytes] = []
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self._gone = asyncio.Event()
        self._arrived = asyncio.Event()
        self.requests = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]
        length = 1000 if body is None else len(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        headers += [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, object]:
        if self.requests:
            return self.requests.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        elif message.get("body"):
            self.chunks.append(message["body"])
            self._arrived.set()

    def disconnect(self) -> None:
        """The client closes its connection."""
        self._gone.set()

    async def wait_chunk(self) -> None:
        """Returns when some of the answer's body was sent."""
        await asyncio.wait_for(self._arrived.wait(), 60)

    async def done(self) -> None:
        """Returns when the app has finished with the request."""
        await asyncio.wait_for(self.task, 60)
