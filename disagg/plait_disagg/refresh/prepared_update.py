"""The changes that an update makes in one worker, checked and ready: applying them between two batches cannot fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from plait_disagg.protocols import DenseHalf, SparseHalf

KEPT = 2
"""The number of dense versions that an HN holds, besides one that is being prepared: CNs switch one after another."""


_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWrite:
    """New rows (k, columns) of a `TableSet`'s writable matrix, of its dtype: `rows[i]` is row `ids[i]` (k,) int64,
    distinct."""

    matrix: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor

    def write(self) -> None:
        """Write them. No lookup may run meanwhile."""
        self.matrix.index_copy_(0, self.ids, self.rows)

    def touch(self) -> None:
        """Copy the pages on which those rows begin and end into this process's memory, so that `write` need not wait.

        The kernel would otherwise copy them then (one or two microseconds each, and more where the file is not in
        memory). Lookups may run meanwhile, but no row may be written: a byte of each page is written back as it was
        read.
        """
        row_bytes = self.matrix.shape[1] * self.matrix.element_size()
        start = self.matrix.data_ptr()
        first = start + self.ids * row_bytes
        pages = torch.unique(torch.cat([first, first + (row_bytes - 1)]) // _PAGE_BYTES)
        places = (pages * _PAGE_BYTES - start).clamp_(min=0)
        flat = self.matrix.view(-1).view(torch.uint8)
        flat.index_copy_(0, places, flat.index_select(0, places))


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """The prepared changes of an update.

    `dense_version` is that of the last update which changed the dense half. `sparse`, `dense`: the halves with their
    new weights; None: unchanged (or not of this worker). `row_ids`: by table, (k,) int64, the rows that `write`
    changes. `on_write`: what must change together with the rows, as which version of them shards are asked for.
    """

    version: str
    dense_version: str
    writes: tuple[RowWrite, ...] = ()
    row_ids: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sparse: SparseHalf | None = None
    dense: DenseHalf | None = None
    on_write: Callable[[], None] | None = None

    def touch(self) -> None:
        """Prefetch the pages so that `write` is quick. Lookups may run meanwhile."""
        for one in self.writes:
            one.touch()

    def write(self) -> None:
        """Write the rows. No lookup may run meanwhile."""
        for one in self.writes:
            one.write()
        if self.on_write is not None:
            self.on_write()


class Refreshable(Protocol):
    """What can be refreshed while it serves. One thread at a time calls these; batches run meanwhile."""

    def prepare(self, change: PreparedUpdate) -> None:
        """Make the change's dense version available from now on, beside all versions already served.

        An earlier change that was prepared but not applied is dropped.
        """

    def apply_update(self, change: PreparedUpdate) -> None:
        """Apply the change: from some moment before this returns, every request is answered by its version alone."""
