"""Convolutions over weights that are packed for oneDNN once instead of in every call.

On a CPU, torch reorders a convolution's weights on each call; with few rows of a small UNet that is a third of the
work. A packed copy is made when a layer is first used and again when its weight was written to (torch counts
writes), so a LoRA merge takes effect at once, and one that leaves a layer alone costs it nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import functional as F

_log = logging.getLogger(__name__)


class Convolutions:
    """Computes `layer(x)`, up to rounding, as `convolutions(layer, x)`. Compute thread only."""

    def __init__(self, module: Any, *, limit_bytes: int) -> None:
        """Pack a module's fp32 convolutions on the CPU if their copies fit `limit_bytes`; else call the layers."""
        layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.Conv2d)]
        needed_bytes = sum(layer.weight.nbytes for layer in layers)
        self._packs = all(map(_can_pack, layers)) and needed_bytes <= limit_bytes and packing_works()
        self._packed: dict[int, tuple[int, torch.Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes held by packed copies (padding of odd channel counts not counted)."""
        return sum(packed.numel() * packed.element_size() for _, packed in self._packed.values())

    def __call__(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the convolution of `x (R, C, h, w)` with the layer's current weight."""
        if not self._packs or layer.padding_mode != "zeros":
            plain: torch.Tensor = layer(x)
            return plain
        version = layer.weight._version
        known = self._packed.get(id(layer))
        if known is None or known[0] != version:
            known = (version, _pack(layer.weight, layer, x))
            self._packed[id(layer)] = known
        return _convolve(layer, x, known[1])


def _can_pack(layer: torch.nn.Conv2d) -> bool:
    """Return whether it is fp32 on the CPU, and not made in inference mode: such tensors do not count writes."""
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_inference()


def packing_works() -> bool:
    """Return whether this build of torch has oneDNN's packed convolution and it computes what `conv2d` does."""
    layer = torch.nn.Conv2d(3, 5, 3, padding=1, stride=2)
    x = torch.linspace(-1.0, 1.0, 2 * 3 * 6 * 6).view(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    try:
        with torch.inference_mode():
            packed = _convolve(layer, x, _pack(layer.weight.detach(), layer, x))
            return torch.allclose(packed, F.conv2d(x, layer.weight, layer.bias, stride=2, padding=1), atol=1e-5)
    except (RuntimeError, AttributeError, TypeError) as error:
        _log.info("convolution weights are not packed: %s", error)
        return False


def _pack(weight: torch.Tensor, layer: Any, x: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(
        weight, list(layer.padding), list(layer.stride), list(layer.dilation), layer.groups, list(x.shape)
    )
    return packed


def _convolve(layer: Any, x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._convolution_pointwise(
        x,
        packed,
        layer.bias,
        list(layer.padding),
        list(layer.stride),
        list(layer.dilation),
        layer.groups,
        "none",
        [],
        "",
    )
    return result
