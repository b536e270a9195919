"""The peer: the model itself in plain PyTorch behind FastAPI, in one process, as one would write it by hand; and what
all servers of the benchmark have in common.

It speaks the same protocol with the same binary tensors; user-side inputs are repeated over the candidates, because
that is what the model's `forward` takes. `inline` computes on the event loop's thread, else another one does, so that
the loop keeps reading.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np
import numpy.typing as npt
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from torch import nn

from plait_bench.benchmark import said, started
from plait_bench.errors import Disagreement, SystemFailed
from plait_disagg.graph.inputs import OFFSETS, Bag, Input
from plait_disagg.models.configs import build
from plait_disagg.values import RankRequest

SEED = 0

RTOL, ATOL = 1e-5, 1e-6
"""Tiling and fused lookups only change the order of additions."""

HEADER_BYTES = 8_192
"""The size to which every JSON header is padded with blanks, so that all bodies can be sent with the same HTTP
headers."""

_HEADER_BYTES = "inference-header-content-length"
HEADERS = {_HEADER_BYTES: str(HEADER_BYTES), "content-type": "application/octet-stream"}
_DATATYPES = {torch.float32: "FP32", torch.int64: "INT64"}
_DTYPES = {"FP32": np.float32, "INT64": np.int64}

_START_S = 180.0
"""The time limit for starting: a model of a gigabyte is built or mapped, and warmed up."""


def body(request: RankRequest) -> bytes:
    """Make the body of one infer request: all tensors binary, scores requested in binary."""
    inputs, data = zip(*(_described(name, tensor) for name, tensor in request.tensors.items()), strict=True)
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}, separators=(",", ":"))
    return b"".join([head.encode().ljust(HEADER_BYTES), *data])


def _described(name: str, tensor: torch.Tensor) -> tuple[dict[str, Any], bytes]:
    """Return what a header says of a tensor, and its bytes."""
    data, shape = tensor.numpy().tobytes(), list(tensor.shape)
    parameters = {"binary_data_size": len(data)}
    return {"name": name, "shape": shape, "datatype": _DATATYPES[tensor.dtype], "parameters": parameters}, data


def parse(content: bytes, header_bytes: int) -> dict[str, torch.Tensor]:
    """Return the binary tensors of an infer request, by name. Trusts the request: it comes from our own generator."""
    head = json.loads(content[:header_bytes])
    tensors, start = {}, header_bytes
    for entry in head["inputs"]:
        count = int(np.prod(entry["shape"]))
        array = np.frombuffer(content, dtype=_DTYPES[entry["datatype"]], count=count, offset=start)
        tensors[entry["name"]] = torch.from_numpy(array.reshape(entry["shape"]).copy())
        start += array.nbytes
    return tensors


def repeat_user(inputs: tuple[Input, ...], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with one row per candidate for user-side inputs, as `forward` expects."""
    first = next(item for item in inputs if item.side == "item")
    candidates = len(tensors[first.name + OFFSETS]) - 1 if isinstance(first, Bag) else len(tensors[first.name])
    given = dict(tensors)
    for item in inputs:
        if item.side == "item":
            continue
        if isinstance(item, Bag):
            ids = tensors[item.name]
            given[item.name] = ids.repeat(candidates)
            given[item.name + OFFSETS] = torch.arange(candidates + 1) * len(ids)
        else:
            given[item.name] = tensors[item.name].expand(candidates, *item.shape)
    return given


def _answer(scores: torch.Tensor) -> Response:
    entry, data = _described("scores", scores)
    head = json.dumps({"model_name": "model", "outputs": [entry]}).encode()
    return Response(head + data, media_type=HEADERS["content-type"], headers={_HEADER_BYTES: str(len(head))})


def create_app(model: nn.Module, inputs: tuple[Input, ...], *, threads: int, inline: bool) -> FastAPI:
    """Return the FastAPI application that scores with the whole model, on its own thread or `inline`."""
    app = FastAPI()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
    torch.set_num_threads(threads)

    def score(content: bytes, header_bytes: int) -> Response:
        with torch.inference_mode():
            return _answer(model(**repeat_user(inputs, parse(content, header_bytes))))

    @app.post("/v2/models/model/infer")
    async def infer(request: Request) -> Response:
        content, header_bytes = await request.body(), int(request.headers[_HEADER_BYTES])
        if inline:
            return score(content, header_bytes)
        return await asyncio.get_running_loop().run_in_executor(pool, score, content, header_bytes)

    return app


def serve(model: str, scale: float, threads: int, inline: bool) -> None:
    """Serve a published model on a free port and announce it."""
    module, inputs = build(model, rows_scale=scale, seed=SEED)
    announce(create_app(module.eval(), tuple(inputs), threads=threads, inline=inline))


def announce(app: Any) -> None:
    """Serve an ASGI application on a free port until standard input ends; print the port first."""
    config = uvicorn.Config(app, port=0, log_level="warning", access_log=False, loop="uvloop")
    sock = config.bind_socket()
    sock.listen()  # who connects from now on waits until it serves
    server = uvicorn.Server(config)

    async def run() -> None:
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        ended.add_done_callback(lambda _: setattr(server, "should_exit", True))
        print(sock.getsockname()[1], flush=True)
        await server.serve(sockets=[sock])

    import uvloop

    uvloop.run(run())


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServer:
    """A server process that has answered a request."""

    url: str
    client: httpx2.Client

    def ask(self, content: bytes) -> httpx2.Response:
        """Send an infer request. Raises `SystemFailed` unless the response is 200."""
        url = f"{self.url}/v2/models/model/infer"
        try:
            answer = self.client.post(url, content=content, headers=HEADERS, timeout=_START_S)
        except httpx2.TransportError as error:
            raise SystemFailed(f"{self.url} does not answer: {error}") from error
        if answer.status_code != 200:
            raise SystemFailed(f"{self.url} answered {answer.status_code}: {answer.text[:300]}")
        return answer


@contextmanager
def serving(how: Sequence[Any], content: bytes) -> Iterator[BenchServer]:
    """Start a server process, of a function that announces it and its arguments, and yield it once it has answered
    `content`. Raises `SystemFailed`."""
    with started(*how) as process, httpx2.Client(trust_env=False) as client:
        server = BenchServer(url=f"http://127.0.0.1:{said(process)}", client=client)
        server.ask(content)
        yield server


def compare(servers: Mapping[str, BenchServer], contents: Mapping[str, bytes]) -> None:
    """Compare the servers' scores. Raises `Disagreement` if two systems differ on one of the bodies."""
    for name, content in contents.items():
        found = {system: _scores_of(server, content) for system, server in servers.items()}
        first, *others = found
        for other in others:
            if not np.allclose(found[other], found[first], rtol=RTOL, atol=ATOL):
                worst = float(np.abs(found[other] - found[first]).max())
                raise Disagreement(f"{name}: {other} and {first} differ by up to {worst:.2g}")


def _scores_of(server: BenchServer, content: bytes) -> npt.NDArray[np.float32]:
    """Return the first output of an infer request, float32."""
    answer = server.ask(content)
    head_bytes = int(answer.headers[_HEADER_BYTES])
    entry = json.loads(answer.content[:head_bytes])["outputs"][0]
    size = entry["parameters"]["binary_data_size"]
    return np.frombuffer(answer.content[head_bytes : head_bytes + size], dtype=np.float32)
