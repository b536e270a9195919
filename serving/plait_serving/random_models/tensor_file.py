"""A safetensors file of drawn tensors, written in one pass: the header follows from the shapes, the values are drawn
while they are written. No tensor is ever whole in memory.

Every tensor has a generator of its own, seeded by the file's seed and the tensor's label: its values depend on neither
the other tensors nor their order.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from plait_serving.random_models import DtypeName

CHUNK = 1 << 22
"""Values drawn at once: 16 MiB in float32. Part of the format of a seed: another chunk may draw other values."""

_DTYPES: Mapping[DtypeName, tuple[str, torch.dtype]] = {
    DtypeName.FLOAT16: ("F16", torch.float16),
    DtypeName.BFLOAT16: ("BF16", torch.bfloat16),
    DtypeName.FLOAT32: ("F32", torch.float32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTensor:
    """A tensor of normally distributed values; where `std` is 0 it is the constant `mean`.

    `key` is its name in the file; `label` names its random stream.
    """

    key: str
    label: str
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 0.0

    def nbytes(self, dtype: DtypeName) -> int:
        """Return the number of bytes in a file."""
        return math.prod(self.shape) * _DTYPES[dtype][1].itemsize


def write_tensors(
    path: Path,
    tensors: Sequence[DrawnTensor],
    *,
    seed: int,
    dtype: DtypeName,
    metadata: Mapping[str, str],
) -> Iterator[int]:
    """Write a new file while this is read: the bytes of every chunk, once it is written."""
    with path.open("xb") as file:
        file.write(_header(tensors, dtype, metadata))
        for tensor in tensors:
            for values in _chunks(tensor, seed):
                raw = values.to(_DTYPES[dtype][1]).view(torch.uint8).numpy()
                file.write(raw.data)
                yield raw.nbytes


def _header(tensors: Sequence[DrawnTensor], dtype: DtypeName, metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.nbytes(dtype)
        table[tensor.key] = {"dtype": _DTYPES[dtype][0], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(table, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


def _chunks(tensor: DrawnTensor, seed: int) -> Iterator[torch.Tensor]:
    """Yield a tensor's values in order, flat, in float32."""
    digest = hashlib.sha256(f"{seed} {tensor.label}".encode()).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    left = math.prod(tensor.shape)
    while left:
        values = torch.empty(min(left, CHUNK), dtype=torch.float32)
        left -= values.numel()
        yield values.normal_(tensor.mean, tensor.std, generator=rng) if tensor.std else values.fill_(tensor.mean)
