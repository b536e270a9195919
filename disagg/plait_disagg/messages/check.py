"""Check that a request is what the model takes. Every fault is a `BadInput` that names the tensor.

Costs a few microseconds per tensor: each is read once, by one reduction. No allocation depends on a number in the
request.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input, range_of, range_text, tensor_names
from plait_disagg.values import ModelCard, RankRequest

_LARGE = 4_096
"""The number of ids above which copying them costs more than a separate call."""


def check_request(
    card: ModelCard, tensors: Mapping[str, torch.Tensor], *, request_id: str, deadline_s: float | None = None
) -> RankRequest:
    """Return the request if `tensors` (CPU) are exactly what `card` requires; otherwise raise `BadInput`.

    Checked: names, dtypes, shapes; one row of user inputs, the same number (1 to `largest_candidates`) of item
    inputs; finite numbers; numbers inside declared ranges; offsets that start at 0, never decrease and end at the
    number of ids; bags of at most `largest` ids; ids inside the tables that would reject them.
    """
    if tensors.keys() != card.tensor_names:
        raise _wrong_names(card, tensors)
    candidates = _count_candidates(card, tensors)
    watched: list[str] = []
    for item in card.inputs:
        rows = 1 if item.side == "user" else candidates
        name = item.name
        tensor = tensors[name]
        if isinstance(item, Bag):
            _check_bag(item, tensor, tensors[name + OFFSETS], rows)
            if item.weighted:
                _check_form(name + WEIGHTS, tensors[name + WEIGHTS], torch.float32, tuple(tensor.shape))
        else:
            dtype = torch.float32 if isinstance(item, Dense) else torch.int64
            _check_form(name, tensor, dtype, (rows, *item.shape))
        if name in card.id_rows:
            watched.append(name)
        _check_range(item, tensor)
    if watched:
        _check_ids(watched, tensors, card.id_rows)
    return RankRequest(
        request_id=request_id, model=card.name, candidates=candidates, tensors=tensors, deadline_s=deadline_s
    )


def _wrong_names(card: ModelCard, tensors: Mapping[str, torch.Tensor]) -> BadInput:
    wanted = tensor_names(card.inputs)
    for name in wanted:
        if name not in tensors:
            return BadInput(f"{name}: missing; model {card.name} takes {', '.join(wanted)}", param=name)
    extra = next(name for name in tensors if name not in wanted)[:100]
    return BadInput(f"{extra}: model {card.name} has no such input", param=extra)


def _count_candidates(card: ModelCard, tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of candidates of the first item input; a model without any ranks one candidate."""
    first = next((item for item in card.inputs if item.side == "item"), None)
    if first is None:
        return 1
    bag = isinstance(first, Bag)
    name = first.name + OFFSETS if bag else first.name
    tensor = tensors[name]
    candidates = (tensor.shape[0] if tensor.dim() else 0) - bag
    if not 1 <= candidates <= card.largest_candidates:
        raise BadInput(f"{name}: {candidates} candidates; this model ranks 1 to {card.largest_candidates}", param=name)
    return candidates


def _check_bag(item: Bag, ids: torch.Tensor, offsets: torch.Tensor, rows: int) -> None:
    name = item.name + OFFSETS
    if ids.dim() != 1:
        detail = f"the ids of a bag are one row of numbers, not {list(ids.shape)}"
        raise BadInput(f"{item.name}: {detail}", param=item.name)
    _check_form(item.name, ids, torch.int64, tuple(ids.shape))
    _check_form(name, offsets, torch.int64, (rows + 1,))
    bounds = _array(offsets)
    first, last = int(bounds[0]), int(bounds[-1])
    if first != 0 or last != ids.shape[0]:
        detail = f"offsets begin with 0 and end with the number of ids, {ids.shape[0]}; these are {first} to {last}"
        raise BadInput(f"{name}: {detail}", param=name)
    if rows == 1 and last <= item.largest:
        return
    # As unsigned numbers negative lengths are huge, so that one maximum finds both faults; lengths within 0..largest
    # that add up cannot have wrapped around.
    lengths = bounds[1:] - bounds[:-1]
    longest = int(lengths.view(np.uint64).max())
    if longest > item.largest:
        row = int(lengths.view(np.uint64).argmax())
        if longest >= 1 << 63:
            raise BadInput(f"{name}: offsets decrease after row {row}", param=name)
        raise BadInput(f"{name}: row {row} has {longest} ids; this input takes at most {item.largest}", param=name)


def _check_form(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype is not dtype:
        raise BadInput(f"{name}: is {_dtype(tensor.dtype)}; this input takes {_dtype(dtype)}", param=name)
    if tensor.shape != shape:
        raise BadInput(f"{name}: has shape {list(tensor.shape)}; expected {list(shape)}", param=name)
    if not tensor.is_contiguous():
        raise BadInput(f"{name}: is not contiguous", param=name)
    if dtype is torch.float32:
        _check_finite(name, tensor)


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    """Check that all numbers are finite.

    A sum of squares is finite unless a number is not, or some are huge; only then is every number examined.
    """
    numbers = _array(tensor).reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if math.isfinite(numbers.dot(numbers)):
            return
    bad = ~np.isfinite(numbers)
    if bad.any():
        where = int(bad.argmax())
        what = f"number {where} is {numbers[where]}; only finite numbers can be ranked"
        raise BadInput(f"{name}: {what}", param=name, place=where)


def _check_range(item: Input, tensor: torch.Tensor) -> None:
    """Check that all numbers are within the range that the input declares."""
    first, last = range_of(item)
    if first is None and last is None:
        return
    numbers = _array(tensor).reshape(-1)
    bad = np.zeros(numbers.shape, dtype=bool)
    bad |= numbers < first if first is not None else False
    bad |= numbers > last if last is not None else False
    if bad.any():
        where = int(bad.argmax())
        what = f"number {where} is {numbers[where]}; this input takes {range_text(first, last)}"
        raise BadInput(f"{item.name}: {what}", param=item.name, place=where)


def _check_ids(names: Sequence[str], tensors: Mapping[str, torch.Tensor], rows: Mapping[str, int]) -> None:
    """Check that all ids are inside their tables. Small tensors are joined first: one call finds the max id of each."""
    small: list[str] = []
    for name in names:
        numbers = tensors[name].numel()
        if numbers > _LARGE:
            _check_top(name, tensors[name], rows[name], int(_unsigned(tensors[name]).max()))
        elif numbers:
            small.append(name)
    if not small:
        return
    flats = [tensors[name] if tensors[name].dim() == 1 else tensors[name].view(-1) for name in small]
    starts = [0, *itertools.accumulate([flat.numel() for flat in flats[:-1]])]
    tops = np.maximum.reduceat(_unsigned(torch.cat(flats)), starts)
    for name, top in zip(small, tops.tolist(), strict=True):
        if top >= rows[name]:
            _check_top(name, tensors[name], rows[name], top)


def _check_top(name: str, tensor: torch.Tensor, rows: int, top: int) -> None:
    if top >= rows:
        unsigned = _unsigned(tensor).reshape(-1)
        where = int((unsigned >= rows).argmax())
        value = int(unsigned.view(np.int64)[where])
        raise BadInput(f"{name}: id {value} at position {where} is outside 0..{rows - 1}", param=name, place=where)


def _unsigned(tensor: torch.Tensor) -> Any:
    """Return the ids as unsigned: a negative id becomes huge, so one maximum finds both faults."""
    return _array(tensor).view(np.uint64)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
