"""A server that is not plait and speaks its APIs: images and infer; every service time is known, and requests do not
wait for each other."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from support.app_server import AppServer

PICTURE = base64.b64encode(b"not really a picture" * 10).decode()


def create_app(service_s: float) -> FastAPI:
    """Answers after ``service_s``."""
    app = FastAPI()

    @app.post("/v1/images/generations")
    async def generate(request: Request) -> Response:
        """OpenAI's answer; ``stream`` sends one partial image and the finished one."""
        body = json.loads(await request.body())
        if body.get("stream"):
            return StreamingResponse(_events(service_s), media_type="text/event-stream")
        await asyncio.sleep(service_s)
        images = [{"b64_json": PICTURE} for _ in range(int(body.get("n", 1)))]
        return _json({"created": 0, "data": images, "timings": {"queue": 0.0, "total": service_s}})

    @app.post("/v2/models/{model}/infer")
    async def infer(model: str, request: Request) -> Response:
        """Open Inference Protocol v2: one score for each request, whatever was asked."""
        await request.body()
        await asyncio.sleep(service_s)
        scores = {"name": "scores", "datatype": "FP32", "shape": [1, 1], "data": [0.5]}
        headers = {"server-timing": f"infer;dur={service_s * 1000:.3f}"}
        return _json({"model_name": model, "outputs": [scores]}, headers)

    return app


@contextmanager
def stub_server(service_s: float) -> Iterator[str]:
    """The URL of a running one."""
    server = AppServer(create_app(service_s))
    yield f"http://127.0.0.1:{server.port}"
    server.stop()


async def _events(service_s: float) -> AsyncIterator[str]:
    yield ": step 1/2\n\n"
    await asyncio.sleep(service_s / 2)
    yield f"event: image_generation.partial_image\ndata: {json.dumps({'b64_json': PICTURE})}\n\n"
    await asyncio.sleep(service_s / 2)
    done = {"b64_json": PICTURE, "timings": {"total": service_s}}
    yield f"event: image_generation.completed\ndata: {json.dumps(done)}\n\n"


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), media_type="application/json", headers=headers)
