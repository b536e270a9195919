"""A server that is not plait and speaks its APIs: images, infer, and anything else; every service time is known.

``python -m fakes.stub_server [SERVICE_MS]`` prints its URL and serves until its standard input ends. Requests do not
wait for each other.
"""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

TESTS = Path(__file__).resolve().parents[1]
PICTURE = base64.b64encode(b"not really a picture" * 10).decode()


def create_app(service_s: float = 0.0) -> FastAPI:
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

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE", "HEAD"])
    async def anything(path: str, request: Request) -> Response:
        """Says what came."""
        length = len(await request.body())
        await asyncio.sleep(service_s)
        return _json({"path": path, "bytes": length, "authorization": request.headers.get("authorization")})

    return app


async def _events(service_s: float) -> AsyncIterator[str]:
    yield ": step 1/2\n\n"
    await asyncio.sleep(service_s / 2)
    yield f"event: image_generation.partial_image\ndata: {json.dumps({'b64_json': PICTURE})}\n\n"
    await asyncio.sleep(service_s / 2)
    done = {"b64_json": PICTURE, "timings": {"total": service_s}}
    yield f"event: image_generation.completed\ndata: {json.dumps(done)}\n\n"


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value), media_type="application/json", headers=headers)


@contextmanager
def server_process(module: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of this folder as a process of its own, and the first line that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"fakes.{module}", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=TESTS,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


def main() -> None:
    """See the module docstring."""
    service_s = float(sys.argv[1]) / 1000 if len(sys.argv) > 1 else 0.0
    config = uvicorn.Config(create_app(service_s), host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)

    def watch() -> None:
        while not server.started:
            server_started.wait(0.01)
        print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
        sys.stdin.read()
        server.should_exit = True

    server_started = threading.Event()
    threading.Thread(target=watch, daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()
