"""The naive twin of `plait_fabric.layouts`: a section is the bytes of its tensors, one after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from plait_disagg.messages.layout import crossing_layout
from plait_disagg.queue.knobs import WireFormat
from plait_fabric.layouts import Layout, Part, RowCounts, code_of, layout_of


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
