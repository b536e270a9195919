"""The interfaces of ranking: who answers requests, and the two halves of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from plait_disagg.graph.program import Port
from plait_disagg.tables.values import Table
from plait_disagg.values import ModelCard, RankAnswer, RankRequest

if TYPE_CHECKING:
    import torch  # see `values`


class Ranker(Protocol):
    """Ranks candidates with one model. All methods may be called concurrently from many tasks of one event loop."""

    @property
    def card(self) -> ModelCard:
        """What the model takes and returns. Raises `WorkerUnavailable` until a worker in another process has reported
        it."""

    async def rank(self, request: RankRequest) -> RankAnswer:
        """Rank the candidates. Raises `RankError`, `DeadlinePassed` at the deadline whatever a worker does. Cancelling
        the task abandons the request."""

    async def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""

    def metrics(self) -> Mapping[str, float]:
        """Return counters and gauges by name."""

    async def close(self, *, drain_s: float) -> None:
        """Reject new requests and give the accepted ones `drain_s`. Idempotent."""


class ItemStore(Protocol):
    """The item-side inputs of a package's items; an item's id is its row. Thread-safe."""

    def __len__(self) -> int:
        """Return the number of items: ids are 0 to this minus 1."""

    def gather(self, ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the item-side tensors of `tensor_names` for `ids` (N,) int64, all of them known.

        One row per id in their order, as `RankRequest` requires.
        """

    def names(self, ids: Sequence[int]) -> Sequence[str] | None:
        """Return the display names of these items, or None if the package has none."""


class SparseHalf(Protocol):
    """The CN side: id processing, table lookups, whatever the cut leaves there. Not thread-safe: one thread owns it.

    Some of its crossing tensors may be bare rows of tables. It can make their ids instead, so that rows that the HN
    already has need not be sent.
    """

    @property
    def row_ports(self) -> Mapping[str, Table]:
        """The crossing tensors that are rows, with their tables; often none."""

    def run(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """Return the tensors that cross, of all requests as one batch in their order.

        User-side tensors have a row per request, item-side ones a row per candidate. Raises `BadInput` (only for
        what `check_request` cannot see).
        """

    def run_ids(self, requests: Sequence[RankRequest]) -> Mapping[str, torch.Tensor]:
        """Run like `run`, but with ids in place of each of `row_ports`.

        They are int64, of the rows' shape without its last dimension, each one inside the table.
        """

    def rows(self, table: str, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows (k, D) float32 of distinct `ids` (k,) int64 of a table of `row_ports`."""


class DenseHalf(Protocol):
    """The HN side. Not thread-safe: one thread owns it."""

    @property
    def crossing(self) -> Sequence[Port]:
        """What it takes. An update does not change it."""

    def run(self, crossing: Mapping[str, torch.Tensor], candidates: Sequence[int]) -> Mapping[str, torch.Tensor]:
        """Return the outputs by name, (sum of candidates, ...) float32, from the crossing tensors of a batch."""

    def metrics(self) -> Mapping[str, float]:
        """Return counters by name, of this half and of those that it has replaced."""
