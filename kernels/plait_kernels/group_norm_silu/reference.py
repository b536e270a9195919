"""The definition of GroupNorm + SiLU: torch's own, in fp32."""

from __future__ import annotations

import torch
from torch.nn import functional

from plait_kernels.group_norm_silu import check_shapes, is_channels_last


def group_norm_silu(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    addend: torch.Tensor | None = None,
    silu: bool = True,
) -> torch.Tensor:
    """Compute `silu(group_norm(x + addend))`; see `GroupNormSiluOp`. fp64 is computed in fp64 (the truth in tests)."""
    check_shapes(x, groups, weight, bias, addend)
    wide = torch.promote_types(x.dtype, torch.float32)
    v = x.to(wide).contiguous()  # of channels-last values far from zero torch's CPU kernel loses the variance
    if addend is not None:
        v = v + addend.to(wide)[:, :, None, None]
    if v.numel():
        v = torch.group_norm(v, groups, weight.to(wide), bias.to(wide), eps)
    y = (functional.silu(v) if silu else v).to(x.dtype)
    return y.contiguous(memory_format=torch.channels_last if is_channels_last(x) else torch.contiguous_format)
