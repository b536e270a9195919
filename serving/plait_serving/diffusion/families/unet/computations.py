"""What an executor prepares of a Stable Diffusion model: the UNet's two halves, the VAE's decoder, ControlNets."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from plait_kernels.executors import Computation, InputSpec
from plait_kernels.executors.torch_program import TorchProgram
from plait_serving.diffusion.families.unet.halves import EncoderOutput, decoder_half, encoder_half

_NAMES = """
    Int _convolution add arange cat chunk concat contiguous cos div dropout exp expand flatten floor_divide gelu
    group_norm layer_norm linear matmul mul pad permute reshape scaled_dot_product_attention silu sin size slice squeeze
    to transpose unbind unsqueeze upsample_nearest2d view
"""
IMAGE_OPERATORS = frozenset(f"aten::{name}" for name in _NAMES.split())
"""What the traces of Stable Diffusion 1.5, 2 and XL and their ControlNets hold, whose pictures are compared with
diffusers'. `arange`, `exp`, `sin` and `cos` are of a ControlNet's time embedding, of at most 1,000; `floor_divide` and
`Int` of sizes."""

_ENCODER_PARTS = ("conv_in", "down_blocks", "mid_block")
_DECODER_PARTS = ("up_blocks", "conv_norm_out", "conv_act", "conv_out")
_ROWS, _SIDE, _TOKENS = 2, 16, 16  # of the example: small


class EncoderHalf(nn.Module):
    """`(sample, embedding, text)` to the skips, oldest first, and the mid output."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = _only(unet, _ENCODER_PARTS)

    def forward(self, sample: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the first half."""
        half = encoder_half(self.unet, sample, embedding, text)
        return (*half.skips, half.sample)


class DecoderHalf(nn.Module):
    """`(mid output, embedding, text, *skips)` to the model output."""

    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = _only(unet, _DECODER_PARTS)

    def forward(
        self, sample: torch.Tensor, embedding: torch.Tensor, text: torch.Tensor, *skips: torch.Tensor
    ) -> tuple[torch.Tensor]:
        """Run the second half; sizes come from the skips, so one trace serves every shape."""
        return (decoder_half(self.unet, EncoderOutput(sample, skips, embedding, text)),)


class VaeDecoder(nn.Module):
    """`(1, c, h, w)` scaled latents to `(1, 3, H, W)`."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, latents: torch.Tensor) -> tuple[torch.Tensor]:
        """Decode."""
        return (self.vae.decode(latents, return_dict=False)[0],)


def encoder_computation(unet: Any) -> Computation:
    """Return the first half of a UNet, in whatever dtype its weights are; its layers take factors."""
    return Computation(
        module=EncoderHalf(unet).eval(),
        inputs=_inputs(unet, int(unet.config.in_channels)),
        example=_example(unet),
        takes_factors=True,
        operators=IMAGE_OPERATORS,
    )


def decoder_computation(unet: Any) -> Computation:
    """Return the second half; its inputs are what the first half makes of its example."""
    _, embedding, text = _example(unet)
    *skips, mid = TorchProgram(encoder_computation(unet)).run(_example(unet))
    specs = (InputSpec(name=f"skip.{i}", shape=(None, skip.shape[1], None, None)) for i, skip in enumerate(skips))
    return Computation(
        module=DecoderHalf(unet).eval(),
        inputs=(*_inputs(unet, mid.shape[1]), *specs),
        example=tuple(value.clone() for value in (mid, embedding, text, *skips)),
        takes_factors=True,
        operators=IMAGE_OPERATORS,
    )


def vae_computation(vae: Any) -> Computation:
    """Return a VAE's decoder, one image at a time."""
    channels = int(vae.config.latent_channels)
    return Computation(
        module=VaeDecoder(vae).eval(),
        inputs=(InputSpec(name="latents", shape=(1, channels, None, None)),),
        example=(_draw(1, channels, _SIDE, _SIDE, seed=3),),
        operators=IMAGE_OPERATORS,
    )


def _inputs(unet: Any, channels: int) -> tuple[InputSpec, ...]:
    return (
        InputSpec(name="sample", shape=(None, channels, None, None)),
        InputSpec(name="embedding", shape=(None, unet.time_embedding.linear_2.out_features)),
        InputSpec(name="text", shape=(None, None, int(unet.config.cross_attention_dim))),
    )


def example_side(config: Any) -> int:
    """Return the side of an example's latents: the deepest level has at least two by two pixels, because a program must
    not see attention over a single one first (`openvino_program`)."""
    return max(_SIDE, 2 << (len(config.block_out_channels) - 1))


def _example(unet: Any) -> tuple[torch.Tensor, ...]:
    side = example_side(unet.config)
    return (
        _draw(_ROWS, int(unet.config.in_channels), side, side, seed=0),
        _draw(_ROWS, unet.time_embedding.linear_2.out_features, seed=1),
        _draw(_ROWS, _TOKENS, int(unet.config.cross_attention_dim), seed=2),
    )


def _draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _only(module: Any, parts: Collection[str]) -> Any:
    """Return a shallow copy, sharing the weights, that has only some of the module's parts."""
    clone = copy.copy(module)
    clone.__dict__["_modules"] = {name: part for name, part in module._modules.items() if name in parts}
    return clone


ADDED = ("text_embeds", "time_ids")
"""What a ControlNet of SDXL reads beside text."""


class ControlNetTrunk(nn.Module):
    """`(sample, timesteps, text, embedding[, text_embeds, time_ids])` to the down residuals and the mid residual, times
    `scale`, a number or `(R, 1, 1, 1)`."""

    def __init__(self, headless: Any) -> None:
        super().__init__()
        self.controlnet = headless

    def forward(
        self,
        sample: torch.Tensor,
        timesteps: torch.Tensor,
        text: torch.Tensor,
        embedding: torch.Tensor,
        *added: torch.Tensor,
        scale: float | torch.Tensor = 1.0,
    ) -> tuple[torch.Tensor, ...]:
        """Run the ControlNet."""
        down, mid = self.controlnet(
            sample=sample,
            timestep=timesteps,
            encoder_hidden_states=text,
            controlnet_cond=embedding,
            conditioning_scale=scale,
            added_cond_kwargs=dict(zip(ADDED, added, strict=False)) or None,
            return_dict=False,
        )
        return (*down, mid)


def controlnet_computation(headless: Any) -> Computation:
    """Return the computation of a ControlNet whose image embedding is left out (`controlnet.ControlNetModelRunner`)."""
    config = headless.config
    channels, width, side = int(config.in_channels), int(config.block_out_channels[0]), example_side(config)
    shapes: dict[str, tuple[int | None, ...]] = {
        "sample": (None, channels, None, None),
        "timesteps": (None,),
        "text": (None, None, int(config.cross_attention_dim)),
        "embedding": (None, width, None, None),
    }
    if config.addition_embed_type == "text_time":
        time_ids = 6
        pooled = int(config.projection_class_embeddings_input_dim) - time_ids * int(config.addition_time_embed_dim)
        shapes |= dict(zip(ADDED, ((None, pooled), (None, time_ids)), strict=True))
    rng = torch.Generator().manual_seed(0)
    example = []
    for name, (_, *sizes) in shapes.items():
        open_size = _TOKENS if name == "text" else side
        example.append(torch.randn(_ROWS, *(size or open_size for size in sizes), generator=rng))
    example[1] = torch.tensor([981.0, 1.0])
    return Computation(
        module=ControlNetTrunk(headless).eval(),
        inputs=tuple(InputSpec(name=name, shape=shape) for name, shape in shapes.items()),
        example=tuple(example),
        operators=IMAGE_OPERATORS,
    )
