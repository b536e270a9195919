"""The naive counterpart of `FusedTables`: a float tensor per table and a call of torch's own function per request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from plait_disagg.tables.ids import ids_in_range
from plait_disagg.tables.protocols import LookupRequest
from plait_disagg.tables.values import OutOfRange, Table


class SeparateTables:
    """The `Tables` over separate tensors. `weights`: (rows, D) float32 by table name."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], out_of_range: OutOfRange | Mapping[str, OutOfRange] = "error"
    ) -> None:
        self._weights = weights
        self._tables = {
            name: Table(
                name=name,
                rows=weight.shape[0],
                dim=weight.shape[1],
                out_of_range=out_of_range if isinstance(out_of_range, str) else out_of_range.get(name, "error"),
            )
            for name, weight in weights.items()
        }

    def lookup(self, requests: Sequence[LookupRequest]) -> list[torch.Tensor]:
        """Look up rows with one torch call per request."""
        return [self._one(request) for request in requests]

    def _one(self, request: LookupRequest) -> torch.Tensor:
        name = request.table
        ids = torch.from_numpy(ids_in_range(request.ids.long().numpy(), self._tables[name]))
        if request.mode == "rows":
            return F.embedding(ids, self._weights[name])
        return F.embedding_bag(
            ids,
            self._weights[name],
            request.offsets,
            mode=request.mode,
            per_sample_weights=request.weights,
            include_last_offset=True,
        )
