"""The layers of Stable Diffusion's UNet, computed faster than by diffusers' modules, over the same live parameters.

Every function takes a diffusers module and reads its parameters at call time, so a LoRA merge that writes into them
takes effect at once. Results differ from the module's by rounding only; tests compare them. This saves copies
between memory layouts, activations of strided halves, divisions by one, repeated `silu(temb)`, and keys and values
of the text, which no step changes.

Activations are `(R, C, h, w)` in channels-last memory, so `(R, S, C)` tokens with S = h * w are a view of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from plait_serving.diffusion.denoisers.convolutions import Convolutions

KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The keys and values of the text for one cross-attention layer, each `(R, heads, L, C / heads)`."""

_OWN_GROUP_NORM_FROM = 1 << 16
"""The number of elements from which `group_norm` beats torch's channels-last kernel on a CPU; below, a dozen calls
cost more."""


def group_norm(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """Return `norm(x)` as a new tensor.

    torch's channels-last kernel reads C/groups neighbours at a time and is 6x slower at 48 channels than whole rows
    (32x48x16x16: 1.8 ms against 0.3 ms); two passes over centred values keep its accuracy.
    """
    small = x.numel() < _OWN_GROUP_NORM_FROM
    if (
        small
        or x.dtype != torch.float32
        or x.device.type != "cpu"
        or not x.is_contiguous(memory_format=torch.channels_last)
    ):
        return F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)
    rows, channels, height, width = x.shape
    tokens = x.permute(0, 2, 3, 1).view(rows, height * width, channels)
    groups = (rows, norm.num_groups, channels // norm.num_groups)
    count = height * width * groups[2]
    mean = tokens.sum(1).view(groups).sum(2, keepdim=True).div_(count)
    centred = tokens - mean.expand(groups).reshape(rows, 1, channels)
    variance = (centred * centred).sum(1).view(groups).sum(2, keepdim=True).div_(count)
    gain = variance.add_(norm.eps).rsqrt_().expand(groups).reshape(rows, 1, channels) * norm.weight
    scaled = torch.addcmul(norm.bias, centred, gain, out=centred)
    image: torch.Tensor = scaled.view(rows, height, width, channels).permute(0, 3, 1, 2)
    return image


def resnet(block: Any, x: torch.Tensor, activated_time: torch.Tensor, conv: Convolutions) -> torch.Tensor:
    """Compute `ResnetBlock2D.forward`; `activated_time (R, E)` is `silu(temb)`, the same for every block."""
    h = conv(block.conv1, F.silu(group_norm(block.norm1, x), inplace=True))
    h += F.linear(activated_time, block.time_emb_proj.weight, block.time_emb_proj.bias)[:, :, None, None]
    h = conv(block.conv2, F.silu(group_norm(block.norm2, h), inplace=True))
    h += x if block.conv_shortcut is None else conv(block.conv_shortcut, x)
    return h if block.output_scale_factor == 1.0 else h.div_(block.output_scale_factor)


def downsample(module: Any, x: torch.Tensor, conv: Convolutions) -> torch.Tensor:
    """Compute `Downsample2D.forward`."""
    if module.use_conv and module.norm is None and module.padding != 0:
        return conv(module.conv, x)
    plain: torch.Tensor = module(x)
    return plain


def upsample(module: Any, x: torch.Tensor, size: torch.Size | None, conv: Convolutions) -> torch.Tensor:
    """Compute `Upsample2D.forward`, to `size` (h, w) where doubling would miss it."""
    # Beyond these, torch's channels-last kernel has failed (diffusers issue 984, pytorch issue 141831).
    large = x.shape[0] >= 64 or x.numel() * 4 > 2**31
    if large or not module.use_conv or module.use_conv_transpose or module.norm is not None or module.name != "conv":
        plain: torch.Tensor = module(x, size)
        return plain
    if size is None:
        return conv(module.conv, F.interpolate(x, scale_factor=2.0, mode="nearest"))
    return conv(module.conv, F.interpolate(x, size=size, mode="nearest"))


def transformer(module: Any, x: torch.Tensor, texts: list[KeysValues]) -> torch.Tensor:
    """Compute `Transformer2DModel.forward` on images; `texts` has one entry per transformer block."""
    rows, channels, height, width = x.shape
    normed = group_norm(module.norm, x)
    tokens = normed.permute(0, 2, 3, 1).reshape(rows, height * width, channels)
    tokens = _linear(module.proj_in, tokens)
    for block, text in zip(module.transformer_blocks, texts, strict=True):
        tokens = _transformer_block(block, tokens, text)
    tokens = _linear(module.proj_out, tokens)
    # Where x's memory is channels-last too, this sum is a plain one over contiguous memory.
    return tokens.view(rows, height, width, channels).permute(0, 3, 1, 2).add_(x)


def project_text(attention: Any, text: torch.Tensor) -> KeysValues:
    """Return keys and values of `text (R, L, C)` for one cross-attention layer."""
    return _heads(attention, attention.to_k(text)), _heads(attention, attention.to_v(text))


def _transformer_block(block: Any, x: torch.Tensor, text: KeysValues) -> torch.Tensor:
    """Compute `BasicTransformerBlock.forward` with layer norms; writes into `x`, which the caller owns."""
    normed = block.norm1(x)
    own = _heads(block.attn1, block.attn1.to_k(normed)), _heads(block.attn1, block.attn1.to_v(normed))
    x += _attention(block.attn1, normed, own)
    x += _attention(block.attn2, block.norm2(x), text)
    x += _feed_forward(block.ff, block.norm3(x))
    return x


def _attention(attention: Any, x: torch.Tensor, keys_values: KeysValues) -> torch.Tensor:
    queries = _heads(attention, attention.to_q(x))
    mixed = F.scaled_dot_product_attention(queries, *keys_values)
    out: torch.Tensor = attention.to_out[0](mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))
    return out


def _heads(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Return a view `(R, heads, S, C / heads)` of `(R, S, C)`."""
    return x.view(x.shape[0], x.shape[1], attention.heads, -1).transpose(1, 2)


def _feed_forward(feed_forward: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute GEGLU and the layer after it. The halves are two products, so that gelu runs over contiguous memory."""
    projection = feed_forward.net[0].proj
    weights, biases = projection.weight.chunk(2), projection.bias.chunk(2)
    gate = torch.ops.aten.gelu_(F.linear(x, weights[1], biases[1]))
    out: torch.Tensor = feed_forward.net[2](gate.mul_(F.linear(x, weights[0], biases[0])))
    return out


def _linear(layer: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer or a 1x1 convolution to `(R, S, C)`."""
    weight = layer.weight if layer.weight.ndim == 2 else layer.weight.view(layer.weight.shape[:2])
    return F.linear(tokens, weight, layer.bias)


# ---- what the functions above rely on -------------------------------------------------------------------------------


def why_not_fast(unet: Any) -> str | None:
    """Return why this UNet's layers cannot be computed by the functions above, or None."""
    for name, module in unet.named_modules():
        check = _CHECKS.get(type(module).__name__)
        reason = check(module) if check else None
        if reason:
            return f"{name}: {reason}"
    return None


def _check_resnet(block: Any) -> str | None:
    if block.time_embedding_norm != "default" or block.skip_time_act or block.time_emb_proj is None:
        return f"time_embedding_norm = {block.time_embedding_norm!r}"
    if block.upsample is not None or block.downsample is not None:
        return "resamples inside a residual block"
    if not isinstance(block.nonlinearity, torch.nn.SiLU):
        return f"activation {type(block.nonlinearity).__name__}"
    return None


def _check_transformer(module: Any) -> str | None:
    return None if module.is_input_continuous else "is not a transformer over images"


def _check_block(block: Any) -> str | None:
    if block.norm_type != "layer_norm" or block.pos_embed is not None or block.only_cross_attention:
        return f"norm_type = {block.norm_type!r} or only cross-attention"
    if block.attn2 is None or block.attn2.is_cross_attention is False or hasattr(block, "fuser"):
        return "no cross-attention, or a fuser"
    if type(block.ff.net[0]).__name__ != "GEGLU" or block.ff.net[0].proj.bias is None:
        return f"feed-forward {type(block.ff.net[0]).__name__}"
    return None


def _check_attention(attention: Any) -> str | None:
    extras = ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross", "add_k_proj")
    found = [name for name in extras if getattr(attention, name, None) is not None]
    if found or attention.residual_connection or attention.rescale_output_factor != 1:
        return f"attention with {', '.join(found) or 'a residual of its own'}"
    return None


_CHECKS = {
    "ResnetBlock2D": _check_resnet,
    "Transformer2DModel": _check_transformer,
    "DualTransformer2DModel": lambda _: "is a dual transformer",
    "BasicTransformerBlock": _check_block,
    "Attention": _check_attention,
}
