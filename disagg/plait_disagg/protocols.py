"""The seams of ranking: who answers requests, and the two halves of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from plait_disagg.tables.values import Table
from plait_disagg.values import ModelCard, RankAnswer, RankRequest

if TYPE_CHECKING:
    import torch  # see `values`

__all__ = ["DenseHalf", "ItemStore", "Ranker", "RowSource", "SparseHalf"]


class Ranker(Protocol):
    """Ranks candidates of one model. All methods may be called from many tasks of one event loop at once."""

    @property
    def card(self) -> ModelCard:
        """What the model takes and gives. Raises `Unavailable` until a worker in another process has said it once."""

    async def rank(self, request: RankRequest) -> RankAnswer:
        """Raises `RankError`. Cancelling the task gives the request up."""

    async def ready(self) -> str | None:
        """None when a request would be answered now; else what is missing."""

    def metrics(self) -> Mapping[str, float]:
        """Counters and gauges by name."""

    async def close(self, *, drain_s: float) -> None:
        """Refuses new requests, gives the accepted ones ``drain_s``. Idempotent."""


class ItemStore(Protocol):
    """The item-side inputs of the items that a package knows; an item's id is its row. Many threads may use it."""

    def __len__(self) -> int:
        """How many items there are: ids are 0 to this minus 1."""

    def gather(self, ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """``ids (N,)`` int64, each of them known, to the item-side tensors of `tensor_names`, a row per id in their
        order, as `RankRequest` wants them."""

    def names(self, ids: Sequence[int]) -> Sequence[str] | None:
        """What people call these items; None if the package does not say."""


class SparseHalf(Protocol):
    """The CN side: id processing, table lookups, whatever the cut leaves there. Not thread-safe: one thread owns it."""

    def run(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """The tensors that cross, of all requests as one batch in their order: user-side ones with a row per request,
        item-side ones with a row per candidate. Raises `BadInput` (only for what `check_request` can not see)."""


@runtime_checkable
class RowSource(Protocol):
    """What a `SparseHalf` can be besides: some of its crossing tensors are bare rows of tables, and it can make their
    ids instead, so that rows that the HN has already need not be sent. Owned by the same thread."""

    @property
    def row_ports(self) -> Mapping[str, Table]:
        """The crossing tensors that are rows, and of which table; often none."""

    def run_ids(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """As `SparseHalf.run`, with the ids of the rows in the place of each of `row_ports`: int64, of the rows' shape
        without its last dimension, each one inside the table."""

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows (k, D) float32 of distinct ``ids`` (k,) int64 of a table of `row_ports`."""


class DenseHalf(Protocol):
    """The HN side. Not thread-safe: one thread owns it."""

    def run(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Outputs by name, (sum of candidates, ...) float32, from the crossing tensors of a batch."""
