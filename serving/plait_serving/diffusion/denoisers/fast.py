"""`halves.py` computed by `layers.py`: the same two halves over the same parameters, faster, equal up to rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from plait_serving.diffusion.denoisers.convolutions import Convolutions
from plait_serving.diffusion.denoisers.halves import EncoderOutput, needs_forward_size
from plait_serving.diffusion.denoisers.layers import (
    KeysValues,
    downsample,
    group_norm,
    project_text,
    resnet,
    transformer,
    upsample,
)


@dataclass(frozen=True, slots=True, eq=False)
class FastText:
    """Keys and values of the text for every transformer, by its module's id."""

    by_transformer: dict[int, list[KeysValues]]

    @property
    def nbytes(self) -> int:
        """The bytes held."""
        return sum(k.nbytes + v.nbytes for texts in self.by_transformer.values() for k, v in texts)


def fast_text(unet: Any, text: torch.Tensor) -> FastText:
    """Project `text (R, L, C)` with the current weights."""
    return FastText(
        {
            id(module): [project_text(block.attn2, text) for block in module.transformer_blocks]
            for module in unet.modules()
            if type(module).__name__ == "Transformer2DModel"
        }
    )


class FastHalves:
    """`halves.encoder_half` and `halves.decoder_half` of one UNet. Compute thread only."""

    def __init__(self, unet: Any, *, packed_bytes: int) -> None:
        """Bound the memory for packed convolution weights by `packed_bytes`; 0 packs none."""
        self._unet = unet
        self._conv = Convolutions(unet, limit_bytes=packed_bytes)

    def encode(
        self, sample: torch.Tensor, embedding: torch.Tensor, text: FastText, augmentation: torch.Tensor | None
    ) -> EncoderOutput:
        """Compute the first half, for `decode`."""
        unet = self._unet
        forward_size = needs_forward_size(unet, sample)
        if unet.config.center_input_sample:
            sample = 2 * sample - 1.0
        if augmentation is not None:
            embedding = embedding + augmentation
        if unet.time_embed_act is not None:
            embedding = unet.time_embed_act(embedding)
        time = F.silu(embedding)
        sample = self._conv(unet.conv_in, sample.contiguous(memory_format=torch.channels_last))
        skips, sample = down_and_mid(unet, sample, time, text, self._conv)
        return EncoderOutput(sample, skips, time, text, forward_size, exact=False)

    def decode(self, half: EncoderOutput) -> torch.Tensor:
        """Compute the second half from the result of `encode`: the model output `(R, c, h, w)`."""
        unet, sample, skips = self._unet, half.sample, list(half.skips)
        for number, block in enumerate(unet.up_blocks):
            for i, layer in enumerate(block.resnets):
                sample = resnet(layer, torch.cat([sample, skips.pop()], dim=1), half.embedding, self._conv)
                sample = _attend(block, i, sample, half.text)
            size = skips[-1].shape[2:] if half.forward_size and number < len(unet.up_blocks) - 1 else None
            for upsampler in block.upsamplers or ():
                sample = upsample(upsampler, sample, size, self._conv)
        if unet.conv_norm_out:
            sample = unet.conv_act(group_norm(unet.conv_norm_out, sample))
        return self._conv(unet.conv_out, sample).contiguous()


def down_and_mid(
    net: Any, sample: torch.Tensor, time: torch.Tensor, text: FastText, conv: Convolutions
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Run the down blocks and mid block of a UNet or ControlNet after its first convolution; return the skips and the
    mid output."""
    skips = [sample]
    for block in net.down_blocks:
        for i, layer in enumerate(block.resnets):
            sample = _attend(block, i, resnet(layer, sample, time, conv), text)
            skips.append(sample)
        for downsampler in block.downsamplers or ():
            sample = downsample(downsampler, sample, conv)
            skips.append(sample)
    if net.mid_block is None:
        return tuple(skips), sample.clone()
    sample = resnet(net.mid_block.resnets[0], sample, time, conv)
    for i, layer in enumerate(net.mid_block.resnets[1:]):
        sample = resnet(layer, _attend(net.mid_block, i, sample, text), time, conv)
    return tuple(skips), sample


def _attend(block: Any, i: int, sample: torch.Tensor, text: FastText) -> torch.Tensor:
    """Run the block's transformer `i`, if it has any."""
    module = block.attentions[i] if getattr(block, "has_cross_attention", False) else None
    return sample if module is None else transformer(module, sample, text.by_transformer[id(module)])
