"""Stable Diffusion 1.x, 2.x and XL behind the `Denoiser` protocol: the UNet in two halves, requests stacked by rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from plait_serving.diffusion.bundle import Bundle
from plait_serving.diffusion.denoisers.batch import BatchLayout, guide, stack_samples, stack_timesteps
from plait_serving.diffusion.denoisers.constants import ConstantsStore
from plait_serving.diffusion.denoisers.controls import ControlQuestions
from plait_serving.diffusion.denoisers.decode import decode_latents
from plait_serving.diffusion.denoisers.fast import FastHalves
from plait_serving.diffusion.denoisers.guidance import guidance_embedding
from plait_serving.diffusion.denoisers.halves import (
    EncoderOutput,
    added_embedding,
    decoder_half,
    encoder_half,
    time_embedding,
)
from plait_serving.diffusion.denoisers.layers import why_not_fast
from plait_serving.diffusion.errors import EngineError, ModelError, NumericalError
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.prompt import PromptEncoder
from plait_serving.diffusion.protocols import Conditioning, Residuals, StepCall
from plait_serving.diffusion.values import ImageRequest
from plait_serving.diffusion.versions import parameter_version

_log = logging.getLogger(__name__)


class UNetDenoiser:
    """A `Denoiser` for a bundle. Compute thread only, except `finish`, which touches nothing but the VAE.

    A single request runs through diffusers' own modules in the order of its forward, so its latents are the
    pipeline's bit for bit (fp32, CPU). Several requests at once run through `fast.py`, which rounds differently: a
    batch never has a single request's bits anyway. The knob `exact` can change this.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        weights_version: Callable[[], int] | None = None,
        exact: Callable[[], Exact] = lambda: Exact.ALONE,
        constants_bytes: int = 512 << 20,
        packed_bytes: int = 512 << 20,
    ) -> None:
        """Take the bundle. `weights_version` must change whenever weights are written (the merger's); by default
        torch's count.

        `exact` is read at every step. `constants_bytes` bounds the memory for what steps share (the text's keys and
        values), `packed_bytes` that for packed convolution weights (CPU only).
        """
        self._bundle = bundle
        self._unet = cast("Any", bundle.unet)
        self._prompts = PromptEncoder(bundle, weights_version=weights_version)
        self._exact = exact
        self._fast = FastHalves(self._unet, packed_bytes=packed_bytes) if _can_be_fast(bundle) else None
        self._store = ConstantsStore(
            self._unet, weights_version or parameter_version(self._unet), limit_bytes=constants_bytes
        )

    def latent_shape(self, width: int, height: int) -> tuple[int, int, int]:
        """Return `(c, h, w)` of one image's latents; pixels are rounded down to whole latents, like in diffusers."""
        factor = self._bundle.vae_factor
        return self._bundle.latent_channels, height // factor, width // factor

    def prepare(self, request: ImageRequest) -> Conditioning:
        """Encode the prompts with the text encoders' current weights."""
        return self._prompts.prepare(request)

    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode `(n, c, h, w)` latents to `float32 (n, 3, H, W)` in [0, 1], one image at a time."""
        with torch.inference_mode():
            return decode_latents(self._bundle, latents)

    @torch.inference_mode()
    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Predict in two halves: ControlNets compute beside the encoder half, their residuals are added before the
        decoder half."""
        layout = BatchLayout.of([call.conditioning for call in calls])
        sample = stack_samples(calls, layout)
        questions = ControlQuestions.ask(calls, sample, layout, exact=self._fast_for(calls) is None)
        try:
            half = self._encode(calls, sample, layout)
        except BaseException:
            questions.abandon()
            raise
        answers = questions.answers()
        errors = [_apply(half, layout, k, answer) for k, answer in enumerate(answers)]
        output = decoder_half(self._unet, half) if half.exact or self._fast is None else self._fast.decode(half)
        return _split_output(output, calls, layout, errors)

    @torch.inference_mode()
    def run_encoder_half(self, calls: Sequence[StepCall]) -> None:
        """Run the part of a step that ControlNets can run beside, for measuring, without calling any ControlNet."""
        layout = BatchLayout.of([call.conditioning for call in calls])
        self._encode(calls, stack_samples(calls, layout), layout)

    def _encode(self, calls: Sequence[StepCall], sample: torch.Tensor, layout: BatchLayout) -> EncoderOutput:
        fast = self._fast_for(calls)
        constants = self._store.of([call.conditioning for call in calls], layout, fast=fast is not None)
        timesteps = stack_timesteps(calls, layout)
        embedding = time_embedding(self._unet, sample, timesteps, self._guidance(calls, layout))
        augmentation = added_embedding(self._unet, embedding, constants.text, constants.added)
        if fast is not None and constants.fast is not None:
            return fast.encode(sample, embedding, constants.fast, augmentation)
        return encoder_half(self._unet, sample, embedding, constants.text, augmentation)

    def _fast_for(self, calls: Sequence[StepCall]) -> FastHalves | None:
        exact = self._exact()
        return None if exact is Exact.ALWAYS or (exact is Exact.ALONE and len(calls) == 1) else self._fast

    def _guidance(self, calls: Sequence[StepCall], layout: BatchLayout) -> torch.Tensor | None:
        if not self._bundle.embeds_guidance:
            return None
        scales = [call.guidance_scale for call, count in zip(calls, layout.counts, strict=True) for _ in range(count)]
        width = int(self._bundle.config["time_cond_proj_dim"])
        return guidance_embedding(scales, width, self._bundle.dtype, self._bundle.device)


def _can_be_fast(bundle: Bundle) -> bool:
    reason = why_not_fast(bundle.unet)
    if reason is not None:
        _log.warning("%s: batches run through diffusers' own modules, which is slower: %s", bundle.folder, reason)
    return reason is None


def _apply(
    half: EncoderOutput, layout: BatchLayout, k: int, answer: Residuals | EngineError | None
) -> EngineError | None:
    """Add request k's residuals to its rows; return its error if there is one."""
    if answer is None or isinstance(answer, EngineError):
        return answer
    if not half.fits(answer, layout.counts[k] * layout.branches):
        return ModelError("a ControlNet's residuals do not have the shapes of this UNet's skips")
    half.add(layout.rows(k), answer)
    return None


def _split_output(
    output: torch.Tensor, calls: Sequence[StepCall], layout: BatchLayout, errors: Sequence[EngineError | None]
) -> list[torch.Tensor | EngineError]:
    """Return guided outputs per request; a request with an error or a non-finite row gets its error instead."""
    finite = output.isfinite().flatten(1).all(dim=1).tolist()
    results: list[torch.Tensor | EngineError] = []
    for k, call in enumerate(calls):
        error = errors[k]
        if error is not None:
            results.append(error)
        elif not all(all(finite[rows]) for rows in layout.rows(k)):
            results.append(NumericalError("the model's output is NaN or infinite"))
        else:
            results.append(guide(output, layout, k, call.guidance_scale))
    return results
