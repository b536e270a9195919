"""The naive twin of `plait_fabric.layouts`: a section is the bytes of its tensors, one after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from plait_disagg.messages.layout import crossing_layout
from plait_disagg.queue.knobs import WireFormat
from plait_fabric.layouts import Layout, Part, RowCounts, code_of, layout_of

DTYPES = {"i8": torch.int64, "f8": torch.float64, "f4": torch.float32, "f2": torch.float16, "b1": torch.bool}


def describe(
    tensors: Mapping[str, torch.Tensor], *, users: int, items: int, wire: WireFormat = "float32"
) -> tuple[Layout, RowCounts]:
    """The layout of any tensors with rows, by their sizes."""
    parts, flat = [], []
    for name, tensor in tensors.items():
        first, *tail = tensor.shape
        rows = "i" if first == items else "u" if first == users else "f"
        flat += [first] if rows == "f" else []
        parts.append(Part(code_of(tensor.dtype), rows, tuple(tail), name))
    counts = RowCounts(users=users, items=items, flat=tuple(flat))
    return crossing_layout(layout_of(parts).text, wire).layout, counts


def encode(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> list[bytes]:
    """What `pack` makes."""
    return [
        b"".join(_bytes(section.code, tensors[name]) for group in section.groups for name in group.names)
        for section in layout.sections
    ]


def _bytes(code: str, tensor: torch.Tensor) -> bytes:
    if code == "q1":
        tensor = torch.ops.quantized.embedding_bag_byte_prepack(tensor.reshape(-1, tensor.shape[-1]))
    return (tensor.half() if code == "f2" else tensor).contiguous().numpy().tobytes()


def decode(layout: Layout, counts: RowCounts, buffers: Sequence[memoryview]) -> dict[str, torch.Tensor]:
    """What `unpack` makes of buffers that are right."""
    rows = {"u": counts.users, "i": counts.items, "U": counts.users + 1, "I": counts.items + 1}
    given = dict(zip(layout.given, counts.flat, strict=True))
    tensors, parts = {}, {part.name: part for part in layout.parts}
    for section, buffer in zip(layout.sections, buffers, strict=True):
        rest = bytes(buffer)
        for part in (parts[name] for group in section.groups for name in group.names):
            shape = (given.get(part.name, rows.get(part.rows, 0)), *part.tail)
            width = 0 if part.code != "q1" else part.tail[-1]
            numbers = math.prod(shape) if not width else math.prod(shape) // width * (width + 8)
            dtype = torch.uint8 if width else DTYPES[part.code]
            nbytes = numbers * dtype.itemsize
            flat = torch.frombuffer(bytearray(rest[:nbytes]), dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
            if width and nbytes:
                flat = torch.ops.quantized.embedding_bag_byte_unpack(flat.view(-1, width + 8))
            tensors[part.name] = (flat.float() if part.code in ("f2", "q1") else flat).reshape(shape)
            rest = rest[nbytes:]
    return tensors
