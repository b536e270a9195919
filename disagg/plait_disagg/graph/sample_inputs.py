"""Request tensors: random ones for measuring and checking, several as one batch, and as a module takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from plait_disagg.graph.edit import reads
from plait_disagg.graph.inputs import OFFSETS, Bag, Dense, Input
from plait_disagg.graph.program import LOOKUP, USER_OF, Program

__all__ = ["Draw", "collate", "for_module", "id_bounds", "sample", "uniform"]

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
        elif isinstance(item, Dense):
            made[item.name] = torch.randn((rows, *item.shape), generator=generator)
        else:
            shape = (rows, *item.shape)
            made[item.name] = draw(torch.Size(shape).numel(), bound, generator).reshape(shape)
    return made


def id_bounds(program: Program, table_rows: Mapping[str, int]) -> dict[str, int]:
    """Map each input to the rows of the smallest table that its ids reach (directly or through arithmetic on them)."""
    made_by = reads(program)
    bounds: dict[str, int] = {}
    for node in program.nodes:
        if node.op != LOOKUP:
            continue
        rows = table_rows[str(node.kwargs["table"])]
        waiting = list(node.inputs[:1])
        while waiting:
            name = waiting.pop()
            if name in made_by:
                waiting += made_by[name]
            else:
                bounds[name] = min(rows, bounds.get(name, rows))
    return bounds


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
            made[item.name], made[item.name + OFFSETS] = batch[item.name], batch[item.name + OFFSETS]
            if item.side == "user":
                made[item.name], made[item.name + OFFSETS] = _repeated(
                    batch[item.name], batch[item.name + OFFSETS], user_of
                )
    return made


def _repeated(ids: torch.Tensor, offsets: torch.Tensor, user_of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat bags of users as bags of candidates."""
    bags = [ids[offsets[user] : offsets[user + 1]] for user in user_of.tolist()]
    lengths = offsets.diff()[user_of]
    return torch.cat(bags), torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
