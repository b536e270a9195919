"""What an executor prepares of a ControlNet: everything after the embedding of the control image."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from plait_kernels.executors import Computation, InputSpec
from plait_serving.diffusion.denoisers.computations import IMAGE_OPERATORS, example_side

_ROWS, _TOKENS = 2, 16


class ControlNetTrunk(nn.Module):
    """`(sample, timesteps, text, embedding[, text_embeds, time_ids])` to the down residuals and the mid residual."""

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
    ) -> tuple[torch.Tensor, ...]:
        """Run the ControlNet at scale 1."""
        down, mid = self.controlnet(
            sample=sample,
            timestep=timesteps,
            encoder_hidden_states=text,
            controlnet_cond=embedding,
            conditioning_scale=1.0,
            added_cond_kwargs=dict(zip(("text_embeds", "time_ids"), added, strict=False)) or None,
            return_dict=False,
        )
        return (*down, mid)


def controlnet_computation(headless: Any) -> Computation:
    """Return the computation of a ControlNet whose image embedding is left out (`model.ControlNetModelRunner`)."""
    config = headless.config
    channels, width = int(config.in_channels), int(config.block_out_channels[0])
    shapes: dict[str, tuple[int | None, ...]] = {
        "sample": (None, channels, None, None),
        "timesteps": (None,),
        "text": (None, None, int(config.cross_attention_dim)),
        "embedding": (None, width, None, None),
    }
    if config.addition_embed_type == "text_time":
        time_ids = 6
        pooled = int(config.projection_class_embeddings_input_dim) - time_ids * int(config.addition_time_embed_dim)
        shapes |= {"text_embeds": (None, pooled), "time_ids": (None, time_ids)}
    rng = torch.Generator().manual_seed(0)
    side = example_side(config)
    sizes = {"text": (_ROWS, _TOKENS), "sample": (_ROWS, channels, side, side)}
    example = []
    for name, shape in shapes.items():
        given = (*sizes.get(name, ()), *([None] * len(shape)))
        size = [given[i] or wanted or (_ROWS if i == 0 else side) for i, wanted in enumerate(shape)]
        example.append(torch.randn(*size, generator=rng))
    example[1] = torch.tensor([981.0, 1.0])
    return Computation(
        module=ControlNetTrunk(headless).eval(),
        inputs=tuple(InputSpec(name=name, shape=shape) for name, shape in shapes.items()),
        example=tuple(example),
        operators=IMAGE_OPERATORS,
    )
