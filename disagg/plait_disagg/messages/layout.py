"""Many named tensors in a few buffers, described by one short text.

A message of a ranking model has dozens of tensors of a few hundred bytes; one buffer and one JSON entry for each
would cost more than their contents. Tensors of one code lie end to end in one buffer (a *section*; `q1` has one for
each row length), those of one row shape together (a *group*), so that a group is joined, and split, by one call.
The text that describes this is the same for every message of a model, and is parsed once::

    f4:u:1:age;f4:i:16:emb_3;i8:f::genres

is `code:rows:tail:name` of each tensor. Codes: `i8 i4 f8 f4 b1` as in numpy; `f2` a float32 that travels as
float16; `q1` a float32 that travels as one byte per number with float32 scale and bias per row (Fused8BitRowwise of
PyTorch: D + 8 bytes per row). Rows: `u` one per user, `i` one per candidate, `U` and `I` one more (offsets),
`f` as given in the message. Tail: the shape without its first dimension.

Only the texts are cached, and only a bounded number: what a peer sends is untrusted input until it is checked here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input
from plait_disagg.queue.knobs import WireFormat
from plait_fabric import Buffer, Lease, Pool
from plait_fabric.rpc.fields import WireError

_DTYPES: dict[str, torch.dtype] = {
    "i8": torch.int64,
    "i4": torch.int32,
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "b1": torch.bool,
    "q1": torch.uint8,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items() if code not in ("f2", "q1")}
_SCALE_BYTES = 8
_NARROWEST_INT8 = 16
"""The row length below which the scale and bias of an int8 row cancel out its advantage over float16."""

_NAME = re.compile(r"^[A-Za-z0-9_.][A-Za-z0-9_.:]{0,199}$")
MAX_LAYOUT_CHARS = 60_000
_MAX_SIZE = 1 << 24
LEASE_FROM_BYTES = 32_768
"""Smaller sections fit inside the control packet of a shared-memory channel (`FabricOptions.inline_bytes`)."""


class LayoutError(WireError):
    """A layout, or the buffers that should follow it, are invalid."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a message. `numbers`: how many one of its rows has."""

    code: str
    rows: str
    tail: tuple[int, ...]
    name: str
    numbers: int

    @classmethod
    def of(cls, code: str, rows: str, tail: tuple[int, ...], name: str) -> Part:
        """Return the part, with the derived fields filled in."""
        return cls(code, rows, tail, name, math.prod(tail))

    @property
    def text(self) -> str:
        """The part as written in a layout's text."""
        return f"{self.code}:{self.rows}:{','.join(map(str, self.tail))}:{self.name}"


@dataclass(frozen=True, slots=True)
class PartGroup:
    """Parts with rows of one shape, of `numbers` numbers each."""

    tail: tuple[int, ...]
    numbers: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class BufferSection:
    """The groups of one buffer, which holds `dtype`; `width`: numbers per `q1` row, otherwise 0."""

    code: str
    width: int
    dtype: torch.dtype
    groups: tuple[PartGroup, ...]


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The parts in their order, and the sections in the order of the buffers."""

    text: str
    parts: tuple[Part, ...]
    sections: tuple[BufferSection, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Number of rows in a message: users, candidates, and of each `f` part in order."""

    users: int
    items: int
    flat: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def parse_layout(text: str) -> MessageLayout:
    """Parse a layout's text. Raises `LayoutError`."""
    if len(text) > MAX_LAYOUT_CHARS:
        raise LayoutError(f"a layout of {len(text)} characters")
    parts = tuple(_parse_part(entry) for entry in text.split(";")) if text else ()
    if len({part.name for part in parts}) != len(parts):
        raise LayoutError("a layout names a tensor twice")
    sections: dict[tuple[str, int], dict[tuple[int, ...], list[Part]]] = {}
    for part in parts:
        key = part.code, part.tail[-1] if part.code == "q1" else 0
        sections.setdefault(key, {}).setdefault(part.tail, []).append(part)
    made = tuple(_section(code, width, groups) for (code, width), groups in sorted(sections.items()))
    return MessageLayout(text=text, parts=parts, sections=made)


def _section(code: str, width: int, groups: Mapping[tuple[int, ...], Sequence[Part]]) -> BufferSection:
    made = tuple(PartGroup(tail, math.prod(tail), tuple(parts)) for tail, parts in sorted(groups.items()))
    return BufferSection(code, width, _DTYPES[code], made)


def _parse_part(entry: str) -> Part:
    fields = entry.split(":", 3)  # a name may have colons: packaging gives such to the parts of a layer
    if len(fields) != 4:
        raise LayoutError(f"{entry[:100]!r} is not code:rows:tail:name")
    code, rows, tail_text, name = fields
    sizes = tail_text.split(",") if tail_text else []
    if code not in _DTYPES or rows not in ("u", "i", "U", "I", "f") or not _NAME.match(name) or len(sizes) > 8:
        raise LayoutError(f"{entry[:100]!r} is not code:rows:tail:name")
    if not all(size.isascii() and size.isdigit() and len(size) <= 8 for size in sizes):
        raise LayoutError(f"{entry[:100]!r} has a tail that is no shape")
    part = Part.of(code, rows, tuple(map(int, sizes)), name)
    if part.numbers > _MAX_SIZE or (code == "q1" and (not part.tail or part.tail[-1] < 1)):
        raise LayoutError(f"{entry[:100]!r} has a tail that cannot be")
    return part


def layout_of_inputs(inputs: Sequence[Input]) -> MessageLayout:
    """Return the layout of a request: both sides know it from the model's card."""
    parts: list[Part] = []
    for item in inputs:
        side = "u" if item.side == "user" else "i"
        if isinstance(item, Bag):
            parts += [Part.of("i8", "f", (), item.name), Part.of("i8", side.upper(), (), item.name + OFFSETS)]
            if item.weighted:
                parts.append(Part.of("f4", "f", (), item.name + WEIGHTS))
        else:
            parts.append(Part.of("f4" if isinstance(item, Dense) else "i8", side, item.shape, item.name))
    return parse_layout(";".join(part.text for part in parts))


def describe(
    tensors: Mapping[str, torch.Tensor], *, users: int, items: int, wire: WireFormat = "float32"
) -> tuple[MessageLayout, RowCounts]:
    """Return the layout of any tensors with rows (with as many users as candidates, both mean the same).

    Raises `LayoutError`.
    """
    values = tensors.values()
    return describe_shapes(
        tuple(tensors), [it.shape for it in values], [it.dtype for it in values], users=users, items=items, wire=wire
    )


def describe_shapes(
    names: Sequence[str],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    *,
    users: int,
    items: int,
    wire: WireFormat,
) -> tuple[MessageLayout, RowCounts]:
    """Return what `describe` does for tensors of these names, shapes and dtypes. Raises `LayoutError`."""
    entries: list[str] = []
    flat: list[int] = []
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        if not shape:
            raise LayoutError(f"{name} is a number, not a tensor with rows")
        first, *tail = shape
        rows = "i" if first == items else "u" if first == users else "f"
        if rows == "f":
            flat.append(first)
        entries.append(Part.of(_code(dtype, tail, wire), rows, tuple(tail), name).text)
    return parse_layout(";".join(entries)), RowCounts(users=users, items=items, flat=tuple(flat))


def _code(dtype: torch.dtype, tail: Sequence[int], wire: WireFormat) -> str:
    if dtype is torch.float32 and wire != "float32":
        if wire == "float16":
            return "f2"
        return "q1" if tail and tail[-1] >= _NARROWEST_INT8 else "f4"
    code = _CODES.get(dtype)
    if code is None:
        raise LayoutError(f"{dtype} does not travel")
    return code


def encode(layout: MessageLayout, tensors: Mapping[str, torch.Tensor], pool: Pool, *, timeout_s: float) -> list[Buffer]:
    """Encode the sections as buffers to send; large ones are written straight into leases of `pool`.

    Raises `OverflowError` if a number is too large for float16 (float32 can carry it), `LayoutError` for tensors
    other than the layout's, and whatever `Pool.acquire` raises.
    """
    buffers: list[Buffer] = []
    try:
        for section in layout.sections:
            groups = [[tensors[part.name] for part in group.parts] for group in section.groups]
            buffers.append(
                _quantised(section, groups) if section.width else _join(section, groups, pool, timeout_s=timeout_s)
            )
    except BaseException:
        for buffer in buffers:
            if isinstance(buffer, Lease):
                buffer.release()
        raise
    return buffers


def _quantised(section: BufferSection, groups: Sequence[Sequence[torch.Tensor]]) -> Buffer:
    rows = torch.cat([torch.cat(list(pieces)).reshape(-1, section.width) for pieces in groups])
    packed: torch.Tensor = torch.ops.quantized.embedding_bag_byte_prepack(rows)
    return bytes_of(packed.reshape(-1))


def _join(section: BufferSection, groups: Sequence[list[torch.Tensor]], pool: Pool, *, timeout_s: float) -> Buffer:
    first = groups[0][0]
    if len(groups) == len(groups[0]) == 1 and first.dtype is section.dtype:
        return bytes_of(first.contiguous())  # the channel makes the one copy
    heights = [sum([piece.shape[0] for piece in pieces]) for pieces in groups]
    counts = [height * group.numbers for height, group in zip(heights, section.groups, strict=True)]
    if counts != [sum([piece.numel() for piece in pieces]) for pieces in groups]:
        raise LayoutError(f"the tensors of section {section.code} have other shapes than the layout")
    count = sum(counts)
    if count * section.dtype.itemsize < LEASE_FROM_BYTES:
        target = torch.empty(count, dtype=section.dtype)
        _fill(target, section, groups, heights)
        return bytes_of(target)
    lease = pool.acquire(count * section.dtype.itemsize, timeout_s)
    try:
        _fill(torch.frombuffer(lease.memory, dtype=section.dtype), section, groups, heights)
    except BaseException:
        lease.release()
        raise
    return lease


def _fill(
    target: torch.Tensor, section: BufferSection, groups: Sequence[list[torch.Tensor]], heights: Sequence[int]
) -> None:
    """Write the groups end to end. Raises `OverflowError` for numbers that float16 cannot hold."""
    chunks = target.split_with_sizes(
        [height * group.numbers for height, group in zip(heights, section.groups, strict=True)]
    )
    for chunk, group, height, pieces in zip(chunks, section.groups, heights, groups, strict=True):
        torch.cat(pieces, out=chunk.view(height, *group.tail))
    if section.code == "f2":
        _check_range(target, groups)


def _check_range(made: torch.Tensor, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check for float16 overflow; infinities and NaN that were there before are allowed."""
    if np.isfinite(made.numpy()).all() or not all(np.isfinite(it.numpy()).all() for pieces in groups for it in pieces):
        return
    raise OverflowError("a number is too large for float16")


def decode(layout: MessageLayout, buffers: Sequence[memoryview], counts: RowCounts) -> dict[str, torch.Tensor]:
    """Return the tensors: views of the buffers, but for `f2` and `q1`, which become float32. Raises `LayoutError`."""
    if len(buffers) != len(layout.sections):
        raise LayoutError(f"{len(buffers)} buffers for {len(layout.sections)} sections")
    rows = {"u": counts.users, "i": counts.items, "U": counts.users + 1, "I": counts.items + 1}
    flat_names = [part.name for part in layout.parts if part.rows == "f"]
    if len(flat_names) != len(counts.flat):
        raise LayoutError("the message says the sizes of other tensors")
    flat_rows = dict(zip(flat_names, counts.flat, strict=True))
    tensors: dict[str, torch.Tensor] = {}
    for section, buffer in zip(layout.sections, buffers, strict=True):
        heights = [
            [flat_rows[part.name] if part.rows == "f" else rows[part.rows] for part in group.parts]
            for group in section.groups
        ]
        totals = [sum(mine) for mine in heights]
        sizes = [total * group.numbers for total, group in zip(totals, section.groups, strict=True)]
        chunks = numbers_of(section, buffer, sum(sizes)).split_with_sizes(sizes)
        for group, mine, total, chunk in zip(section.groups, heights, totals, chunks, strict=True):
            pieces = chunk.view(total, *group.tail).split_with_sizes(mine)
            for part, piece in zip(group.parts, pieces, strict=True):
                tensors[part.name] = piece
    return tensors


def numbers_of(section: BufferSection, buffer: memoryview, count: int) -> torch.Tensor:
    """Return all numbers of a section, flat, of which there must be `count`."""
    dtype, width = section.dtype, section.width
    stored = count if not width else count // width * (width + _SCALE_BYTES)
    if stored * dtype.itemsize != buffer.nbytes:
        raise LayoutError(f"section {section.code} has {buffer.nbytes} bytes, not {stored * dtype.itemsize}")
    if not stored:
        return torch.empty(0, dtype=torch.float32 if section.code in ("f2", "q1") else dtype)
    flat = torch.frombuffer(buffer, dtype=dtype)
    if section.code == "f2":
        return flat.to(torch.float32)
    if not width:
        return flat
    unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(flat.view(-1, width + _SCALE_BYTES))
    return unpacked.view(-1)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory."""
    array: Any = tensor.numpy()
    return memoryview(array)
