"""The definition of a guided step: the formula."""

from __future__ import annotations

import torch

from plait_kernels.guided_step import check_step


def guided_step(
    output: torch.Tensor, latents: torch.Tensor, scale: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Compute `a * x + b * (u + s * (c - u))`; see `GuidedStepOp`. fp64 latents are computed in fp64."""
    check_step(output, latents, scale, a, b)
    wide = torch.promote_types(latents.dtype, torch.float32)
    s, a, b = (value.to(wide).reshape(-1, *[1] * (latents.ndim - 1)) for value in (scale, a, b))
    unconditional, conditional = output.to(wide).chunk(2)
    noise = unconditional + s * (conditional - unconditional)
    return (a * latents.to(wide) + b * noise).to(latents.dtype).contiguous()
