"""Pooled lookup in a table of int8 rows: the operator's interface. `reference.int8_lookup` is its definition.

Symbols: N rows of a table, D width, n ids, B bags. A stored row is D bytes q, then its float32 scale, then its float32
bias: D + 8 bytes, "fused 8-bit row-wise" of Caffe2 and PyTorch (`torch.ops.quantized.embedding_bag_byte_prepack`).
"""

from __future__ import annotations

from typing import Protocol

import torch

SCALE_AND_BIAS_BYTES = 8
"""What a stored row has beside its values: two float32."""


class Int8LookupOp(Protocol):
    """`pooled[b] = sum over k in bag b of w_k * (scale[i_k] * q[i_k] + bias[i_k])`, in float32."""

    def __call__(
        self, table: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `float32 (B, D)`, zeros for an empty bag.

        `table` uint8 (N, D + 8), contiguous; `ids` int64 (n,) inside it; `offsets` int64 (B + 1,) from 0 to n, not
        falling; `weights` float32 (n,), None: ones. Nothing is checked: who looks up has done that.
        """
