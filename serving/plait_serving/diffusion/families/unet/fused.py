"""diffusers' modules computed through the operators of `plait_kernels`: for GPUs, where memory traffic decides.

`fuse_` swaps the class of modules in place. Parameters, their addresses and names stay, so merges and state dicts do
not notice; a module of another configuration than the plain one stays as it is. Written after diffusers 0.42.1
`models/resnet.py`, `models/activations.py` and `models/transformers/transformer_2d.py` (Apache-2.0); a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from diffusers.models.activations import GEGLU
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn

from plait_kernels.geglu import GegluOp
from plait_kernels.group_norm_silu import GroupNormSiluOp, is_channels_last
from plait_kernels.registry import load


@dataclass(slots=True, eq=False)
class Fusion:
    """Whether a model's fused modules compute through operators, or as diffusers does; asked at every call."""

    enabled: bool = True
    modules: int = 0


def fuse_(model: nn.Module) -> Fusion:
    """Fuse a `UNet2DConditionModel` or `ControlNetModel` in eval mode (the operators have no gradients), in place;
    return its switch."""
    fusion = Fusion()
    for module in model.modules():
        if (kind := _fused_kind(module)) is not None:
            _swap(module, kind, fusion)
    norm: Any = getattr(model, "conv_norm_out", None)
    act: Any = getattr(model, "conv_act", None)
    if type(norm) is nn.GroupNorm and norm.affine and type(act) is nn.SiLU:
        _swap(norm, _NormAndSilu, fusion)
        _swap(act, _Nothing, fusion)
    return fusion


def _fused_kind(module: Any) -> type[nn.Module] | None:
    """Return what computes a module of a plain configuration; exact types only, because subclasses compute anew."""
    if type(module) is GEGLU:
        return _FusedGEGLU
    if type(module) is Transformer2DModel and module.is_input_continuous and module.norm.affine:
        return _FusedTransformer
    if type(module) is ResnetBlock2D and _is_plain(module):
        return _FusedResnet
    return None


def _is_plain(block: Any) -> bool:
    return (
        block.time_embedding_norm == "default"
        and block.time_emb_proj is not None
        and block.upsample is None
        and block.downsample is None
        and type(block.nonlinearity) is nn.SiLU
        and all(type(norm) is nn.GroupNorm and norm.affine for norm in (block.norm1, block.norm2))
    )


def _swap(module: nn.Module, kind: type[nn.Module], fusion: Fusion) -> None:
    module.__class__ = kind
    cast("Any", module).fusion = fusion
    fusion.modules += 1


def _normalised(
    norm: nn.GroupNorm, x: torch.Tensor, *, addend: torch.Tensor | None = None, silu: bool = True
) -> torch.Tensor:
    """Return `silu(norm(x + addend))` for `x (R, C, h, w)` and `addend (R, C)`."""
    op: GroupNormSiluOp = load("group_norm_silu", x.device.type, x.dtype)
    return op(x, norm.num_groups, norm.weight, norm.bias, norm.eps, addend=addend, silu=silu)


class _FusedGEGLU(GEGLU):  # type: ignore[misc]
    fusion: Fusion

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.fusion.enabled:
            return cast("torch.Tensor", super().forward(hidden_states, *args, **kwargs))
        x = self.proj(hidden_states)
        op: GegluOp = load("geglu", x.device.type, x.dtype)
        return op(x)


class _FusedResnet(ResnetBlock2D):  # type: ignore[misc]
    fusion: Fusion

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.fusion.enabled:
            return cast("torch.Tensor", super().forward(input_tensor, temb, *args, **kwargs))
        hidden = self.conv1(_normalised(self.norm1, input_tensor))
        time = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
        hidden = self.conv2(_normalised(self.norm2, hidden, addend=time))
        if self.conv_shortcut is not None:
            input_tensor = self.conv_shortcut(input_tensor)
        total: torch.Tensor = input_tensor + hidden
        return total if self.output_scale_factor == 1.0 else total / self.output_scale_factor


class _FusedTransformer(Transformer2DModel):  # type: ignore[misc]
    fusion: Fusion

    def _operate_on_continuous_inputs(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, int]:
        if not self.fusion.enabled:
            return cast("tuple[torch.Tensor, int]", super()._operate_on_continuous_inputs(hidden_states))
        x = _normalised(self.norm, hidden_states, silu=False)
        if not self.use_linear_projection:
            x = self.proj_in(x)
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
        width = int(x.shape[-1])
        return (self.proj_in(x) if self.use_linear_projection else x), width

    def _get_output_for_continuous_inputs(
        self, hidden_states: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """diffusers makes the rows contiguous as (R, c, h, w); where the skip is channels-last, they are already as it
        is, and both that copy and the one back before the next convolution are saved."""
        if not (self.fusion.enabled and is_channels_last(residual)):
            output = super()._get_output_for_continuous_inputs(hidden_states, residual, *args, **kwargs)
            return cast("torch.Tensor", output)
        if self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        height, width = residual.shape[-2:]
        image = hidden_states.reshape(-1, height, width, hidden_states.shape[-1]).permute(0, 3, 1, 2)
        total: torch.Tensor = (image if self.use_linear_projection else self.proj_out(image)) + residual
        return total


class _NormAndSilu(nn.GroupNorm):
    fusion: Fusion

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalised(self, x) if self.fusion.enabled else super().forward(x)


class _Nothing(nn.SiLU):
    """The activation that `_NormAndSilu` has taken over."""

    fusion: Fusion

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.fusion.enabled else super().forward(x)
