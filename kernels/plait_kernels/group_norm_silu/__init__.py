"""GroupNorm with what stands around it in a UNet: the operator's interface. `reference.group_norm_silu` defines it.

`y = act(w_c * (x + t - mean) / sqrt(var + eps) + b_c)`: mean and (biased) variance are taken over the C / G channels
of a group and all pixels of an image; t is an optional number per image and channel (ResnetBlock2D's time embedding);
act is SiLU, `v / (1 + exp(-v))`, or nothing. Sources: Wu & He, Group Normalization (arXiv 1803.08494); partial
statistics are joined as in Chan, Golub & LeVeque, Updating Formulae (1979).
"""

from __future__ import annotations

from typing import Protocol

import torch


class GroupNormSiluOp(Protocol):
    """`(N, C, H, W) -> (N, C, H, W)`, statistics and arithmetic in fp32, rounded once."""

    def __call__(
        self,
        x: torch.Tensor,
        groups: int,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        *,
        addend: torch.Tensor | None = None,
        silu: bool = True,
    ) -> torch.Tensor:
        """Return a new tensor of `x`'s dtype, channels-last if `x` is, else contiguous.

        `weight` and `bias` `(C,)`, `addend` `(N, C)`, any float dtype, on `x`'s device. Raises ValueError for shapes
        that do not fit.
        """


def check_shapes(
    x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, addend: torch.Tensor | None
) -> None:
    """Raise ValueError for shapes that the operator does not take."""
    if x.ndim != 4:
        raise ValueError(f"GroupNorm takes (N, C, H, W), not {tuple(x.shape)}")
    n, channels = x.shape[:2]
    if groups < 1 or channels % groups or not channels:
        raise ValueError(f"{channels} channels are not {groups} groups of one size")
    for name, tensor, shape in (
        ("weight", weight, (channels,)),
        ("bias", bias, (channels,)),
        ("addend", addend, (n, channels)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {shape}")


def is_channels_last(x: torch.Tensor) -> bool:
    """Return whether `x`'s memory is dense and channels-last, and not contiguous as well."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
