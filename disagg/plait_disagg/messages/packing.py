"""Tensors into buffers and back by plan: what follows from a message's shapes is worked out once, not for each message.

A model's batches have few shapes, and a message of a few kilobytes took longer to describe than to copy. `describe`,
`encode` and `decode` of `layout.py` are the naive twins; buffers and tensors are the same. Plans hold no tensors, only
a bounded number is kept, and what a peer says is checked before a plan is made of it (`parse_layout`) or used (the size
of every buffer).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from plait_disagg.messages.layout import (
    LEASE_FROM_BYTES,
    BufferSection,
    LayoutError,
    MessageLayout,
    RowCounts,
    bytes_of,
    describe_shapes,
    encode,
    numbers_of,
    parse_layout,
)
from plait_disagg.queue.knobs import WireFormat
from plait_fabric import Buffer, Lease, Pool
from plait_fabric.memory.pool import copy_bytes


@dataclass(frozen=True, slots=True)
class _GroupPlan:
    """Tensors that lie end to end: their names, heights and first bytes, and the shape and bytes of all of them."""

    names: tuple[str, ...]
    heights: list[int]
    starts: tuple[int, ...]
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _SectionPlan:
    """A buffer: how many numbers it has, in all and by group."""

    section: BufferSection
    count: int
    sizes: list[int]
    groups: tuple[_GroupPlan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PackPlan:
    """How tensors of certain names, shapes and dtypes are packed. `fields`: what describes that in the header."""

    layout: MessageLayout
    fields: Mapping[str, Any]
    sections: tuple[_SectionPlan, ...]


def plan_of(tensors: Mapping[str, torch.Tensor], *, users: int, items: int, wire: WireFormat = "float32") -> PackPlan:
    """Return the plan for any tensors with rows (`layout.describe`). Raises `LayoutError`."""
    values = tensors.values()
    shapes, dtypes = tuple([it.shape for it in values]), tuple([it.dtype for it in values])
    return _plan_of(tuple(tensors), shapes, dtypes, users, items, wire)


@lru_cache(maxsize=1024)
def _plan_of(  # noqa: PLR0917  # a cache's key
    names: tuple[str, ...],
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    users: int,
    items: int,
    wire: WireFormat,
) -> PackPlan:
    layout, counts = describe_shapes(names, shapes, dtypes, users=users, items=items, wire=wire)
    fields = {"layout": layout.text, "flat": list(counts.flat)}
    return PackPlan(layout, fields, _sections(layout, counts))


def _sections(layout: MessageLayout, counts: RowCounts) -> tuple[_SectionPlan, ...]:
    rows = {"u": counts.users, "i": counts.items, "U": counts.users + 1, "I": counts.items + 1}
    flat_names = [part.name for part in layout.parts if part.rows == "f"]
    if len(flat_names) != len(counts.flat):
        raise LayoutError("the message says the sizes of other tensors")
    flat_rows = dict(zip(flat_names, counts.flat, strict=True))
    made = []
    for section in layout.sections:
        groups, sizes = [], []
        for group in section.groups:
            heights = [flat_rows[it.name] if it.rows == "f" else rows[it.rows] for it in group.parts]
            names, row_bytes = tuple([it.name for it in group.parts]), group.numbers * section.dtype.itemsize
            *starts, nbytes = accumulate([height * row_bytes for height in heights], initial=0)
            groups.append(_GroupPlan(names, heights, tuple(starts), nbytes, (sum(heights), *group.tail)))
            sizes.append(sum(heights) * group.numbers)
        made.append(_SectionPlan(section, sum(sizes), sizes, tuple(groups)))
    return tuple(made)


def pack(plan: PackPlan, tensors: Mapping[str, torch.Tensor], pool: Pool, *, timeout_s: float) -> list[Buffer]:
    """Return what `layout.encode` does for tensors of the plan's shapes; raises what it raises."""
    if any(section.section.code in ("f2", "q1") for section in plan.sections):
        return encode(plan.layout, tensors, pool, timeout_s=timeout_s)
    buffers: list[Buffer] = []
    try:
        for section in plan.sections:
            buffers.append(_packed(section, tensors, pool, timeout_s))  # noqa: PERF401  # what was leased is known
    except BaseException:
        for buffer in buffers:
            if isinstance(buffer, Lease):
                buffer.release()
        raise
    return buffers


def _packed(plan: _SectionPlan, tensors: Mapping[str, torch.Tensor], pool: Pool, timeout_s: float) -> Buffer:
    if len(plan.groups) == len(plan.groups[0].names) == 1:
        return bytes_of(tensors[plan.groups[0].names[0]].contiguous())  # the channel makes the one copy
    nbytes = plan.count * plan.section.dtype.itemsize
    if nbytes < LEASE_FROM_BYTES:
        target = bytearray(nbytes)
        _fill(memoryview(target), plan, tensors)
        return target
    lease = pool.acquire(nbytes, timeout_s)
    try:
        _fill(lease.memory, plan, tensors)
    except BaseException:
        lease.release()
        raise
    return lease


def _fill(target: memoryview, plan: _SectionPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    start = 0
    for group in plan.groups:
        stop = start + group.nbytes
        pieces = [tensors[name] for name in group.names]
        there = _end_to_end(pieces, group, plan.section.dtype)
        if there is not None:
            copy_bytes(target[start:stop], there)
        elif group.nbytes:
            torch.cat(pieces, out=torch.frombuffer(target[start:stop], dtype=plan.section.dtype).view(group.shape))
        start = stop


def _end_to_end(pieces: Sequence[torch.Tensor], group: _GroupPlan, dtype: torch.dtype) -> memoryview | None:
    """Return the bytes of tensors of this dtype that lie end to end in memory, as pooled rows do; None for others."""
    first = pieces[0]
    begin = first.data_ptr()
    for piece, start in zip(pieces, group.starts, strict=True):
        if piece.data_ptr() != begin + start or piece.dtype != dtype or not piece.is_contiguous():
            return None
    left = first.untyped_storage().nbytes() - first.storage_offset() * first.itemsize
    if not 0 < group.nbytes <= left:  # or it is chance that they are neighbours
        return None
    flat = first if len(pieces) == 1 else first.as_strided((group.nbytes // first.itemsize,), (1,))
    return bytes_of(flat).cast("B")


def unpack(layout: MessageLayout, buffers: Sequence[memoryview], counts: RowCounts) -> dict[str, torch.Tensor]:
    """Return what `layout.decode` does, and raise what it raises."""
    if len(buffers) != len(layout.sections):
        raise LayoutError(f"{len(buffers)} buffers for {len(layout.sections)} sections")
    # Sizes of bags differ from request to request: such plans would only push out others.
    sections = _sections(layout, counts) if counts.flat else _known_sections(layout.text, counts.users, counts.items)
    tensors: dict[str, torch.Tensor] = {}
    for plan, buffer in zip(sections, buffers, strict=True):
        numbers = numbers_of(plan.section, buffer, plan.count)
        chunks = (numbers,) if len(plan.sizes) == 1 else numbers.split_with_sizes(plan.sizes)
        for chunk, group in zip(chunks, plan.groups, strict=True):
            together = chunk.view(group.shape)
            if len(group.names) == 1:
                tensors[group.names[0]] = together
            else:
                tensors.update(zip(group.names, together.split_with_sizes(group.heights), strict=True))
    return tensors


@lru_cache(maxsize=1024)
def _known_sections(text: str, users: int, items: int) -> tuple[_SectionPlan, ...]:
    return _sections(parse_layout(text), RowCounts(users=users, items=items))
