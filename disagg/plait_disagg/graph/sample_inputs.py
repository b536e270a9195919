"""Request tensors: random ones for measuring and checking, several as one batch, and as a module takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import OFFSETS, WEIGHTS, Bag, Dense, Input, tensor_names
from plait_disagg.graph.program import LOOKUP, USER_OF, Node, Program, Ref

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
    walk = _Bounding({node.name: node for node in program.nodes}, reads(program), constants or {})
    for node in program.nodes:
        if node.op == LOOKUP:
            for name in node.inputs[:1]:
                walk.reach(name, table_rows[str(node.kwargs["table"])], torch.zeros(1))
    return walk.bounds


@dataclass
class _Bounding:
    nodes: Mapping[str, Node]
    made_by: Mapping[str, tuple[str, ...]]
    constants: Mapping[str, torch.Tensor]
    bounds: dict[str, int] = field(default_factory=dict)

    def reach(self, name: str, rows: int, added: torch.Tensor) -> None:
        """Note that `name`, with `added` to it, indexes a table of `rows`."""
        node = self.nodes.get(name)
        if node is None:
            room = max(rows - max(int(added.max()), 0), 1)
            self.bounds[name] = min(room, self.bounds.get(name, room))
            return
        if node.op == "aten.add.Tensor":
            for term in node.args[:2]:
                plain = self.constants.get(term.name) if isinstance(term, Ref) else torch.tensor([term])
                added = added + plain if plain is not None else added
        parts = node.args[0] if node.op == "aten.cat.default" else None
        width = node.shape[-1] if node.shape else 0
        last = len(node.args) > 1 and node.args[1] in (-1, len(node.shape) - 1)
        if isinstance(parts, tuple) and last and added.shape[-1] == width == len(parts):
            for part, share in zip(parts, torch.unbind(added, -1), strict=True):
                assert isinstance(part, Ref)
                self.reach(part.name, rows, share)
            return
        for source in self.made_by.get(name, ()):
            self.reach(source, rows, added if node.op == "aten.add.Tensor" else added.max().reshape(1))


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
    user_of = batch[USER_OF]
    made: dict[str, torch.Tensor] = {}
    for item in inputs:
        if item.side == "item":
            made[item.name] = batch[item.name]
        elif not isinstance(item, Bag):
            made[item.name] = batch[item.name][user_of]
        if isinstance(item, Bag):
            made |= {name: batch[name] for name in tensor_names((item,))}
            if item.side == "user":
                made |= bags_of(item, batch, user_of)
    return made


def bags_of(item: Bag, tensors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of a bag for `rows`, in this order; a row may be there more than once."""
    offsets = tensors[item.name + OFFSETS]
    made = {item.name + OFFSETS: torch.cat([torch.zeros(1, dtype=torch.int64), offsets.diff()[rows].cumsum(0)])}
    for name in set(tensor_names((item,))) - made.keys():
        made[name] = torch.cat([tensors[name][offsets[row] : offsets[row + 1]] for row in rows.tolist()])
    return made
