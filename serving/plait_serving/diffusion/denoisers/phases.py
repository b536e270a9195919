"""Nearest-neighbour doubling with a 3x3 convolution behind it, computed from the small image: 4/9 of the products.

A pixel of the doubled image has one of four places in its 2x2 block, and a 3x3 window around it sees 2x2 small pixels,
some of them twice. So each place has a 2x2 kernel, the sums of the 3x3 kernel's weights that fall on the same small
pixel. In the VAE's decoder of Stable Diffusion doubling takes 28 % of the products.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.models.upsampling import Upsample2D
from torch import nn

__all__ = ["PhasedUpsample", "phased"]

_ON_SMALL = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
"""`[place, small pixel, weight]`: which of a kernel's three weights fall on which of the two small pixels."""


class PhasedUpsample(nn.Module):
    """Computes what an `Upsample2D` with a 3x3 convolution does, `(R, in, h, w)` to `(R, out, 2 h, 2 w)`."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        kernels = torch.einsum("apk,bql,oikl->aboipq", _ON_SMALL, _ON_SMALL, conv.weight.detach().float())
        self.width = conv.out_channels
        self.conv = nn.Conv2d(conv.in_channels, 4 * self.width, 2, padding=1)
        self.conv.weight.data = kernels.flatten(0, 2)
        bias = torch.zeros(self.width) if conv.bias is None else conv.bias.detach().float()
        self.conv.bias = nn.Parameter(bias.repeat(4))
        self.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        """Convolve the small image once for all places, and put each place's pixels where they belong."""
        rows, (high, wide) = len(x), x.shape[2:]
        every = self.conv(x)  # one more row and column than x has: places see different pixels
        places = [
            every[:, (2 * a + b) * self.width : (2 * a + b + 1) * self.width, a : a + high, b : b + wide]
            for a in range(2)
            for b in range(2)
        ]
        blocks = torch.cat(places, dim=1).reshape(rows, 2, 2, self.width, high, wide)
        return blocks.permute(0, 3, 4, 1, 5, 2).reshape(rows, self.width, 2 * high, 2 * wide)


def phased(module: Any) -> Any:
    """Return a copy of a module, sharing its weights, whose `Upsample2D`s are computed by phases."""
    if isinstance(module, Upsample2D):
        return PhasedUpsample(module.conv) if _is_plain(module) else module
    if not module._modules:
        return module
    clone = copy.copy(module)
    clone.__dict__["_modules"] = {
        name: None if part is None else phased(part) for name, part in module._modules.items()
    }
    return clone


def _is_plain(upsample: Any) -> bool:
    """Return whether it doubles by nearest neighbours and convolves 3x3 over zeros, and does nothing else."""
    conv = getattr(upsample, "conv", None)
    return (
        isinstance(conv, nn.Conv2d)
        and upsample.interpolate
        and upsample.use_conv
        and upsample.norm is None
        and (conv.kernel_size, conv.stride, conv.padding) == ((3, 3), (1, 1), (1, 1))
        and (conv.dilation, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros")
    )
