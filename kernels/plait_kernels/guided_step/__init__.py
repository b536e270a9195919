"""Guidance and a scheduler's update in one pass: the operator's interface. `reference.guided_step` defines it.

`x' = a * x + b * (u + s * (c - u))`, per image: u and c are the model's outputs without and with the prompt, s the
guidance scale (Ho & Salimans, Classifier-Free Diffusion Guidance, arXiv 2207.12598). Schedulers that are linear in
x and the predicted noise are a choice of a and b: `ddim` (Song et al., arXiv 2010.02502, eq. 12 with sigma 0) and
`euler` (Karras et al., arXiv 2206.00364, algorithm 1 without its correction), both for models that predict noise.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch


class GuidedStepOp(Protocol):
    """`(2N, ...), (N, ...) -> (N, ...)`, computed in fp32 and rounded once."""

    def __call__(
        self, output: torch.Tensor, latents: torch.Tensor, scale: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """Return the next latents, a new contiguous tensor of `latents`' dtype.

        `output (2N, ...)`, the N unconditional rows first; `scale`, `a`, `b` `fp32 (N,)`. Raises ValueError for shapes
        that do not fit.
        """


def ddim(alpha: float, alpha_next: float) -> tuple[float, float]:
    """Return DDIM's a and b from the cumulative alphas of this step and the next."""
    a = math.sqrt(alpha_next / alpha)
    return a, math.sqrt(1.0 - alpha_next) - a * math.sqrt(1.0 - alpha)


def euler(sigma: float, sigma_next: float) -> tuple[float, float]:
    """Return Euler's a and b from the noise levels of this step and the next."""
    return 1.0, sigma_next - sigma


def check_step(output: torch.Tensor, latents: torch.Tensor, *per_image: torch.Tensor) -> None:
    """Raise ValueError for shapes that do not fit."""
    n = latents.shape[0]
    if output.shape != (2 * n, *latents.shape[1:]):
        raise ValueError(f"output {tuple(output.shape)} is not twice the latents' {tuple(latents.shape)}")
    for tensor in per_image:
        if tensor.shape != (n,):
            raise ValueError(f"{n} images need {n} numbers each, not {tuple(tensor.shape)}")
