"""The peer: the model itself in plain PyTorch behind FastAPI, in one process, as one would write it by hand.

`python -m plait_bench.disagg.systems.baseline MODEL SCALE THREADS inline|worker` prints its port. It speaks the same
protocol with the same binary tensors; user-side inputs are repeated over the candidates, because that is what the
model's `forward` takes. `inline` computes on the event loop's thread, `worker` on another one, so that the loop
keeps reading.
"""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from fastapi import FastAPI, Request, Response
from torch import nn

from plait_bench.disagg.load.packages import SEED
from plait_bench.disagg.systems.serving import announce
from plait_disagg.graph.inputs import OFFSETS, Bag, Input
from plait_disagg.models.configs import build

_HEADER_BYTES = "inference-header-content-length"
_DTYPES = {"FP32": np.float32, "INT64": np.int64}


def parse(body: bytes, header_bytes: int) -> dict[str, torch.Tensor]:
    """Return the binary tensors of an infer request, by name. Trusts the request: it comes from our own generator."""
    head = json.loads(body[:header_bytes])
    tensors, start = {}, header_bytes
    for entry in head["inputs"]:
        count = int(np.prod(entry["shape"]))
        array = np.frombuffer(body, dtype=_DTYPES[entry["datatype"]], count=count, offset=start).reshape(entry["shape"])
        tensors[entry["name"]] = torch.from_numpy(array.copy())
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


def answer(scores: torch.Tensor) -> Response:
    """Return the scores as one binary tensor."""
    data = scores.numpy().tobytes()
    entry = {
        "name": "scores",
        "datatype": "FP32",
        "shape": list(scores.shape),
        "parameters": {"binary_data_size": len(data)},
    }
    head = json.dumps({"model_name": "model", "outputs": [entry]}).encode()
    return Response(
        head + data, media_type="application/octet-stream", headers={"Inference-Header-Content-Length": str(len(head))}
    )


def create_app(model: nn.Module, inputs: tuple[Input, ...], *, threads: int, inline: bool) -> FastAPI:
    """Return the FastAPI application that scores with the whole model, on its own thread or `inline`."""
    app = FastAPI()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
    torch.set_num_threads(threads)

    def score(body: bytes, header_bytes: int) -> Response:
        with torch.inference_mode():
            return answer(model(**repeat_user(inputs, parse(body, header_bytes))))

    @app.post("/v2/models/model/infer")
    async def infer(request: Request) -> Response:
        body, header_bytes = await request.body(), int(request.headers[_HEADER_BYTES])
        if inline:
            return score(body, header_bytes)
        return await asyncio.get_running_loop().run_in_executor(pool, score, body, header_bytes)

    return app


def main(model: str, scale: float, threads: int, where: str) -> None:
    """Serve a published model on a free port and announce it."""
    module, inputs = build(model, rows_scale=scale, seed=SEED)
    announce(create_app(module.eval(), tuple(inputs), threads=threads, inline=where == "inline"))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
