"""Several requests as one batch, and a batch's answers split again. Pure.

Symbols: R requests; N_r candidates of request r, N their sum. In a batch, user inputs have R rows and item inputs N;
`user_of` (N,) int64 maps each candidate to its request.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Input
from plait_disagg.values import RankRequest


def join(
    inputs: Sequence[Input], requests: Sequence[RankRequest], *, separate: Collection[str] = frozenset()
) -> Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """Return the tensors of several requests, in their order, as one batch. The tensors of a single request are passed
    on unchanged, others are copied.

    By the name of a bag to leave `separate`, and by that of its offsets: a tuple of each request's own.
    """
    if len(requests) == 1:
        return requests[0].tensors
    tensors: dict[str, torch.Tensor | tuple[torch.Tensor, ...]] = {}
    for item in inputs:
        if item.name in separate:
            for name in (item.name, item.name + OFFSETS):
                tensors[name] = tuple([request.tensors[name] for request in requests])
            continue
        tensors[item.name] = torch.cat([request.tensors[item.name] for request in requests])
        if isinstance(item, Bag):
            name = item.name + OFFSETS
            ids = [request.tensors[item.name].shape[0] for request in requests]
            if item.weighted:
                weights = item.name + WEIGHTS
                tensors[weights] = torch.cat([request.tensors[weights] for request in requests])
            if item.side == "user":  # one row each: [0, its ids]
                tensors[name] = torch.tensor([0, *itertools.accumulate(ids)])
            else:
                tensors[name] = _join_offsets([request.tensors[name] for request in requests], ids)
    return tensors


def _join_offsets(parts: Sequence[torch.Tensor], ids: Sequence[int]) -> torch.Tensor:
    """Return the offsets of bags laid end to end; each part goes from 0 to its number of `ids`."""
    arrays: list[Any] = [part.numpy() for part in parts]
    before = itertools.accumulate(ids)
    shifted = [array[1:] + shift for array, shift in zip(arrays[1:], before, strict=False)]
    return torch.from_numpy(np.concatenate([arrays[0], *shifted]))


def cut(outputs: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Return each request's rows of every output (N, ...): views, in the order of the requests."""
    if len(candidates) == 1:
        return [dict(outputs)]
    sizes = list(candidates)
    parts = {name: output.split_with_sizes(sizes) for name, output in outputs.items()}
    return [{name: part[r] for name, part in parts.items()} for r in range(len(sizes))]


@lru_cache(maxsize=64)
def _zeros(rows: int) -> torch.Tensor:
    """Return (rows,) int64 of zeros, which nobody changes."""
    return torch.zeros(rows, dtype=torch.int64)


def user_of(candidates: Sequence[int]) -> torch.Tensor:
    """Return (N,) int64, ascending: the request of each candidate."""
    if len(candidates) == 1:
        return _zeros(candidates[0])
    return torch.repeat_interleave(torch.arange(len(candidates)), torch.tensor(list(candidates)))
