"""An application over a fake ranker, and bodies of the Open Inference Protocol to send to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from fakes.ranking import FakeRanker, fake_rankers
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService

INFER = "/v2/models/picks/infer"
HEADER = "inference-header-content-length"
DATATYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bool": "BOOL"}


def make_client(ranker: FakeRanker | None = None, settings: HttpSettings | None = None, **more: Any) -> TestClient:
    """A server that only ranks; a 500 comes as an answer, as over a socket."""
    ranking = LocalRankingService(fake_rankers(ranker, **more))
    app = create_app(None, settings or HttpSettings(), ranking=ranking)
    return TestClient(app, raise_server_exceptions=False)


def arrays(candidates: int = 3, *, seed: int = 0) -> dict[str, np.ndarray]:
    """Every input of `FAKE_CARD`, small whole numbers and eighths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, candidates)
    return {
        "person": rng.integers(0, 50, 1),
        "mood": (rng.integers(-8, 9, (1, 3)) / 8).astype(np.float32),
        "history": rng.integers(0, 20, 4),
        "history_offsets": np.array([0, 4]),
        "item": rng.integers(0, 20, candidates),
        "price": (rng.integers(0, 80, (candidates, 1)) / 8).astype(np.float32),
        "genres": rng.integers(0, 6, int(lengths.sum())),
        "genres_offsets": np.concatenate([[0], np.cumsum(lengths)]),
    }


def datatype(array: np.ndarray) -> str:
    """The protocol's word for an array's type."""
    return DATATYPES.get(array.dtype.name) or array.dtype.name.upper()


def described(name: str, array: np.ndarray) -> dict[str, Any]:
    """A tensor without its data."""
    return {"name": name, "shape": list(array.shape), "datatype": datatype(array)}


def as_json(tensors: Mapping[str, Any], *, nested: bool = False, **more: Any) -> dict[str, Any]:
    """A body whose tensors, numpy's or torch's, are lists."""
    given = {name: np.asarray(value) for name, value in tensors.items()}
    inputs = [described(k, v) | {"data": v.tolist() if nested else v.ravel().tolist()} for k, v in given.items()]
    return {"inputs": inputs, **more}


def as_binary(tensors: Mapping[str, np.ndarray], **more: Any) -> tuple[bytes, dict[str, str]]:
    """A body whose tensors are bytes, and its header."""
    inputs = [described(k, v) | {"parameters": {"binary_data_size": v.nbytes}} for k, v in tensors.items()]
    head = json.dumps({"inputs": inputs, **more}).encode()
    data = [v.astype(v.dtype.newbyteorder("<")).tobytes() for v in tensors.values()]
    return b"".join([head, *data]), {HEADER: str(len(head))}


def outputs_of(answer: Any) -> dict[str, np.ndarray]:
    """The tensors in an answer, JSON and binary alike."""
    length = answer.headers.get(HEADER)
    head = json.loads(answer.content if length is None else answer.content[: int(length)])
    rest = b"" if length is None else answer.content[int(length) :]
    found = {}
    for tensor in head["outputs"]:
        size = tensor.get("parameters", {}).get("binary_data_size")
        if size is None:
            flat = np.array(tensor["data"], np.float32)
        else:
            flat, rest = np.frombuffer(rest[:size], "<f4"), rest[size:]
        found[tensor["name"]] = flat.reshape(tensor["shape"])
    assert rest == b""
    return found
