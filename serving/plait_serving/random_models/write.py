"""A whole model as a folder that diffusers, and plait, load; and its safetensors files of drawn tensors, each written
in one pass: the header follows from the shapes, the values are drawn while they are written. No tensor is ever whole
in memory.

Every tensor has a generator of its own, seeded by the file's seed and the tensor's label: its values depend on neither
the other tensors nor their order.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from plait_serving.diffusion.published.architectures import Architecture, ModelPart
from plait_serving.diffusion.published.configs import build_on_meta, stored, write_configs
from plait_serving.diffusion.sources.staging import new_folder
from plait_serving.random_models import DtypeName

Report = Callable[[str, int, int], None]
"""Receives what is being written, the bytes that are written, and all bytes."""

# The published files were saved by torch, and loaders look for this.
METADATA = {"format": "pt"}
_FILES = {"diffusers": "diffusion_pytorch_model.safetensors", "transformers": "model.safetensors"}


def write_model(architecture: Architecture, folder: Path, *, seed: int, dtype: DtypeName, report: Report) -> None:
    """Write a new folder; the same arguments give the same bytes.

    Raises `ModelError` if the folder is not empty or the disk too full, and `OSError` as the file system does.
    """
    modules = [(part, build_on_meta(part)) for part in architecture.parts]
    drawn = [(part, drawn_weights(part, module)) for part, module in modules]
    total = sum(tensor.nbytes(dtype) for _, tensors in drawn for tensor in tensors)
    written = 0
    with new_folder(folder, needed_bytes=total) as staged:
        write_configs(architecture, staged, {part.folder: module for part, module in modules})
        for part, tensors in drawn:
            file = staged / part.folder / _FILES[part.library]
            for count in write_tensors(file, tensors, seed=seed, dtype=dtype, metadata=METADATA):
                written += count
                report(part.folder or folder.name, written, total)


# As CLIP's and T5's own initialisations have them; sines and cosines as large on average.
_EMBEDDINGS = {"token_embedding": 0.02, "position_embedding": 0.01, "shared": 1.0, "pos_embed": 0.71}

_GAINS: tuple[tuple[re.Pattern[str], float], ...] = (
    # Zero in a new ControlNet. Trained ones are small beside what they are added to; zeros would hide every mistake.
    (re.compile(r"^controlnet_(down_blocks\.\d+|mid_block)\.weight$"), 0.1),
    # Between SiLUs without a norm: the second moment of silu(x) is .355 for a standard normal x, and 1.68^2 * .355 = 1.
    (re.compile(r"^controlnet_cond_embedding\.(blocks\.\d+|conv_out)\.weight$"), 1.68),
    # T5 does not divide the products of queries and keys by the root of a head's width; its queries are smaller by it.
    (re.compile(r"\.SelfAttention\.q\.weight$"), 0.125),
)


def drawn_weights(part: ModelPart, module: nn.Module) -> list[DrawnTensor]:
    """Return the weights of a module as its file stores them: names and shapes are the library's own class's.

    Matrices and convolutions are scaled by their fan-in, so that what has variance 1 keeps it; norms start as the
    identity and biases as 0. Every branch of these models begins with a norm, so activations stay far below float16's
    maximum.
    """
    made: list[DrawnTensor] = []
    for key, value in stored(module).items():
        mean, std = _distribution(key, tuple(value.shape))
        label = f"{part.folder or part.class_name}.{key}"
        made.append(DrawnTensor(key=key, label=label, shape=tuple(value.shape), mean=mean, std=std))
    return made


def _distribution(key: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a weight."""
    if len(shape) < 2:
        return (0.0 if key.endswith("bias") else 1.0), 0.0
    embedding = _EMBEDDINGS.get(key.split(".")[-2])
    if embedding is not None:
        return 0.0, embedding
    gain = next((gain for pattern, gain in _GAINS if pattern.search(key)), 1.0)
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))


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
