"""The UNet as two halves: encoder + mid | decoder, computed exactly like `UNet2DConditionModel.forward`.

ControlNets add to the skips and to the mid output only, so their residuals are not needed before the decoder half.
Written after diffusers 0.42.1 `models/unets/unet_2d_condition.py`, l. 1040-1205 (Apache-2.0); a test compares bits.
R rows; c, h, w latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from plait_serving.diffusion.protocols import Residuals


@dataclass(slots=True, eq=False)
class EncoderOutput:
    """What the encoder half leaves for the decoder half. `skips` oldest first."""

    sample: torch.Tensor
    skips: tuple[torch.Tensor, ...]
    embedding: torch.Tensor
    text: torch.Tensor

    def add(self, rows: Sequence[slice], residuals: Residuals) -> None:
        """Add one request's residuals to its rows, in place; `rows` are in the residuals' order."""
        done = 0
        for part in rows:
            here = slice(done, done + part.stop - part.start)
            targets = [target[part] for target in (*self.skips, self.sample)]
            torch._foreach_add_(targets, [residual[here] for residual in (*residuals.down, residuals.mid)])
            done = here.stop

    def fits(self, residuals: Residuals, count: int) -> bool:
        """Return whether `residuals` are `count` rows of the shapes that `add` needs."""
        wanted = [(count, *target.shape[1:]) for target in (*self.skips, self.sample)]
        return wanted == [tuple(residual.shape) for residual in (*residuals.down, residuals.mid)]


def summed(one: Residuals, other: Residuals) -> Residuals:
    """Return the sum of two ControlNets' residuals."""
    *down, mid = torch._foreach_add([*one.down, one.mid], [*other.down, other.mid])
    return Residuals(down=tuple(down), mid=mid)


def time_embedding(
    unet: Any,
    sample: torch.Tensor,
    timesteps: torch.Tensor,
    text: torch.Tensor,
    *,
    added: Mapping[str, torch.Tensor],
    guidance: torch.Tensor | None,
) -> torch.Tensor:
    """Return the finished `(R, E)` that both halves take.

    From timesteps `(R,)`, SDXL's `added` inputs and, for a guidance-distilled UNet, its guidance embedding `(R, G)`.
    """
    embedding: torch.Tensor = unet.time_embedding(unet.get_time_embed(sample=sample, timestep=timesteps), guidance)
    augmentation = unet.get_aug_embed(emb=embedding, encoder_hidden_states=text, added_cond_kwargs=added)
    if augmentation is not None:
        embedding = embedding + augmentation
    return embedding if unet.time_embed_act is None else unet.time_embed_act(embedding)


def encoder_half(unet: Any, sample: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor) -> EncoderOutput:
    """Run `conv_in`, the down blocks and the mid block on `sample (R, c, h, w)` and `text (R, L, C)`."""
    if unet.config.center_input_sample:
        sample = 2 * sample - 1.0
    sample = unet.conv_in(sample)
    skips: tuple[torch.Tensor, ...] = (sample,)
    for block in unet.down_blocks:
        sample, more = block(hidden_states=sample, temb=embedding, **_read_by(block, text))
        skips += more
    if unet.mid_block is not None:
        sample = unet.mid_block(sample, embedding, **_read_by(unet.mid_block, text))
    if sample is skips[-1]:
        sample = sample.clone()  # without a mid block they are one tensor, and `add` writes into both
    return EncoderOutput(sample, skips, embedding, text)


def _read_by(block: Any, text: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a block takes of text."""
    return {"encoder_hidden_states": text} if getattr(block, "has_cross_attention", False) else {}


def decoder_half(unet: Any, half: EncoderOutput) -> torch.Tensor:
    """Run the up blocks and the output layers; return the model output `(R, c, h, w)`.

    Upsampling takes its size from the skips, as diffusers does where doubling would not restore the sides; where it
    would, the bits are the same.
    """
    sample, skips = half.sample, half.skips
    for i, block in enumerate(unet.up_blocks):
        count = len(block.resnets)
        skips, taken = skips[:-count], skips[-count:]
        size = skips[-1].shape[2:] if i < len(unet.up_blocks) - 1 else None
        sample = block(
            hidden_states=sample,
            temb=half.embedding,
            res_hidden_states_tuple=taken,
            upsample_size=size,
            **_read_by(block, half.text),
        )
    if unet.conv_norm_out:
        sample = unet.conv_act(unet.conv_norm_out(sample))
    output: torch.Tensor = unet.conv_out(sample)
    return output
