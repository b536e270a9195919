"""Requests of a configuration as v2 bodies with binary tensors, in files that the load generator reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from plait_disagg.models.configs import ids_per_bag
from plait_disagg.models.requests import random_request
from plait_disagg.package import read_manifest
from plait_disagg.values import RankRequest

__all__ = ["HEADER_BYTES", "body", "write_bodies"]

HEADER_BYTES = 8_192
"""The size to which every JSON header is padded with blanks, so that all bodies can be sent with the same HTTP
headers."""

REQUESTS = 48
"""The number of distinct requests in a workload: enough that no cache holds the rows of all of them by chance."""

_DATATYPES = {torch.float32: "FP32", torch.int64: "INT64"}


def body(request: RankRequest) -> bytes:
    """Make the body of one infer request: all tensors binary, scores requested in binary."""
    inputs, data = [], []
    for name, tensor in request.tensors.items():
        raw = tensor.numpy().tobytes()
        data.append(raw)
        inputs.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "datatype": _DATATYPES[tensor.dtype],
                "parameters": {"binary_data_size": len(raw)},
            }
        )
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}, separators=(",", ":"))
    if len(head) > HEADER_BYTES:
        raise ValueError(f"a header of {len(head)} bytes does not fit {HEADER_BYTES}")
    return b"".join([head.encode().ljust(HEADER_BYTES), *data])


def write_bodies(folder: Path, package: Path, model: str, candidates: int, *, seed: int) -> list[Path]:
    """Write `REQUESTS` files of requests for a configuration and its package, with skewed ids
    (`models.requests.zipf`)."""
    manifest = read_manifest(package)
    paths = []
    for number in range(REQUESTS):
        request = random_request(
            manifest.inputs, manifest.bounds, model=model, candidates=candidates,
            ids_per_bag=ids_per_bag(model), seed=seed * REQUESTS + number,
        )  # fmt: skip
        path = folder / f"{model}-{candidates}-{number}.bin"
        path.write_bytes(body(request))
        paths.append(path)
    return paths
