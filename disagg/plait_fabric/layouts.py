"""Tensors of a layout that both ends know, in a few buffers: a message says how many rows there are, and nothing else.

A message of a ranking model has dozens of tensors of a few hundred bytes; one buffer and one description for each would
cost more than their contents. Tensors of one code lie end to end in one buffer (a *section*; `q1` has one for each row
length), those of one row shape together (a *group*), so that a group is joined, and split, by one call. Both ends make
the layout of what they said in their greetings, where it is written as::

    f4:u:1:age;f4:i:16:emb_3;i8:f::genres

which is `code:rows:tail:name` of each tensor. Codes: `i8 i4 i2 i1 f8 f4 b1 u1` as in numpy; `h2` a float16; `g2` a
bfloat16; `f2` a float32 that travels as float16; `q1` a float32 that travels as one byte per number with float32 scale
and bias per row (Fused8BitRowwise of PyTorch: D + 8 bytes per row). Rows: `u` one per user, `i` one per candidate, `U`
and `I` one more (offsets), `f` as given in the message. Tail: the shape without its first dimension.

What follows from the numbers of rows is worked out once, not for each message. A bounded number of that is kept, and
what a peer says is checked before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from plait_fabric.memory.pool import Pool, release_all
from plait_fabric.protocols import Buffer
from plait_fabric.rpc.fields import WireError
from plait_fabric.tensors import bytes_of

_DTYPES: dict[str, torch.dtype] = {
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "h2": torch.float16,
    "g2": torch.bfloat16,
    "b1": torch.bool,
    "u1": torch.uint8,
    "q1": torch.uint8,
}
_NARROWED = ("f2", "q1")
"""Codes of a float32 that travels as something else."""
_CODES = {dtype: code for code, dtype in _DTYPES.items() if code not in _NARROWED}
_SCALE_BYTES = 8
_ROWS = ("u", "i", "U", "I")

_NAME = re.compile(r"[^;]{1,200}")
MAX_LAYOUT_CHARS = 60_000
_MAX_SIZE = 1 << 24
_LEASE_FROM_BYTES = 32_768
"""Smaller sections fit inside the control packet of a shared-memory channel (`FabricOptions.inline_bytes`)."""

Pieces: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A tensor, or the tensors that follow one another in it."""


class LayoutError(WireError):
    """A layout, or the tensors or buffers that should follow it, are invalid."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a message."""

    code: str
    rows: str
    tail: tuple[int, ...]
    name: str

    @property
    def text(self) -> str:
        """The part as written in a layout's text."""
        return f"{self.code}:{self.rows}:{','.join(map(str, self.tail))}:{self.name}"


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one row shape: their names, and where in `RowCounts.heights` the rows of each are."""

    names: list[str]
    rows: list[int]
    tail: tuple[int, ...]
    numbers: int


@dataclass(frozen=True, slots=True)
class Section:
    """The groups of one buffer; `width`: numbers per `q1` row, otherwise 0."""

    code: str
    width: int
    dtype: torch.dtype
    groups: list[Group]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts in their order, and the sections in the order of the buffers. `given`: names of the parts whose rows
    each message says (`f`)."""

    text: str
    parts: tuple[Part, ...]
    sections: tuple[Section, ...]
    given: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Number of rows in a message: users, candidates, and of each `f` part in order."""

    users: int = 0
    items: int = 0
    flat: tuple[int, ...] = ()

    @property
    def heights(self) -> tuple[int, ...]:
        """The rows of parts `u`, `i`, `U`, `I`, and of each `f`."""
        return self.users, self.items, self.users + 1, self.items + 1, *self.flat


def code_of(dtype: torch.dtype) -> str:
    """Return the code of tensors that travel as they are. Raises `LayoutError`."""
    code = _CODES.get(dtype)
    if code is None:
        raise LayoutError(f"{dtype} does not travel")
    return code


def layout_of(parts: Iterable[Part]) -> Layout:
    """Return the layout of these parts. Raises `LayoutError`."""
    return parse_layout(";".join([part.text for part in parts]))


@lru_cache(maxsize=256)
def parse_layout(text: str) -> Layout:
    """Parse a layout's text. Raises `LayoutError`."""
    if len(text) > MAX_LAYOUT_CHARS:
        raise LayoutError(f"a layout of {len(text)} characters")
    parts = tuple(_parse_part(entry) for entry in text.split(";")) if text else ()
    if len({part.name for part in parts}) != len(parts):
        raise LayoutError("a layout names a tensor twice")
    given = tuple(part.name for part in parts if part.rows == "f")
    sections: dict[tuple[str, int], dict[tuple[int, ...], list[Part]]] = {}
    for part in parts:
        key = part.code, part.tail[-1] if part.code == "q1" else 0
        sections.setdefault(key, {}).setdefault(part.tail, []).append(part)
    made = tuple(
        Section(code, width, _DTYPES[code], [_group(tail, some, given) for tail, some in sorted(groups.items())])
        for (code, width), groups in sorted(sections.items())
    )
    return Layout(text, parts, made, given)


def _group(tail: tuple[int, ...], parts: Sequence[Part], given: tuple[str, ...]) -> Group:
    rows = [len(_ROWS) + given.index(part.name) if part.rows == "f" else _ROWS.index(part.rows) for part in parts]
    return Group([part.name for part in parts], rows, tail, math.prod(tail))


def _parse_part(entry: str) -> Part:
    fields = entry.split(":", 3)  # a name may have colons: packaging gives such to the parts of a layer
    code, rows, tail_text, name = fields if len(fields) == 4 else [""] * 4
    sizes = tail_text.split(",") if tail_text else []
    if code not in _DTYPES or rows not in (*_ROWS, "f") or not _NAME.fullmatch(name) or len(sizes) > 8:
        raise LayoutError(f"{entry[:100]!r} is not code:rows:tail:name")
    if not all(size.isascii() and size.isdigit() and len(size) <= 8 for size in sizes):
        raise LayoutError(f"{entry[:100]!r} has a tail that is no shape")
    tail = tuple(map(int, sizes))
    if math.prod(tail) > _MAX_SIZE or (code == "q1" and (not tail or tail[-1] < 1)):
        raise LayoutError(f"{entry[:100]!r} has a tail that cannot be")
    return Part(code, rows, tail, name)


class _Plan(NamedTuple):
    """A buffer of a message: the heights of its tensors, by group, and how many numbers they have."""

    section: Section
    heights: list[list[int]]
    totals: list[int]
    sizes: list[int]
    numbers: int


def _plan(layout: Layout, counts: RowCounts) -> tuple[_Plan, ...]:
    # Sizes of bags differ from request to request: such plans would only push out others.
    return _made_plan(layout, counts) if counts.flat else _known_plan(layout.text, counts.users, counts.items)


@lru_cache(maxsize=1024)
def _known_plan(text: str, users: int, items: int) -> tuple[_Plan, ...]:
    return _made_plan(parse_layout(text), RowCounts(users=users, items=items))


def _made_plan(layout: Layout, counts: RowCounts) -> tuple[_Plan, ...]:
    if len(layout.given) != len(counts.flat):
        raise LayoutError("the message says the sizes of other tensors")
    all_heights = counts.heights
    made = []
    for section in layout.sections:
        heights = [[all_heights[row] for row in group.rows] for group in section.groups]
        totals = [sum(mine) for mine in heights]
        sizes = [total * group.numbers for total, group in zip(totals, section.groups, strict=True)]
        made.append(_Plan(section, heights, totals, sizes, sum(sizes)))
    return tuple(made)


def pack(
    layout: Layout, counts: RowCounts, tensors: Mapping[str, Pieces], pool: Pool, *, timeout_s: float
) -> list[Buffer]:
    """Return the sections as buffers to send; large ones are written straight into leases of `pool`.

    Raises `OverflowError` if a number is too large for float16 (float32 can carry it), `LayoutError` for tensors
    other than the layout's, and whatever `Pool.acquire` raises.
    """
    buffers: list[Buffer] = []
    try:
        for plan in _plan(layout, counts):
            buffers.append(_packed(plan, tensors, pool, timeout_s))  # noqa: PERF401  # what was leased is known
    except BaseException:
        release_all(buffers)
        raise
    return buffers


def _packed(plan: _Plan, tensors: Mapping[str, Pieces], pool: Pool, timeout_s: float) -> Buffer:
    section = plan.section
    source = torch.float32 if section.code in _NARROWED else section.dtype
    groups = [
        _pieces(group, heights, source, tensors) for group, heights in zip(section.groups, plan.heights, strict=True)
    ]
    if section.width:
        rows = torch.cat([torch.cat(pieces).reshape(-1, section.width) for pieces in groups])
        return bytes_of(torch.ops.quantized.embedding_bag_byte_prepack(rows).reshape(-1))
    if len(groups) == len(groups[0]) == 1 and source is section.dtype:
        return bytes_of(groups[0][0].contiguous())  # the channel makes the one copy
    nbytes = plan.numbers * section.dtype.itemsize
    if nbytes < _LEASE_FROM_BYTES:
        target = memoryview(bytearray(nbytes))
        _fill(target, plan, groups)
        return target
    with pool.acquire(nbytes, timeout_s) as lease:
        _fill(lease.memory, plan, groups)
        pool.count_copy(nbytes)
        return lease.hand_over()


def _pieces(
    group: Group, heights: Sequence[int], dtype: torch.dtype, tensors: Mapping[str, Pieces]
) -> list[torch.Tensor]:
    """Return what is to lie end to end. Raises `LayoutError` unless it has the layout's shapes and dtype."""
    found: list[torch.Tensor] = []
    tail = group.tail
    for name, height in zip(group.names, heights, strict=True):
        given = tensors[name]
        if isinstance(given, torch.Tensor):
            if given.shape == (height, *tail) and given.dtype is dtype:  # at once: a request has dozens
                found.append(given)
                continue
            given = (given,)
        for piece in given:
            shape = piece.shape
            if not shape or shape[1:] != tail or piece.dtype is not dtype:
                raise LayoutError(f"{name} is {piece.dtype} {list(shape)}, not rows of {dtype} {list(tail)}")
            height -= shape[0]  # noqa: PLW2901  # what is left to find
            found.append(piece)
        if height:
            raise LayoutError(f"{name} has other rows than the message says: {height} are left")
    return found


def _fill(target: memoryview, plan: _Plan, groups: Sequence[list[torch.Tensor]]) -> None:
    """Write the groups end to end. Raises `OverflowError` for numbers that float16 cannot hold."""
    start, dtype = 0, plan.section.dtype
    for group, total, size, pieces in zip(plan.section.groups, plan.totals, plan.sizes, groups, strict=True):
        stop = start + size * dtype.itemsize
        if size:
            torch.cat(pieces, out=torch.frombuffer(target[start:stop], dtype=dtype).view(total, *group.tail))
        start = stop
    if plan.section.code == "f2":
        _check_range(target, groups)


def _check_range(target: memoryview, groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check for float16 overflow; infinities and NaN that were there before are allowed."""
    made = np.frombuffer(target, np.float16)
    if np.isfinite(made).all() or not all(np.isfinite(it.numpy()).all() for pieces in groups for it in pieces):
        return
    raise OverflowError("a number is too large for float16")


def unpack(layout: Layout, counts: RowCounts, buffers: Sequence[memoryview]) -> dict[str, torch.Tensor]:
    """Return the tensors: views of the buffers, but for `f2` and `q1`, which become float32. Raises `LayoutError`."""
    if len(buffers) != len(layout.sections):
        raise LayoutError(f"{len(buffers)} buffers for {len(layout.sections)} sections")
    tensors: dict[str, torch.Tensor] = {}
    for plan, buffer in zip(_plan(layout, counts), buffers, strict=True):
        flat = _numbers(plan, buffer)
        chunks = (flat,) if len(plan.sizes) == 1 else flat.split_with_sizes(plan.sizes)
        for chunk, group, total, heights in zip(chunks, plan.section.groups, plan.totals, plan.heights, strict=True):
            together = chunk.view(total, *group.tail)
            if len(heights) == 1:
                tensors[group.names[0]] = together
            else:
                tensors.update(zip(group.names, together.split_with_sizes(heights), strict=True))
    return tensors


def _numbers(plan: _Plan, buffer: memoryview) -> torch.Tensor:
    """Return all numbers of a section, flat."""
    code, dtype, width = plan.section.code, plan.section.dtype, plan.section.width
    stored = plan.numbers if not width else plan.numbers // width * (width + _SCALE_BYTES)
    if stored * dtype.itemsize != buffer.nbytes:
        raise LayoutError(f"section {code} has {buffer.nbytes} bytes, not {stored * dtype.itemsize}")
    if not stored:
        return torch.empty(0, dtype=torch.float32 if code in _NARROWED else dtype)
    flat = torch.frombuffer(buffer, dtype=dtype)
    if code == "f2":
        return flat.to(torch.float32)
    if not width:
        return flat
    unpacked: torch.Tensor = torch.ops.quantized.embedding_bag_byte_unpack(flat.view(-1, width + _SCALE_BYTES))
    return unpacked.view(-1)
