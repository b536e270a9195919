"""A model's inputs and outputs in the terms of the Open Inference Protocol, and a request that it answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Ids, Input, range_of, tensor_names
from plait_disagg.protocols import ItemStore
from plait_disagg.values import ModelCard

if TYPE_CHECKING:
    import torch  # takes two seconds, and the lists of models need none of it

    from plait_serving.ranking.local import BoundModel

PLATFORM = "plait"
MAX_EXAMPLE = 1024
"""The number of candidates in the largest example: enough to show what a large request looks like."""

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
    if isinstance(item, Bag):
        offsets = _tensor(item.name + OFFSETS, "INT64", (2 if item.side == "user" else -1,))
        made = [_tensor(item.name, "INT64", (-1,)), offsets]
        made += [_tensor(item.name + WEIGHTS, "FP32", (-1,))] if item.weighted else []
        return [tensor | {"parameters": about} for tensor in made]
    datatype = "FP32" if isinstance(item, Dense) else "INT64"
    return [_tensor(item.name, datatype, (rows, *item.shape)) | {"parameters": about}]


def _tensor(name: str, datatype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


def example(card: ModelCard, candidates: int, items: ItemStore | None = None) -> dict[str, Any]:
    """Return a body for POST .../infer: some of the known items if there are any, else made-up numbers.

    The result depends only on the model and the number of candidates.
    """
    rng = np.random.default_rng([zlib.crc32(card.name.encode()), candidates])
    known = {} if items is None else _some_items(items, rng, candidates)
    tensors: list[dict[str, Any]] = []
    for item in card.inputs:
        if item.name not in known:
            tensors += _example_of(item, card, candidates, rng)
            continue
        datatype = "FP32" if isinstance(item, Dense) else "INT64"
        for name in tensor_names((item,)):
            tensors.append(_filled(name, "FP32" if name == item.name + WEIGHTS else datatype, known[name].numpy()))
    return {"id": "example", "inputs": tensors}


def _some_items(items: ItemStore, rng: np.random.Generator, count: int) -> Mapping[str, torch.Tensor]:
    import torch

    return items.gather(torch.from_numpy(rng.integers(0, len(items), count)))


def _example_of(item: Input, card: ModelCard, candidates: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = 1 if item.side == "user" else candidates
    if isinstance(item, Dense):
        # Multiples of 1/8: exact in float32, short in JSON.
        eighths = rng.integers(-8, 9, (rows, *item.shape)) / 8
        if item.low is not None and item.high is not None:
            eighths = item.low + (item.high - item.low) * abs(eighths)
        return [_filled(item.name, "FP32", np.clip(eighths, item.low, item.high))]
    known = card.id_rows.get(item.name, _SAFE_ROWS)
    if isinstance(item, Ids):
        first = item.min or 0
        end = known if item.max is None else min(card.id_rows.get(item.name, item.max + 1), item.max + 1)
        return [_filled(item.name, "INT64", rng.integers(first, max(end, first + 1), (rows, *item.shape)))]
    lengths = rng.integers(0, min(_SMALL_BAG, item.largest) + 1, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, known, int(offsets[-1]))
    weights = [_filled(item.name + WEIGHTS, "FP32", rng.integers(1, 9, len(ids)) / 8)] if item.weighted else []
    return [_filled(item.name, "INT64", ids), _filled(item.name + OFFSETS, "INT64", offsets), *weights]


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


def _filled(name: str, datatype: str, values: npt.NDArray[Any]) -> dict[str, Any]:
    return _tensor(name, datatype, values.shape) | {"data": values.reshape(-1).tolist()}
