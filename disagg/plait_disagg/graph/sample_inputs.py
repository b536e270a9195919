"""Request tensors: random ones for measuring and checking, several as one batch, and as a module takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input, tensor_names
from plait_disagg.graph.operators import RESHAPES
from plait_disagg.graph.program import LOOKUP, USER_OF, Node, Program, Ref

_KEEPS_IDS = RESHAPES | {"aten.to.dtype", "aten._to_copy.default", "aten.contiguous.default"}
"""Operators behind which ids are what they were; casts to float32 and back, for tables of at most `_EXACT_ROWS`."""

_EXACT_ROWS = 1 << 24

Draw = Callable[[int, int, torch.Generator], torch.Tensor]
"""Draws ids: (count, rows, generator) to (count,) int64 in 0..rows - 1."""


def uniform(count: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Draw ids uniformly."""
    return torch.randint(0, rows, (count,), generator=generator)


def sample(
    inputs: Sequence[Input],
    bounds: Mapping[str, int],
    *,
    candidates: int,
    ids_per_bag: Mapping[str, int] | int = 20,
    seed: int = 0,
    draw: Draw = uniform,
    ragged: bool = False,
) -> dict[str, torch.Tensor]:
    """Draw a request: user inputs with one row, item inputs with `candidates`.

    `bounds`: ids of an input are below its bound. `ragged`: bags have 0 to `ids_per_bag` ids instead of exactly that
    many.
    """
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, torch.Tensor] = {}
    for item in inputs:
        rows = 1 if item.side == "user" else candidates
        bound = bounds.get(item.name, 2)
        if isinstance(item, Bag):
            wanted = ids_per_bag if isinstance(ids_per_bag, int) else ids_per_bag.get(item.name, 1)
            max_length = min(wanted, item.largest)
            lengths = torch.full((rows,), max_length)
            if ragged:
                lengths = torch.randint(0, max_length + 1, (rows,), generator=generator)
            made[item.name] = draw(int(lengths.sum()), bound, generator)
            made[item.name + OFFSETS] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            if item.weighted:
                made[item.name + WEIGHTS] = torch.rand(int(lengths.sum()), generator=generator)
        elif isinstance(item, Dense):
            made[item.name] = _numbers(item, (rows, *item.shape), generator)
        else:
            shape = (rows, *item.shape)
            first = item.min or 0
            if item.max is not None:
                bound = min(bounds.get(item.name, item.max + 1), item.max + 1)
            drawn = draw(torch.Size(shape).numel(), max(bound - first, 1), generator)
            made[item.name] = (drawn + first).reshape(shape)
    return made


def _numbers(item: Dense, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw numbers: uniform in a declared range, otherwise normal and within the one end that is declared."""
    if item.low is not None and item.high is not None:
        return torch.rand(shape, generator=generator) * (item.high - item.low) + item.low
    drawn = torch.randn(shape, generator=generator)
    return drawn if item.low is None and item.high is None else drawn.clamp(item.low, item.high)


def id_bounds(
    program: Program, table_rows: Mapping[str, int], constants: Mapping[str, torch.Tensor] | None = None
) -> dict[str, int]:
    """Map each input to the rows of the smallest table that its ids reach, less what is added on the way.

    Ids reach a table directly or through arithmetic; models that keep all fields in one table add where a field's
    rows begin (one of `constants`).
    """
    bounds: dict[str, int] = {}
    for source in id_sources(program, table_rows, constants or {}):
        room = max(source.rows - max(int(source.added.max()), 0), 1)
        bounds[source.input] = min(room, bounds.get(source.input, room))
    return bounds


@dataclass(frozen=True, slots=True)
class IdSource:
    """An input that ids of a table with `rows` are made of; `added` to it on the way. `is_id`: nothing else is done."""

    input: str
    rows: int
    added: torch.Tensor
    is_id: bool


def id_sources(
    program: Program, table_rows: Mapping[str, int], constants: Mapping[str, torch.Tensor]
) -> Iterator[IdSource]:
    """Yield the sources of the ids of every lookup in tables of `table_rows`; an input may be there more than once."""
    made_by = reads(program)

    def walk(name: str, rows: int, added: torch.Tensor, is_id: bool) -> Iterator[IdSource]:
        node = program.values[name]
        if not isinstance(node, Node):
            yield IdSource(name, rows, added, is_id)
            return
        width, last = node.shape[-1:], len(node.args) > 1 and node.args[1] in (-1, len(node.shape) - 1)
        if node.op == "aten.cat.default" and last and width == (len(node.parts),) and added.shape[-1] in (1, *width):
            for part, share in zip(node.parts, added.expand(*added.shape[:-1], *width).unbind(-1), strict=True):
                yield from walk(part.name, rows, share.reshape(-1), is_id)
            return
        if node.op == "aten.add.Tensor":
            for term in node.args[:2]:
                plain = constants.get(term.name) if isinstance(term, Ref) else torch.tensor([term])
                added = added if plain is None else added + plain
            is_id &= node.dtype.startswith("int") and not node.kwargs and isinstance(node.args[1], Ref)
            is_id &= node.inputs[-1] in constants
        else:
            exact = node.dtype == "int64" or (node.dtype in ("int32", "float32", "float64") and rows <= _EXACT_ROWS)
            is_id &= node.op in _KEEPS_IDS and exact
            added = added if is_id else added.max().reshape(1)
        for source in made_by.get(name, ()):
            yield from walk(source, rows, added, is_id and source == node.inputs[0])

    for node in program.nodes:
        rows = table_rows.get(str(node.kwargs["table"])) if node.op == LOOKUP else None
        if rows is not None:
            yield from walk(node.inputs[0], rows, torch.zeros(1, dtype=torch.int64), True)


def collate(
    inputs: Sequence[Input], requests: Sequence[Mapping[str, torch.Tensor]], candidates: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Collate requests into one batch, with `USER_OF`: the inputs of a tiled program. (Workers have a faster one.)"""
    made: dict[str, torch.Tensor] = {}
    for item in inputs:
        made[item.name] = torch.cat([request[item.name] for request in requests])
        if isinstance(item, Bag):
            parts = [request[item.name + OFFSETS].diff() for request in requests]
            made[item.name + OFFSETS] = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(parts).cumsum(0)])
            if item.weighted:
                made[item.name + WEIGHTS] = torch.cat([request[item.name + WEIGHTS] for request in requests])
    made[USER_OF] = torch.arange(len(requests)).repeat_interleave(torch.tensor(list(candidates)))
    return made


def for_module(inputs: Sequence[Input], batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Expand a batch of `collate` to what the module's own `forward` takes: every input with one row per candidate."""
    items = [item for item in inputs if item.side == "item"]
    made = {name: batch[name] for name in tensor_names(items)}
    return made | picked([item for item in inputs if item.side == "user"], batch, batch[USER_OF])


def picked(inputs: Sequence[Input], tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of these inputs for `rows` (N,) int64, in this order; a row may be there more than once."""
    made: dict[str, torch.Tensor] = {}
    for item in inputs:
        if not isinstance(item, Bag):
            made[item.name] = tensors[item.name].index_select(0, rows)
            continue
        offsets = tensors[item.name + OFFSETS]
        starts, lengths = offsets[rows], offsets[rows + 1] - offsets[rows]
        made[item.name + OFFSETS] = ends = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=ends[1:])
        # Position p of the result belongs to bag b and is its (p - ends[b])-th id.
        shift = torch.repeat_interleave(starts - ends[:-1], lengths)
        which = torch.arange(len(shift)) + shift
        for name in set(tensor_names((item,))) - made.keys():
            made[name] = tensors[name][which]
    return made
