"""Ranking requests: KServe's Open Inference Protocol v2, tensors as JSON or in its binary extension.

Legend: C candidates of a request; T tables; I ids of a candidate over all tables. Without declared inputs: dense
FP32 (C, dense), ids INT64 (C, I), the ids of table 0 first. Ids are ranks: row 0 is the most popular.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from plait_loadtest.distributions import MLPERF_CANDIDATES, Floats, WeightedChoice, ZipfRanks
from plait_loadtest.scenario import InferClass, InferInput, LoadTarget
from plait_loadtest.seeds import Chunks, Numbered
from plait_loadtest.values import PreparedRequest

Tensor: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.int64]

_DENSE_LEVELS = 1024  # dense features are multiples of 1/1024: the same in float32 and in short JSON numbers


Named: TypeAlias = tuple[str, str, Tensor]
"""A tensor with its name and datatype."""

_Input: TypeAlias = tuple[InferInput, ZipfRanks]
"""What a scenario declares, and how ids of it are drawn."""


class InferRequests:
    """Builds the requests of one class. `counts` and `values` are independent streams."""

    def __init__(self, spec: InferClass, target: LoadTarget, counts: Numbered, values: Numbered) -> None:
        self._spec = spec
        self._path = target.path or f"/v2/models/{target.model}/infer"
        self._headers = tuple((name.lower(), value) for name, value in spec.headers.items())
        self._values = values
        if spec.inputs:
            drawn = [ZipfRanks(np.array([item.ids or 1]), spec.zipf) for item in spec.inputs]
            self._draw = partial(_declared, list(zip(spec.inputs, drawn, strict=True)))
        else:
            rows = np.repeat(np.array(spec.rows, dtype=np.int64), spec.ids_per_table or 1)
            self._draw = partial(_flat, spec, ZipfRanks(rows, spec.zipf))
        self._choice = WeightedChoice(MLPERF_CANDIDATES if spec.candidates == "mlperf" else spec.candidates)
        self._candidates = Chunks(counts, 1, self._draw_chunk)

    def _draw_chunk(self, uniforms: Floats) -> list[int]:
        return self._choice.pick(uniforms[:, 0])

    def candidates(self, index: int) -> int:
        """Return how many candidates request `index` scores."""
        return self._candidates[index]

    def tensors(self, index: int) -> list[Named]:
        """Return the inputs of request `index`."""
        return self._draw(self._values.piece(index), self.candidates(index))

    def build(self, index: int) -> PreparedRequest:
        """Return the request with its tensors as JSON or binary."""
        inputs, is_binary, outputs = self.tensors(index), self._spec.binary, self._spec.outputs
        data = [
            {"parameters": {"binary_data_size": it.nbytes}} if is_binary else {"data": it.ravel().tolist()}
            for _, _, it in inputs
        ]
        head: dict[str, object] = {"id": str(index)}
        head["inputs"] = [_described(*entry) | its for entry, its in zip(inputs, data, strict=True)]
        if outputs:
            more = {"parameters": {"binary_data": True}} if is_binary else {}
            head["outputs"] = [{"name": name, **more} for name in outputs]
        elif is_binary:
            head["parameters"] = {"binary_data_output": True}
        body = to_json(head)  # as `json.dumps`, in a sixth of the time: before a run, of all its requests
        headers = [("content-type", f"application/{'octet-stream' if is_binary else 'json'}")]
        if is_binary:
            headers.append(("inference-header-content-length", str(len(body))))
            # The protocol is little-endian.
            little = [it.astype(it.dtype.newbyteorder("<"), copy=False).tobytes() for _, _, it in inputs]
            body = b"".join([body, *little])
        return PreparedRequest(method="POST", path=self._path, headers=(*headers, *self._headers), body=body)

    def asked(self, index: int) -> int:  # noqa: ARG002
        """Return how many outputs a request asks for, at least one."""
        return max(1, len(self._spec.outputs))


def _flat(spec: InferClass, ranks: ZipfRanks, rng: np.random.Generator, candidates: int) -> list[Named]:
    """Return dense values in one tensor (C, dense), and the ids of all tables in another (C, I), leaving out those that
    would be empty."""
    named: list[Named] = [
        (spec.dense_name, "FP32", _numbers(rng, (candidates, spec.dense))),
        (spec.ids_name, "INT64", ranks.draw(rng, candidates)),
    ]
    return [entry for entry in named if entry[2].size]


def _declared(inputs: Sequence[_Input], rng: np.random.Generator, candidates: int) -> list[Named]:
    """Return the tensors in the declared order; empty bags are sent, because a server must know of them."""
    named: list[Named] = []
    for item, ranks in inputs:
        rows = 1 if item.side == "user" else candidates
        if item.numbers is not None:
            named.append((item.name, "FP32", _numbers(rng, (rows, item.numbers))))
            continue
        drawn = ranks.draw(rng, rows * (1 if item.bag is None else item.bag)).reshape(-1)
        named.append((item.name, "INT64", drawn))
        if item.bag is not None:
            offsets = np.arange(rows + 1, dtype=np.int64) * item.bag
            named.append((f"{item.name}_offsets", "INT64", offsets))
    return named


def _numbers(rng: np.random.Generator, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    levels = rng.integers(0, _DENSE_LEVELS, shape, dtype=np.int32)
    return (levels / _DENSE_LEVELS).astype(np.float32)


def _described(name: str, kind: str, data: Tensor) -> dict[str, object]:
    return {"name": name, "shape": list(data.shape), "datatype": kind}
