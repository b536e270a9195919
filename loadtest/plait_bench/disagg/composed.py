"""The peer that Ray Serve offers by itself: two deployments, the halves of the model, one calling the other's handle.

``python -m plait_bench.disagg.composed FOLDER`` prints its port. The halves are ours, and so is the protocol: what is
compared is how they are joined.
"""

from __future__ import annotations

import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request, Response
from ray import serve

from plait_bench.disagg.baseline import answer, parse
from plait_disagg.package import open_package
from plait_disagg.workers.check import check_request

_HEADER_BYTES = "inference-header-content-length"
_APP = FastAPI()


class Dense:
    """The dense half."""

    def __init__(self, folder: str) -> None:
        torch.set_num_threads(1)
        self._half = open_package(Path(folder)).dense()

    async def __call__(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> torch.Tensor:
        """The scores of a batch."""
        with torch.inference_mode():
            outputs = self._half.run(crossing, candidates)
        return next(iter(outputs.values()))


@serve.ingress(_APP)
class Sparse:
    """The sparse half, and what HTTP clients ask."""

    def __init__(self, folder: str, dense: Any) -> None:
        torch.set_num_threads(1)
        package = open_package(Path(folder))
        self._card, self._half = package.card(), package.sparse()
        self._dense = dense

    @_APP.post("/v2/models/model/infer")
    async def infer(self, request: Request) -> Response:
        """One request; the dense half gets what crosses."""
        body = await request.body()
        tensors = parse(body, int(request.headers[_HEADER_BYTES]))
        checked = check_request(self._card, tensors, request_id="")
        with torch.inference_mode():
            crossing = self._half.run([checked])
        return answer(await self._dense.remote(dict(crossing), [checked.candidates]))


def main(folder: str) -> None:
    """See the module docstring. Ends with SIGTERM."""
    import ray

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20,
            _temp_dir=scratch, _node_ip_address="127.0.0.1",
        )  # fmt: skip
        try:
            http = {"host": "127.0.0.1", "port": port}
            serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"enable_access_log": False})
            deployed = partial(serve.deployment, ray_actor_options={"num_cpus": 1}, max_ongoing_requests=64)
            serve.run(deployed(Sparse).bind(folder, deployed(Dense).bind(folder)), name="composed", route_prefix="/")
            print(port, flush=True)
            signal.pause()
        finally:
            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    # Replicas import the classes of a module; those of __main__ are sent, without what only their annotations name.
    from plait_bench.disagg import composed

    composed.main(sys.argv[1])
