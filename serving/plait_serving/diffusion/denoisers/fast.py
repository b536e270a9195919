"""`halves.py` computed by `layers.py`: the same two halves over the same parameters, faster, equal up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from plait_serving.diffusion.denoisers.halves import Halfway, needs_forward_size
from plait_serving.diffusion.denoisers.layers import KeysValues, project_text, resnet, transformer


@dataclass(frozen=True, slots=True, eq=False)
class FastText:
    """Keys and values of the text for every transformer, by its module's id."""

    by_transformer: dict[int, list[KeysValues]]

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(k.nbytes + v.nbytes for texts in self.by_transformer.values() for k, v in texts)


def fast_text(unet: Any, text: torch.Tensor) -> FastText:
    """Projects ``text (R, L, C)`` with the weights as they are now."""
    return FastText(
        {
            id(module): [project_text(block.attn2, text) for block in module.transformer_blocks]
            for module in unet.modules()
            if type(module).__name__ == "Transformer2DModel"
        }
    )


def fast_encoder_half(
    unet: Any, sample: torch.Tensor, embedding: torch.Tensor, text: FastText, augmentation: torch.Tensor | None
) -> Halfway:
    """`halves.encoder_half` for `fast_decoder_half`."""
    forward_size = needs_forward_size(unet, sample)
    if unet.config.center_input_sample:
        sample = 2 * sample - 1.0
    if augmentation is not None:
        embedding = embedding + augmentation
    if unet.time_embed_act is not None:
        embedding = unet.time_embed_act(embedding)
    time = F.silu(embedding)
    sample = unet.conv_in(sample.contiguous(memory_format=torch.channels_last))
    skips = [sample]
    for block in unet.down_blocks:
        for i, layer in enumerate(block.resnets):
            sample = resnet(layer, sample, time)
            if getattr(block, "has_cross_attention", False):
                sample = transformer(block.attentions[i], sample, text.by_transformer[id(block.attentions[i])])
            skips.append(sample)
        for downsampler in block.downsamplers or ():
            sample = downsampler(sample)
            skips.append(sample)
    sample = _mid(unet.mid_block, sample, time, text)
    return Halfway(sample, tuple(skips), time, text, forward_size, exact=False)


def fast_decoder_half(unet: Any, half: Halfway) -> torch.Tensor:
    """`halves.decoder_half` for the result of `fast_encoder_half`."""
    sample, skips = half.sample, list(half.skips)
    for number, block in enumerate(unet.up_blocks):
        for i, layer in enumerate(block.resnets):
            sample = resnet(layer, torch.cat([sample, skips.pop()], dim=1), half.embedding)
            if getattr(block, "has_cross_attention", False):
                sample = transformer(block.attentions[i], sample, half.text.by_transformer[id(block.attentions[i])])
        size = skips[-1].shape[2:] if half.forward_size and number < len(unet.up_blocks) - 1 else None
        for upsampler in block.upsamplers or ():
            sample = upsampler(sample, size)
    if unet.conv_norm_out:
        sample = unet.conv_act(unet.conv_norm_out(sample))
    output: torch.Tensor = unet.conv_out(sample)
    return output.contiguous()


def _mid(block: Any, sample: torch.Tensor, time: torch.Tensor, text: FastText) -> torch.Tensor:
    if block is None:
        return sample.clone()
    sample = resnet(block.resnets[0], sample, time)
    for attention, layer in zip(block.attentions, block.resnets[1:], strict=True):
        if attention is not None:
            sample = transformer(attention, sample, text.by_transformer[id(attention)])
        sample = resnet(layer, sample, time)
    return sample
