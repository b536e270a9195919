"""Stable Diffusion 1.x, 2.x and XL behind the `Denoiser` protocol: the UNet in two halves, requests stacked by rows."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch

from plait_kernels.devices import is_gpu
from plait_kernels.executors import PreparedProgram
from plait_kernels.threads import one_thread
from plait_serving.diffusion.errors import EngineError, ModelError
from plait_serving.diffusion.families.factors import FactorStore
from plait_serving.diffusion.families.resident_weights import ResidentWeights
from plait_serving.diffusion.families.rows import (
    BatchLayout,
    Rows,
    guidance_embedding,
    guided_outputs,
    in_groups,
    own_rows,
    with_extra,
)
from plait_serving.diffusion.families.unet.bundle import UNetBundle, safety_of
from plait_serving.diffusion.families.unet.compiled import CompiledHalves
from plait_serving.diffusion.families.unet.fused import Fusion, fuse_
from plait_serving.diffusion.families.unet.halves import (
    EncoderOutput,
    decoder_half,
    encoder_half,
    summed,
    time_embedding,
)
from plait_serving.diffusion.families.unet.prompt import PromptEncoder, PromptTokens
from plait_serving.diffusion.families.unet.samplers import Sampler, sampler_of
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora
from plait_serving.diffusion.protocols import (
    Answers,
    ControlCall,
    ControlNetClient,
    EncodedImage,
    Encoding,
    Residuals,
    StepCall,
)
from plait_serving.diffusion.values import ImageRequest


class UNetDenoiser:
    """A `Denoiser` for a bundle. Compute thread only, except `finish`, which touches nothing but the VAE's decoder.

    Steps run through diffusers' own modules in the order of its forward: a single request's latents are the
    pipeline's bit for bit (fp32, CPU). Once programs were adopted, they run the steps, within their tolerance, and
    LoRA sets are inputs; what they cannot take, and everything while the knob `exact` says so, runs as before. On a
    GPU the modules are fused (`fused`), except while `exact` says otherwise.
    """

    def __init__(
        self,
        bundle: UNetBundle,
        *,
        exact: Callable[[], Exact] = lambda: Exact.ALWAYS,
        tokens: PromptTokens | None = None,
    ) -> None:
        """Take the bundle; the weights of parts that are mapped are brought into memory when torch is to run them.
        `exact` is read at every step. `tokens`: those of the bundle's tokenizers, if others use these as well.
        """
        self.bundle, self.inpaints = bundle, bundle.inpaints
        self._unet = bundle.unet
        self._fusion: Fusion | None = fuse_(bundle.unet) if is_gpu(bundle.device) else None
        self._exact = exact
        self._fuses()
        self._weights = ResidentWeights(
            bundle.unet,
            name="the UNet",
            part=bundle.parts["unet"],
            resident="unet" not in bundle.mapped,
            always=("time_embedding", "add_embedding"),  # they make what both halves take, with torch
        )
        self._vae_weights = ResidentWeights(
            bundle.vae, name="the VAE", part=bundle.parts["vae"], resident="vae" not in bundle.mapped
        )
        assert bundle.encoders is not None
        self.merger = Merger({bundle.denoiser: bundle.unet}, before_write=self._weights.take)
        self.text_merger = bundle.encoders.merger
        self._prompts = PromptEncoder(bundle, tokens=tokens)
        self.safety = safety_of(bundle)
        self._halves: CompiledHalves | None = None
        self._factors = FactorStore(bundle.denoiser)
        self._vae: PreparedProgram | None = None

    def adopt(self, halves: CompiledHalves) -> None:
        """Run steps through programs from the next one on; unless they read the UNet's own weights (`live`), give the
        memory of those back. Between two steps."""
        if not halves.live and self._weights.resident:
            self.merger.forget()
            self._weights.release()
        self._halves = halves
        self._factors = FactorStore(self.bundle.denoiser, halves.encoder.layers, halves.decoder.layers)

    def adopt_vae(self, vae: PreparedProgram) -> None:
        """Decode through a prepared program from now on."""
        self._vae = vae

    def takes(self, weights: Sequence[LoadedLora]) -> bool:
        """Return whether LoRA files can be inputs of a step now, instead of being merged into the weights."""
        return self._compiled() is not None and all(map(self._factors.takes, weights))

    def may_take(self, weights: Sequence[LoadedLora]) -> bool:
        """Return whether LoRA files could be inputs of a step now, although they can be merged, too."""
        offered = self._halves is not None and self._halves.offered
        return offered and self._exact() is not Exact.ALWAYS and all(map(self._factors.takes, weights))

    def sampler(self, request: ImageRequest, seeds: Sequence[int]) -> Sampler:
        """Return the sampler of a request's images with these seeds. Raises `RequestError`."""
        bundle, shape = self.bundle, self.bundle.latent_shape(request.width, request.height)
        return sampler_of(
            bundle.scheduler_config, request, seeds, shape=shape, dtype=bundle.dtype, device=bundle.device
        )

    def begin(self, request: ImageRequest) -> Encoding:
        """Return what encodes the prompts, with the weights that the text encoders have at each call."""
        return self._prompts.begin(request)

    def encode(self, pixels: torch.Tensor) -> EncodedImage:
        """Encode one image, `float32 (1, 3, H, W)` in [-1, 1], with torch. Compute thread only."""
        self._vae_weights.take()
        with torch.inference_mode():
            return self.bundle.encode(pixels)

    def finish(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode `(n, c, h, w)` latents to `float32 (n, 3, H, W)` in [0, 1], one image at a time."""
        program = None if self._exact() is Exact.ALWAYS else self._vae
        if program is None:
            self._vae_weights.take()
        with torch.inference_mode(), nullcontext() if program is None else one_thread():
            return self.bundle.decode(latents, program)

    @torch.inference_mode()
    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Predict those of one text length in one call: nearly always all."""
        return in_groups(calls, lambda call: call.conditioning.text.shape[1], self._predict)

    def _predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Predict in two halves: ControlNets compute beside the encoder half, their residuals are added before the
        decoder half."""
        # Sets that are inputs were chosen by `takes` or `may_take`: they are not in the weights, whatever `exact` says
        # by now.
        compiled = self._halves if any(call.loras for call in calls) else self._compiled(calls)
        layout = BatchLayout.of([call.conditioning for call in calls])
        rows = Rows.of(calls, layout)
        fused = self._fuses()
        with _control_answers(calls, rows.sample, layout, exact=compiled is None and not fused) as answers:
            half, decode = self._encode(calls, rows, layout, compiled)
            errors = [_apply(half, layout, k, parts) for k, parts in enumerate(answers())]
        with self._threads(compiled):
            return guided_outputs(
                decode(),
                layout,
                [call.request.guidance_scale for call in calls],
                rescales=[call.request.guidance_rescale for call in calls],
                errors=errors,
            )

    def _encode(
        self, calls: Sequence[StepCall], rows: Rows, layout: BatchLayout, compiled: CompiledHalves | None
    ) -> tuple[EncoderOutput, Callable[[], torch.Tensor]]:
        """Compute the encoder half; return its output, and what computes the decoder half from it."""
        sample, text = with_extra(rows.sample, calls, layout), rows.text
        with self._threads(compiled):
            guidance = self._guidance(rows.scales)
            embedding = time_embedding(self._unet, sample, rows.timesteps, text, added=rows.added, guidance=guidance)
            if compiled is not None:
                first, second = self._factors.of([call.loras for call in calls], layout)
                half = compiled.encode(sample, embedding, text, first)
                return half, functools.partial(compiled.decode, half, second)
            self._weights.take()
            half = encoder_half(self._unet, sample, embedding, text)
            return half, functools.partial(decoder_half, self._unet, half)

    def _threads(self, compiled: CompiledHalves | None) -> AbstractContextManager[None]:
        """Return what surrounds the work on halves: programs of another library have the cores to themselves."""
        return nullcontext() if compiled is None or compiled.offered else one_thread()

    def _compiled(self, calls: Sequence[StepCall] = ()) -> CompiledHalves | None:
        """Return the programs if they may run these calls."""
        halves = self._halves
        if halves is None or halves.offered or self._exact() is Exact.ALWAYS:
            return None
        return halves if halves.live or not any(call.merged for call in calls) else None

    def _fuses(self) -> bool:
        """Set whether the modules compute through operators in this call, and return it."""
        if self._fusion is None:
            return False
        self._fusion.enabled = self._exact() is not Exact.ALWAYS
        return self._fusion.enabled

    def _guidance(self, scales: Sequence[float]) -> torch.Tensor | None:
        if not self.bundle.embeds_guidance:
            return None
        width = int(self.bundle.config["time_cond_proj_dim"])
        return guidance_embedding(scales, width, self.bundle.dtype, self.bundle.device)


@contextmanager
def _control_answers(
    calls: Sequence[StepCall], sample: torch.Tensor, layout: BatchLayout, *, exact: bool
) -> Iterator[Callable[[], list[list[Residuals | EngineError]]]]:
    """Send one step's questions to all ControlNets, those to one of them as one batch, before the answers are computed.
    `sample (R, c, h, w)`.

    Inside, call what this gives once: it waits, and returns per request what each of its ControlNets answered, in list
    order; one that fails a request fails that request only. Answers still in flight at the end are waited for and
    dropped: none may arrive in a later step.
    """
    # A question's place: its request, and its position in that request's list.
    questions: dict[ControlNetClient, dict[tuple[int, int], ControlCall]] = defaultdict(dict)
    for k, call in enumerate(calls):
        rows = own_rows(sample, layout, k) if call.controls else sample
        for i, control in enumerate(call.controls):
            questions[control.client][k, i] = ControlCall(
                session=control.session, sample=rows, timestep=call.timestep, scale=control.scale, exact=exact
            )
    waiting: list[tuple[list[tuple[int, int]], Answers]] = []
    found: dict[tuple[int, int], Residuals | EngineError] = {}

    def answers() -> list[list[Residuals | EngineError]]:
        while waiting:
            places, wait = waiting.pop(0)
            found.update(zip(places, wait(), strict=True))
        return [[found[k, i] for i in range(len(call.controls))] for k, call in enumerate(calls)]

    try:
        for client, asked in questions.items():
            waiting.append((list(asked), client.start(list(asked.values()))))
        yield answers
    finally:
        for _, wait in waiting:
            with suppress(Exception):
                wait()


def _apply(
    half: EncoderOutput, layout: BatchLayout, k: int, parts: Sequence[Residuals | EngineError]
) -> EngineError | None:
    """Add what request k's ControlNets answered to its rows; return the first error if there is one."""
    found: list[Residuals] = []
    for part in parts:
        if isinstance(part, EngineError):
            return part
        if not half.fits(part, layout.counts[k] * layout.branches[k]):
            return ModelError("a ControlNet's residuals do not have the shapes of this UNet's skips")
        found.append(part)
    if found:
        half.add(layout.rows(k), functools.reduce(summed, found))  # in diffusers' order: they are summed first
    return None
