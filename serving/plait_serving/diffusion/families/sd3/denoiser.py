"""Stable Diffusion 3 and 3.5 behind the `Denoiser` protocol: the text of two CLIPs and T5, and a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from plait_serving.diffusion.families.encoders import Call, Outputs, TextEncoding
from plait_serving.diffusion.families.flow.denoiser import FlowDenoiser
from plait_serving.diffusion.families.flow.texts import TextTokens
from plait_serving.diffusion.families.rows import Rows
from plait_serving.diffusion.protocols import Conditioning
from plait_serving.diffusion.values import ImageRequest

CLIPS = ("text_encoder", "text_encoder_2")
T5 = "text_encoder_3"
DEFAULT_LENGTH = 256
"""What T5's text is filled up to in diffusers, if a request does not say."""


class Sd3Denoiser(FlowDenoiser):
    """One model."""

    def begin(self, request: ImageRequest) -> TextEncoding:
        """Return what encodes the prompts: the negative one first, if the request is guided."""
        length = length_of(request)
        texts = calls_of(self.tokens, request, length, has_t5=T5 in self.encoders)
        return TextEncoding(
            [call for text in texts for call in text],
            run=self.encoded,
            finish=lambda outputs: self._conditioning(texts, outputs, length, request.n),
        )

    @torch.inference_mode()
    def _conditioning(self, texts: Sequence[Sequence[Call]], outputs: Outputs, length: int, n: int) -> Conditioning:
        """Join the CLIPs side by side, filled up with zeros to T5's width, and T5 behind them; zeros without T5."""
        width, hidden, pooled = int(self.transformer.config.joint_attention_dim), [], []
        for first, second, *last in ([outputs[call] for call in text] for text in texts):
            clips = torch.cat([first.hidden, second.hidden], dim=-1)
            clips = torch.nn.functional.pad(clips, (0, width - clips.shape[-1]))
            long = last[0].hidden if last else clips.new_zeros(1, length, width)
            hidden.append(torch.cat([clips, long], dim=1))
            pooled.append(torch.cat([each.pooled for each in (first, second) if each.pooled is not None], dim=-1))
        dtype = self.bundle.dtype
        return Conditioning(text=torch.cat(hidden).to(dtype), added={"pooled": torch.cat(pooled).to(dtype)}, n=n)

    def run(self, rows: Rows) -> torch.Tensor:
        """Return the transformer's output `(R, c, h, w)`."""
        output: torch.Tensor = self.transformer(
            hidden_states=rows.sample,
            timestep=rows.timesteps,
            encoder_hidden_states=rows.text,
            pooled_projections=rows.added["pooled"],
            return_dict=False,
        )[0]
        return output

    def scale_of(self, request: ImageRequest) -> float:
        """Return the request's `guidance_scale`."""
        return request.guidance_scale


def is_guided(request: ImageRequest) -> bool:
    """Return whether classifier-free guidance runs: above 1, diffusers' rule."""
    return request.guidance_scale > 1.0


def length_of(request: ImageRequest) -> int:
    """Return what T5's text is filled up to."""
    return DEFAULT_LENGTH if request.max_sequence_length is None else request.max_sequence_length


def calls_of(tokens: TextTokens, request: ImageRequest, length: int, *, has_t5: bool) -> list[list[Call]]:
    """Return the text encoder calls of a request's texts, the negative one first: both CLIPs', then T5's."""
    negative = request.negative_prompt or ""
    texts = [(negative, request.negative_prompt_2 or negative, 0)] if is_guided(request) else []
    texts += [(request.prompt, request.prompt_2 or request.prompt, request.clip_skip)]
    return [
        [
            tokens.clip(CLIPS[0], first, skip),
            tokens.clip(CLIPS[1], second, skip),
            *([tokens.t5(T5, first, length)] if has_t5 else []),
        ]
        for first, second, skip in texts
    ]
