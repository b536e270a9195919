"""The deployments of `composed`, in a separate module so that replicas import them: what is defined in `__main__` is
pickled and sent to them. Its annotations are not strings: the app is sent too, and with it only what its code names."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from ray import serve

from plait_bench.disagg.systems.baseline import answer, parse
from plait_disagg.messages.check import check_request
from plait_disagg.package import open_package

__all__ = ["DenseDeployment", "SparseDeployment"]

_HEADER_BYTES = "inference-header-content-length"
_APP = FastAPI()


class DenseDeployment:
    """The dense half."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self._half = open_package(Path(folder)).dense()

    async def __call__(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> torch.Tensor:
        """Return the scores of a batch."""
        with torch.inference_mode():
            outputs = self._half.run(crossing, candidates)
        return next(iter(outputs.values()))


@serve.ingress(_APP)
class SparseDeployment:
    """The sparse half, which HTTP clients call."""

    def __init__(self, folder: str, dense: Any) -> None:
        torch.set_num_threads(1)
        package = open_package(Path(folder))
        self._card, self._half = package.card(), package.sparse()
        self._dense = dense

    @_APP.post("/v2/models/model/infer")
    async def infer(self, request: Request) -> Response:
        """Answer one request; the dense half receives the crossing tensors."""
        body = await request.body()
        tensors = parse(body, int(request.headers[_HEADER_BYTES]))
        checked = check_request(self._card, tensors, request_id="")
        with torch.inference_mode():
            crossing = self._half.run([checked])
        return answer(await self._dense.remote(dict(crossing), [checked.candidates]))
