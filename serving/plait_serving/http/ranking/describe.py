"""A model's inputs and outputs in the terms of the Open Inference Protocol, and a request that it answers."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Ids, Input, ports_of, range_of, tensor_names
from plait_disagg.protocols import ItemStore
from plait_disagg.values import ModelCard

if TYPE_CHECKING:
    from plait_serving.ranking.local import BoundModel

PLATFORM = "plait"
MAX_EXAMPLE = 1024
"""The number of candidates in the largest example: enough to show what a large request looks like."""

_DATATYPES = {"float32": "FP32", "int64": "INT64"}
_SMALL_BAG = 4
_SAFE_ROWS = 1  # of a table whose size the card does not tell: its first row exists


def metadata(name: str, card: ModelCard) -> dict[str, Any]:
    """Return the answer to GET /v2/models/{name}. -1 stands for the candidates, or the ids, of a request."""
    return {
        "name": name,
        "versions": [card.version],
        "platform": PLATFORM,
        "inputs": [tensor for item in card.inputs for tensor in _inputs(item)],
        "outputs": [_tensor(name, "FP32", (-1, *shape)) for name, shape in card.outputs.items()],
        "parameters": {"largest_candidates": card.largest_candidates, "mode": card.mode, "items": card.items},
    }


def _inputs(item: Input) -> list[dict[str, Any]]:
    rows = 1 if item.side == "user" else -1
    first, last = range_of(item)
    about: dict[str, Any] = {"kind": item.kind, "side": item.side}
    about |= {name: end for name, end in (("minimum", first), ("maximum", last)) if end is not None}
    shapes: dict[str, tuple[int, ...]] = {}  # else as many as the request has
    if isinstance(item, Bag):
        shapes[item.name + OFFSETS] = (2 if item.side == "user" else -1,)
    else:
        shapes[item.name] = (rows, *item.shape)
    tensors = (_tensor(it.name, _DATATYPES[it.dtype], shapes.get(it.name, (-1,))) for it in ports_of((item,)))
    return [tensor | {"parameters": about} for tensor in tensors]


def _tensor(name: str, datatype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def example(card: ModelCard, candidates: int, items: ItemStore | None = None) -> dict[str, Any]:
    """Return a body for POST .../infer: some of the known items if there are any, else made-up numbers.

    The result depends only on the model and the number of candidates.
    """
    import torch  # takes two seconds, and the lists of models need none of it

    from plait_disagg.graph.sample_inputs import sample

    seed = zlib.crc32(f"{card.name} {candidates}".encode())
    unbounded = [it.name for it in card.inputs if isinstance(it, Bag) or (isinstance(it, Ids) and it.max is None)]
    bounds = {**dict.fromkeys(unbounded, _SAFE_ROWS), **card.id_rows}
    made = sample(card.inputs, bounds, candidates=candidates, ids_per_bag=_SMALL_BAG, seed=seed, ragged=True)
    arrays = {name: tensor.numpy() for name, tensor in made.items()}
    ranges = {item.name: range_of(item) for item in card.inputs}
    for name, values in arrays.items():
        if values.dtype.kind == "f":  # multiples of 1/8: exact in float32, short in JSON
            arrays[name] = np.clip(np.round(8 * values) / 8, *ranges.get(name, (None, None)))
    if items is not None:
        ids = torch.randint(len(items), (candidates,), generator=torch.Generator().manual_seed(seed))
        arrays |= {name: tensor.numpy() for name, tensor in items.gather(ids).items()}
    return {"id": "example", "inputs": [_filled(name, arrays[name]) for name in tensor_names(card.inputs)]}


def first_bodies(model: BoundModel) -> dict[str, Any]:
    """Return a first body of each route that ranks, by path; the model answers them."""
    card, items = model.card, model.items
    infer = example(card, 1, items)
    made = {tensor["name"]: tensor["data"] for tensor in infer["inputs"]}
    rows: list[dict[str, Any]] = []
    for side in (model.side("user"), model.side("item")):
        rows.append({item.name: _plain(item, made[item.name]) for item in side})
        weighted = [item.name + WEIGHTS for item in side if isinstance(item, Bag) and item.weighted]
        rows[-1] |= {name: made[name] for name in weighted}
    bodies: dict[str, Any] = {f"/v2/models/{{model}}{version}/infer": infer for version in ("", "/versions/{version}")}
    bodies["/v1/recommend"] = {
        "model": model.name,
        "user": rows[0],
        "candidates": rows[1:] if items is None else "all",
        "top_k": 5,
    }
    return bodies


def _plain(item: Input, data: list[Any]) -> Any:
    """Return a row's values as `POST /v1/recommend` takes them: a number, or a list of the input's shape."""
    if isinstance(item, Bag):
        return data
    return data[0] if len(data) == 1 else np.reshape(data, item.shape).tolist()


def _filled(name: str, values: npt.NDArray[Any]) -> dict[str, Any]:
    return _tensor(name, _DATATYPES[values.dtype.name], values.shape) | {"data": values.reshape(-1).tolist()}
