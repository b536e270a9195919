"""The guidance scale as an input of the model, for guidance-distilled UNets (LCM)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def guidance_embedding(scales: Sequence[float], width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Embed R guidance scales as `(R, width)`, like `StableDiffusionPipeline.get_guidance_scale_embedding` of w - 1.

    Source: Meng et al., On Distillation of Guided Diffusion Models (arXiv 2210.03142).
    """
    half = width // 2
    steps = torch.log(torch.tensor(10000.0, device=device)) / (half - 1)
    frequencies = torch.exp(torch.arange(half, dtype=torch.float32, device=device) * -steps)
    strengths = torch.tensor([scale - 1 for scale in scales], dtype=torch.float32, device=device) * 1000.0
    angles = strengths[:, None] * frequencies[None, :]
    embedded = torch.cat([torch.sin(angles), torch.cos(angles)], dim=1)
    return torch.nn.functional.pad(embedded, (0, width - 2 * half)).to(dtype)
