"""Named arrays of a request to the tensors that a model declares. Pure.

What is accepted for an input, N being the candidates (one row where the input is the user's)::

    Dense  (N, *shape)   FP32; FP64 is rounded to the nearest float32; FP16, and integers if float32 holds them exactly
    Ids    (N, *shape)   INT64, or any other integers that fit it
    Bag    NAME (nnz,) and either NAME_offsets (N + 1,) or NAME_lengths (N,), all of them integers as for Ids;
           if it is weighted also NAME_weights (nnz,), as for Dense

Sizes of 1 after the rows may be left out or added: (N,) and (N, 1) are the same. `plait_disagg.messages.check`
checks what is there: that no input is missing, as many rows as candidates, finite numbers, ids inside their tables,
offsets that add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from plait_disagg.errors import BadInput
from plait_disagg.graph.inputs import Bag, Dense, Ids, Input, tensor_names
from plait_serving.ranking.codec import Array, hint

LENGTHS = "_lengths"
"""The suffix that turns a bag's name into the name of its rows' lengths, which may be sent instead of offsets."""

_FLOAT32, _INT64 = np.dtype(np.float32), np.dtype(np.int64)
# Integers up to 2^24 are exact in float32 (24 bits of significand, IEEE 754).
_EXACT_IN_FLOAT32 = 1 << 24


class Binder:
    """Binds arrays to a fixed set of inputs."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._plans = tuple(_InputPlan(item, inputs) for item in inputs)
        self._known = frozenset(name for plan in self._plans for name in plan.names)

    def bind(self, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return the tensors by `tensor_names` of the inputs that are there, contiguous copies, float32 or int64.

        Raises `BadInput` for an unknown input, a shape of its rows, or a datatype that does not fit.
        """
        if not arrays.keys() <= self._known:
            name = next(name for name in arrays if name not in self._known)
            required = [name for plan in self._plans for name in plan.required]
            raise BadInput(f"{name[:64]}: the model has no such input{hint(name, required)}", param=name[:64])
        tensors: dict[str, torch.Tensor] = {}
        for plan in self._plans:
            array = arrays.get(plan.name)
            if array is None:
                continue
            if plan.row_shape is None:
                plan.add_bag(tensors, arrays)
            elif array.dtype is plan.dtype and array.shape[1:] == plan.row_shape:
                tensors[plan.name] = torch.from_numpy(array.copy())
            else:  # another datatype, or another way to write the shape
                convert = _float32 if plan.dtype is _FLOAT32 else _int64
                tensors[plan.name] = torch.from_numpy(convert(_shaped(array, plan.row_shape, plan.name), plan.name))
        return tensors


class _InputPlan:
    """How one input is found and shaped. `row_shape` is the shape of one row; None for a bag."""

    def __init__(self, item: Input, inputs: Sequence[Input]) -> None:
        lengths = item.name + LENGTHS
        self.name = item.name
        self.dtype: np.dtype[Any] = _FLOAT32 if isinstance(item, Dense) else _INT64
        self.row_shape = item.shape if isinstance(item, Dense | Ids) else None
        self.required = tensor_names((item,))
        self.lengths = lengths if isinstance(item, Bag) and lengths not in tensor_names(inputs) else None
        self.names = self.required if self.lengths is None else (*self.required, self.lengths)
        """Every name that the input may have in a request."""

    def add_bag(self, tensors: dict[str, torch.Tensor], arrays: Mapping[str, Array]) -> None:
        """Add a bag's tensors to `tensors`."""
        name = self.required[1]
        ids = _ids(arrays[self.name], self.name)
        tensors[self.name] = torch.from_numpy(ids)
        offsets = arrays.get(name)
        lengths = arrays.get(self.lengths) if self.lengths is not None else None
        if offsets is not None and lengths is None:
            made = _ids(offsets, name)
        elif offsets is None and lengths is not None and self.lengths is not None:
            made = _offsets(_ids(lengths, self.lengths), len(ids), self.lengths)
        else:
            detail = f"needs {name} or {self.name}{LENGTHS} ({'none is' if offsets is None else 'not both'} there)"
            raise BadInput(f"{self.name}: {detail}", param=self.name)
        tensors[name] = torch.from_numpy(made)
        for weights in self.required[2:]:
            array = arrays.get(weights)
            if array is None or array.shape != ids.shape:
                raise BadInput(f"{weights}: must have one number for each of the {len(ids)} ids", param=weights)
            tensors[weights] = torch.from_numpy(_float32(array, weights))


def _shaped(array: Array, row_shape: tuple[int, ...], name: str) -> Array:
    """Return `(rows, *row_shape)`; sizes of 1 after the rows do not count."""
    if array.shape[1:] == row_shape:
        return array
    if [size for size in array.shape[1:] if size != 1] != [size for size in row_shape if size != 1]:
        wanted = ["rows", *row_shape]
        raise BadInput(f"{name}: shape must be [{', '.join(map(str, wanted))}], not {list(array.shape)}", param=name)
    return array.reshape((len(array), *row_shape))


def _ids(array: Array, name: str) -> Array:
    """Return a copy of one row of integers."""
    if array.ndim != 1:
        raise BadInput(f"{name}: must have one dimension, not shape {list(array.shape)}", param=name)
    return array.copy() if array.dtype is _INT64 else _int64(array, name)


def _float32(array: Array, name: str) -> Array:
    """Return a float32 copy, aligned and writable: views of a body are neither."""
    if array.dtype.kind != "f" and array.size and not _all_within(array, -_EXACT_IN_FLOAT32, _EXACT_IN_FLOAT32):
        raise BadInput(f"{name}: integers beyond 2^24 are not exact in FP32; send FP32", param=name)
    if array.dtype.itemsize <= 4:
        return np.array(array, np.float32, order="C")
    with np.errstate(over="ignore"):  # infinity is refused by the check of values
        return np.array(array, np.float32, order="C")


def _int64(array: Array, name: str) -> Array:
    """Return an int64 copy, aligned and writable."""
    if array.dtype.kind == "f":
        raise BadInput(f"{name}: datatype must be INT64 (or smaller integers), not floating point", param=name)
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and not _all_within(array, 0, 2**63 - 1):
        raise BadInput(f"{name}: a number does not fit INT64", param=name)
    return np.array(array, np.int64, order="C")


def _all_within(array: Array, low: int, high: int) -> bool:
    return not array.size or (int(array.min()) >= low and int(array.max()) <= high)


def _offsets(lengths: Array, nnz: int, name: str) -> Array:
    """Return the offsets of rows of these lengths, (rows + 1,) int64."""
    if not _all_within(lengths, 0, nnz):
        raise BadInput(f"{name}: lengths must be 0 to the {nnz} ids that were sent", param=name)
    offsets: np.ndarray[Any, np.dtype[np.int64]] = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if int(offsets[-1]) != nnz:
        raise BadInput(f"{name}: the lengths add up to {int(offsets[-1])}, but {nnz} ids were sent", param=name)
    return offsets
