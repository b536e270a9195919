"""What an update changes in one worker, checked and ready: taking it on between two batches can not fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from plait_disagg.protocols import DenseHalf, SparseHalf
from plait_disagg.tables.writing import touch_pages, write_rows

__all__ = ["KEPT", "PreparedUpdate", "Refreshable", "RowWrite"]

KEPT = 2
"""Dense versions that an HN holds, besides one that is being prepared: CNs change over one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWrite:
    """New rows of one matrix; see `plait_disagg.tables.writing`."""

    matrix: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """``dense_version`` is that of the last update which changed the dense half. ``sparse``, ``dense``: the halves
    with their new weights; None: as before (or not of this worker). ``row_ids``: by table, (k,) int64, the rows that
    `write` changes."""

    version: str
    dense_version: str
    writes: tuple[RowWrite, ...] = ()
    row_ids: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sparse: SparseHalf | None = None
    dense: DenseHalf | None = None

    def touch(self) -> None:
        """Makes `write` quick. Lookups may go on meanwhile."""
        for one in self.writes:
            touch_pages(one.matrix, one.ids)

    def write(self) -> None:
        """Writes the rows. No lookup may run meanwhile."""
        for one in self.writes:
            write_rows(one.matrix, one.ids, one.rows)


class Refreshable(Protocol):
    """What can be refreshed while it serves. One thread at a time calls these; batches run meanwhile."""

    def prepare(self, change: PreparedUpdate) -> None:
        """Others may ask for the change's dense version from now on; all that was served is served still. An earlier
        change that was prepared and not taken on is forgotten."""

    def apply_update(self, change: PreparedUpdate) -> None:
        """From some moment before this returns, every request is answered by the change's version alone."""
