"""Pooled lookups in a table that no cache holds: int8 rows, beside float32 rows (`eager`) and fbgemm's int8 rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from plait_bench.errors import SystemUnavailable
from plait_bench.kernels.cases import Arguments, Form, OperatorCase
from plait_kernels.int8_lookup import SCALE_AND_BIAS_BYTES, Int8LookupOp
from plait_kernels.registry import load

__all__ = ["lookup_cases"]

FBGEMM = "fbgemm"
_ROWS, _WIDTH = 4_000_000, 64  # 1 GB of float32, 288 MB of int8
_BLOCK_ROWS = 65_536
_SIZES = ((64, 20), (512, 80), (2048, 40))  # (bags, ids in each): RM3, RM1's, and a batch of many


def lookup_cases() -> list[OperatorCase]:
    """Return the cases; their tables are made when the first is opened."""
    return [_lookup(bags, ids) for bags, ids in _SIZES]


def _lookup(bags: int, ids: int) -> OperatorCase:
    stored = _WIDTH + SCALE_AND_BIAS_BYTES
    return OperatorCase(
        name=f"int8-lookup-{bags}x{ids}",
        op="int8_lookup",
        moved=(bags * ids * (stored + 8) + 4 * bags * _WIDTH) // 4,
        make=lambda *_: _arguments(bags, ids),
        plait=_int8,
        eager=_float32,
        others={FBGEMM: _fbgemm},
        compiles=False,
    )


def _arguments(bags: int, ids: int) -> Arguments:
    return torch.randint(_ROWS, (bags * ids,)), torch.arange(0, bags * ids + 1, ids)


@lru_cache(maxsize=1)
def _table() -> torch.Tensor:
    """Return the rows as float32. The first are drawn, then repeated."""
    block = torch.empty(_BLOCK_ROWS, _WIDTH).uniform_(-1, 1)
    return block.repeat(-(-_ROWS // _BLOCK_ROWS), 1)[:_ROWS]


@lru_cache(maxsize=1)
def _stored() -> torch.Tensor:
    """Return the same rows as int8 with scale and bias."""
    parts = [torch.ops.quantized.embedding_bag_byte_prepack(part) for part in torch.split(_table(), _BLOCK_ROWS)]
    return torch.cat(parts)


def _int8(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    op: Int8LookupOp = load("int8_lookup", "cpu", torch.float32)
    return op(_stored(), ids, offsets)


def _float32(ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    pooled: torch.Tensor = torch.embedding_bag(_table(), ids, offsets, False, 0, False, None, True)[0]
    return pooled


@lru_cache(maxsize=1)
def _fbgemm() -> Form:
    """Return fbgemm's inference operator over the same rows; its scale and bias are float16.

    Raises `SystemUnavailable`: it is no dependency; `pip install --no-deps fbgemm-gpu-cpu` of torch's version adds it.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
    except (ImportError, OSError) as error:
        raise SystemUnavailable(f"{FBGEMM}: {error}") from error
    made: Any = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("table", _ROWS, _WIDTH, SparseType.INT8, EmbeddingLocation.HOST)],
        device="cpu", pooling_mode=PoolingMode.SUM, output_dtype=SparseType.FP32, row_alignment=1,
    )  # fmt: skip
    made.initialize_weights()
    ((rows, scales),) = made.split_embedding_weights()
    stored = _stored()
    rows.copy_(stored[:, :_WIDTH])
    scales.copy_(stored[:, _WIDTH:].contiguous().view(torch.float32).half().view(torch.uint8))
    form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda ids, offsets: made(ids.int(), offsets.int())  # noqa: E731
    return form
