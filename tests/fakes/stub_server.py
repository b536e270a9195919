"""A server that is not plait and speaks its API of images; every service time is known, and requests do not wait for
each other."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request

from support.app_server import AppServer

PICTURE = base64.b64encode(b"not really a picture" * 10).decode()


def create_app(service_s: float) -> FastAPI:
    """Answers after ``service_s``."""
    app = FastAPI()

    @app.post("/v1/images/generations")
    async def generate(request: Request) -> dict[str, Any]:
        """OpenAI's answer."""
        body = json.loads(await request.body())
        await asyncio.sleep(service_s)
        images = [{"b64_json": PICTURE} for _ in range(int(body.get("n", 1)))]
        return {"created": 0, "data": images, "timings": {"queue": 0.0, "total": service_s}}

    return app


@contextmanager
def stub_server(service_s: float) -> Iterator[str]:
    """The URL of a running one."""
    server = AppServer(create_app(service_s))
    yield f"http://127.0.0.1:{server.port}"
    server.stop()
