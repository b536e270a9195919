"""The tables of one process: one lookup for all bags of a group.

Tables of equal width and format are slices of one matrix. All requests of a group and mode become one
`embedding_bag`: their ids are laid end to end and shifted by their slice's first row. What a call per table costs in
Python and in dispatch is paid once, and the kernel's threads share all bags. So everything here works on all
requests at once; a loop over the requests that does more than pick up a tensor would cost what the fusion saves.
Results equal those of separate calls (`reference.SeparateTables`) bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from plait_disagg.tables.formats import pool, take
from plait_disagg.tables.ids import Ids, ids_in_range
from plait_disagg.tables.protocols import LookupBags, LookupRequest
from plait_disagg.tables.storage import TableSet
from plait_disagg.tables.values import Mode, Table, TableGroup

_MAX_PLANS = 64
"""The number of distinct sequences of lookups that are remembered. A model uses one or two."""

_MAX_KEPT_NUMBERS = 1 << 20
"""The max ids and offsets, 8 bytes each, in the layouts that a batch remembers. If the number of ids per row is
fixed, there are few layouts."""

_LAYOUT_NUMBERS = 512
"""The size of a layout apart from its ids and offsets, in the same unit."""


@dataclass(frozen=True, slots=True, eq=False)
class _FusedLayout:
    """What follows from the number of ids and offsets of each part: n ids and m offsets in all, end to end, ids
    first. A request has `parts` of them, one after the other.

    `starts`: where the ids of the parts `some`, which have any, start; `rows`: rows of their tables. `ends`: where
    the first and last offsets of every part are, whose bytes must be `expected`. `shift` (n + m,): what turns ids into
    rows of the matrix and offsets into those of all ids. `kept`: all offsets but the last of each part, and the very
    last. `bags`: by request.
    """

    parts: int

    ids: int
    some: Ids
    starts: Ids
    rows: NDArray[np.uint64]
    ends: Ids
    expected: bytes
    shift: Ids
    kept: Ids
    bags: list[int]


@dataclass(slots=True, eq=False)
class _LookupBatch:
    """Requests that form one lookup: their positions and, for each, the table, its rows and its first row in the
    matrix. Layouts of at most `max_numbers` ids and offsets are remembered."""

    positions: tuple[int, ...]
    group: TableGroup
    mode: Mode
    tables: tuple[Table, ...]
    rows: NDArray[np.uint64]
    first: Ids
    max_numbers: int
    layouts: dict[tuple[int, ...], _FusedLayout] = field(default_factory=dict)
    kept_numbers: int = 0

    def layout(self, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> _FusedLayout:
        """Return the layout for parts of `sizes` ids and `lengths` offsets (none in mode rows)."""
        key = sizes + lengths
        found = self.layouts.get(key)
        if found is None:
            found = _make_layout(self, np.array(sizes), np.array(lengths, dtype=np.int64))
            self.kept_numbers += sum(key) + _LAYOUT_NUMBERS
            if self.kept_numbers > self.max_numbers:
                self.layouts.clear()
                self.kept_numbers = 0
            else:
                self.layouts[key] = found
        return found


class FusedTables:
    """The `Tables` of one process, fused over a `TableSet`."""

    def __init__(self, stored: TableSet, *, max_plans: int = _MAX_PLANS, max_numbers: int = _MAX_KEPT_NUMBERS) -> None:
        """Remember at most `max_plans` sequences of lookups, and layouts of at most `max_numbers` ids and offsets for
        each batch of one."""
        self._stored = stored
        self._max_plans, self._max_numbers = max_plans, max_numbers
        self._places = stored.places
        self._plans: dict[tuple[tuple[str, Mode], ...], tuple[_LookupBatch, ...]] = {}
        """The batches of a sequence of tables and modes."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that can be looked up."""
        return self._stored.tables

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows with one kernel call per group and mode.

        Raises ValueError for a request that no checked request makes: an unknown table, offsets that do not fit the
        ids.
        """
        found: dict[int, torch.Tensor] = {}
        for batch in self._plan(requests):
            some = [requests[position] for position in batch.positions]
            if batch.mode == "rows":
                values = self._rows(some, batch)
            else:
                ids, offsets = [one.ids for one in some], [_offsets(one) for one in some]
                values = self._pooled(ids, offsets, _weights(some, batch), some, batch)
            if len(values) == len(requests):
                return values
            found.update(zip(batch.positions, values, strict=True))
        return [found[position] for position in range(len(requests))]

    def lookup_bags(self, requests: Sequence[LookupBags]) -> list[torch.Tensor]:
        """Pool as `lookup` does for the same bags joined, but where they lie: they are laid end to end only once. All
        have parts of the same requests."""
        found: dict[int, torch.Tensor] = {}
        for batch in self._plan(requests):
            some = [requests[position] for position in batch.positions]
            ids = [part for one in some for part in one.ids]
            offsets = [part for one in some for part in one.offsets]
            found.update(zip(batch.positions, self._pooled(ids, offsets, None, some, batch), strict=True))
        return [found[position] for position in range(len(requests))]

    def _plan(self, requests: Sequence[LookupRequest | LookupBags]) -> tuple[_LookupBatch, ...]:
        asked = tuple([(request.table, request.mode) for request in requests])
        plan = self._plans.get(asked)
        if plan is None:
            if len(self._plans) >= self._max_plans:
                self._plans.clear()
            plan = self._plans[asked] = self._batches(asked)
        return plan

    def _batches(self, asked: Sequence[tuple[str, Mode]]) -> tuple[_LookupBatch, ...]:
        together: dict[tuple[str, Mode], list[int]] = {}
        for position, (table, mode) in enumerate(asked):
            if table not in self._places:
                raise ValueError(f"there is no table {table}")
            together.setdefault((self._places[table].group.name, mode), []).append(position)
        batches = []
        for (_, mode), positions in together.items():
            places = [self._places[asked[position][0]] for position in positions]
            batches.append(
                _LookupBatch(
                    positions=tuple(positions),
                    group=places[0].group,
                    mode=mode,
                    tables=tuple(place.table for place in places),
                    rows=np.array([place.table.rows for place in places], dtype=np.uint64),
                    first=np.array([place.first for place in places], dtype=np.int64),
                    max_numbers=self._max_numbers,
                )
            )
        return tuple(batches)

    def _rows(self, requests: Sequence[LookupRequest], batch: _LookupBatch) -> list[torch.Tensor]:
        """Gather the rows of a batch at once; the results are views of the gathered rows."""
        parts = [request.ids if request.ids.dim() == 1 else request.ids.reshape(-1) for request in requests]
        sizes = tuple([part.numel() for part in parts])
        ids = _laid_out(parts, requests, batch, batch.layout(sizes, ()))
        gathered = take(self._stored.matrices[batch.group.name], batch.group.format, torch.from_numpy(ids))
        return [
            part if request.ids.dim() == 1 else part.view(*request.ids.shape, batch.group.dim)
            for part, request in zip(gathered.split_with_sizes(list(sizes)), requests, strict=True)
        ]

    def _pooled(
        self,
        ids: list[torch.Tensor],
        offsets: list[torch.Tensor],
        weights: torch.Tensor | None,
        requests: Sequence[LookupRequest | LookupBags],
        batch: _LookupBatch,
    ) -> list[torch.Tensor]:
        """Pool the bags of a batch at once; the results are views of the pooled rows."""
        lengths = tuple([part.numel() for part in offsets])
        if 0 in lengths:
            raise ValueError(f"table {requests[0].table} or its like: bags without offsets")
        layout = batch.layout(tuple([part.numel() for part in ids]), lengths)
        flat = _laid_out(ids + offsets, requests, batch, layout)
        pooled = pool(
            self._stored.matrices[batch.group.name],
            batch.group.format,
            torch.from_numpy(flat[: layout.ids]),
            torch.from_numpy(_fused_offsets(flat, requests, layout)),
            mode=batch.mode,
            weights=weights,
        )
        return list(pooled.split_with_sizes(layout.bags))


def _make_layout(batch: _LookupBatch, sizes: Ids, lengths: Ids) -> _FusedLayout:
    before = sizes.cumsum() - sizes
    ids = int(sizes.sum())
    some = np.flatnonzero(sizes)
    ends = ids + lengths.cumsum()
    parts = sizes.size // batch.rows.size
    is_kept = np.ones(int(lengths.sum()), dtype=bool)
    is_kept[ends[:-1] - 1 - ids] = False
    return _FusedLayout(
        parts=parts,
        ids=ids,
        some=some,
        starts=before[some],
        rows=batch.rows[some // parts],
        ends=np.concatenate([ends - lengths, ends - 1]),
        expected=np.concatenate([np.zeros_like(lengths), sizes[: lengths.size]]).tobytes(),
        shift=np.concatenate([batch.first.repeat(parts).repeat(sizes), before[: lengths.size].repeat(lengths)]),
        kept=ids + np.flatnonzero(is_kept),
        bags=(lengths - 1).reshape(-1, parts).sum(axis=1).tolist(),
    )


def _laid_out(
    parts: list[torch.Tensor],
    requests: Sequence[LookupRequest | LookupBags],
    batch: _LookupBatch,
    layout: _FusedLayout,
) -> Ids:
    """Return ids as rows of the group's matrix, each by its table's policy, followed by offsets.

    Raises `BadId`, ValueError.
    """
    flat = torch.cat(parts)
    if flat.dtype is not torch.int64:
        if flat.dtype is not torch.int32:
            raise ValueError(f"table {requests[0].table} or its like: ids must be int64 or int32, not {flat.dtype}")
        flat = flat.long()
    numbers: Ids = flat.numpy()
    if numbers[layout.ends].tobytes() != layout.expected:
        names = ", ".join(request.table for request in requests)
        raise ValueError(f"tables {names}: offsets must go from 0 to the number of ids")
    if layout.ids:
        # As an unsigned number a negative id is huge, so that one comparison of the largest finds both kinds.
        ids = numbers[: layout.ids]
        is_outside = np.maximum.reduceat(ids.view(np.uint64), layout.starts) >= layout.rows
        if np.count_nonzero(is_outside):
            _bring_in_range(ids, batch, layout, is_outside)
    numbers += layout.shift
    return numbers


def _fused_offsets(flat: Ids, requests: Sequence[LookupRequest | LookupBags], layout: _FusedLayout) -> Ids:
    """Return the offsets of all bags.

    Decreasing ones are rejected even if already checked: the kernel would read beyond the ids.
    """
    offsets: Ids = flat[layout.kept]
    if np.count_nonzero(offsets[1:] < offsets[:-1]):
        names = ", ".join(request.table for request in requests)
        raise ValueError(f"tables {names}: offsets must not fall")
    return offsets


def _bring_in_range(ids: Ids, batch: _LookupBatch, layout: _FusedLayout, is_outside: NDArray[np.bool_]) -> None:
    """Apply the policies in place, to the parts that need it. Raises `BadId`."""
    stops = np.append(layout.starts[1:], ids.size)
    for place in np.flatnonzero(is_outside):
        part = ids[layout.starts[place] : stops[place]]
        part[:] = ids_in_range(part, batch.tables[layout.some[place] // layout.parts])


def _offsets(request: LookupRequest) -> torch.Tensor:
    offsets = request.offsets
    if offsets is None or not offsets.numel():
        raise ValueError(f"table {request.table}: pooling needs offsets, one more than there are bags")
    return offsets


def _weights(requests: Sequence[LookupRequest], batch: _LookupBatch) -> torch.Tensor | None:
    """Return all weights end to end, with ones for a request that has none, or None if no request has any."""
    given = [request.weights for request in requests]
    if given.count(None) == len(requests):
        return None
    parts = [torch.ones(request.ids.numel()) if request.weights is None else request.weights for request in requests]
    for request, weights in zip(requests, parts, strict=True):
        if batch.mode != "sum" or weights.shape != request.ids.shape or weights.dtype != torch.float32:
            raise ValueError(f"table {request.table}: weights must be one float32 per id, with mode sum")
    return torch.cat(parts)
