"""Residuals of up to four ControlNets in one pass: k + 1 reads and a write, where one by one takes 5 k moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from plait_kernels.residual_add import check_residuals

_BLOCK = 2048
_MAX = 4


def residual_add_(skip: torch.Tensor, residuals: Sequence[torch.Tensor]) -> None:
    """Compute `skip += sum_i r_i`; see `ResidualAddOp`. On a GPU, or a CPU under Triton's interpreter.

    Raises ValueError for more than four residuals.
    """
    check_residuals(skip, residuals)
    if len(residuals) > _MAX:
        raise ValueError(f"this form takes up to {_MAX} residuals, not {len(residuals)}")
    if not residuals or not skip.numel():
        return
    dense = skip if _has_dense_rows(skip) else skip.contiguous()
    alike = [
        residual if residual.stride() == dense.stride() else _laid_out_like(residual, dense) for residual in residuals
    ]
    padded = [*alike, *alike[:1] * (_MAX - len(alike))]
    rows, size = skip.shape[0], skip.numel() // skip.shape[0]
    _add[triton.cdiv(size, _BLOCK), rows](dense, *padded, size, dense.stride(0), COUNT=len(alike), BLOCK=_BLOCK)
    if dense is not skip:
        skip.copy_(dense)


def trial(device: str, dtype: torch.dtype) -> None:
    """Compile and run it once on small tensors. Raises what Triton, its compiler or the device raise."""
    skip = torch.zeros(2, 32, device=device, dtype=dtype)
    residual_add_(skip, [skip.clone()])
    skip.cpu()  # the copy waits for the kernel


def _has_dense_rows(tensor: torch.Tensor) -> bool:
    """Return whether each row is one run of memory, in whatever order."""
    row = tensor[0]
    return row.is_contiguous() or (tensor.ndim == 4 and row.permute(1, 2, 0).is_contiguous())


def _laid_out_like(residual: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """Return a copy whose elements lie as the skip's do, with the skip's distance between rows."""
    copy = torch.empty_strided(skip.shape, skip.stride(), dtype=residual.dtype, device=residual.device)
    return copy.copy_(residual)


@triton.jit
def _add(skip, r0, r1, r2, r3, size, stride, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    at = row.to(tl.int64) * stride + i
    total = tl.load(skip + at, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(r0 + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(r1 + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(r2 + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT > 3:
        total += tl.load(r3 + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(skip + at, total.to(skip.dtype.element_ty), mask=inside)
