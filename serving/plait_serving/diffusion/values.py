"""The engine's vocabulary as frozen values: what a request contains and what it gets back.

Shapes: H, W are pixels; h, w latents; a request has `n` images (rows). Images are `uint8 (H, W, 3)` RGB arrays.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from plait_serving.diffusion.request_fields import (
    Corner,
    Fraction,
    PixelSize,
    RequestField,
    Text,
    between,
    choice,
    whole,
)

RgbImage: TypeAlias = npt.NDArray[np.uint8]
"""`uint8 (H, W, 3)`, RGB."""

GreyImage: TypeAlias = npt.NDArray[np.uint8]
"""`uint8 (H, W)`."""

NAME_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
"""The valid names of a model, ControlNet or LoRA: never a path or URL."""

MAX_IMAGES = 10  # of a request: OpenAI's limit
MAX_SEED = 2**63 - 1
MAX_SCALE = 100.0  # of guidance and add-ons: far beyond any use; keeps products finite in fp16
SCALE = between(-MAX_SCALE, MAX_SCALE)


class Scheduler(StrEnum):
    """Samplers that a request may choose; the value is the HTTP spelling."""

    DDIM = "ddim"
    DDPM = "ddpm"
    EULER = "euler"
    EULER_A = "euler_a"
    HEUN = "heun"
    LMS = "lms"
    DPMPP_2M = "dpmpp_2m"
    DPMPP_2M_SDE = "dpmpp_2m_sde"
    DPMPP_SDE = "dpmpp_sde"
    UNIPC = "unipc"
    LCM = "lcm"

    @property
    def calls_per_step(self) -> int:
        """How many denoiser calls a step makes. The last one makes a single call."""
        return 2 if self in (Scheduler.HEUN, Scheduler.DPMPP_SDE) else 1


class Sigmas(StrEnum):
    """How a schedule's noise levels are spaced: NORMAL as the model's timesteps, or by one of the formulae that
    diffusers has for it."""

    NORMAL = "normal"
    KARRAS = "karras"
    EXPONENTIAL = "exponential"
    BETA = "beta"


class PromptSyntax(StrEnum):
    """How prompts are read: PLAIN to the letter; A1111 with its weights and breaks (`prompt_syntax`)."""

    PLAIN = "plain"
    A1111 = "a1111"


class LoraPolicy(StrEnum):
    """When a LoRA set starts to act: EXACT from step 0; BOUNDED_ASYNC from step k, fixed by the request."""

    EXACT = "exact"
    BOUNDED_ASYNC = "bounded_async"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRef:
    """One member of a LoRA set. `scale` multiplies alpha/rank; any finite number.

    `file`: the `LoadedLora.token` of the file that the name stood for when it was loaded; 0 in a request. A file that
    is replaced under its name is another member.
    """

    name: str
    scale: Annotated[float, RequestField(type=SCALE)] = 1.0
    file: Hashable = 0


LoraSet: TypeAlias = tuple[LoraRef, ...]
"""Ordered names with scales; `()` is the bare model. Equal tuples mean equal weights."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlRef:
    """One ControlNet of a request. It acts in step i of N iff start <= i/N and (i+1)/N <= end (diffusers' rule)."""

    name: str
    image: RgbImage
    scale: Annotated[float, RequestField(type=SCALE)] = 1.0
    start: Annotated[float, RequestField(type=Fraction)] = 0.0
    end: Annotated[float, RequestField(type=Fraction)] = 1.0

    def acts_in(self, step: int, steps: int) -> bool:
        """Return whether step `step` (0-based) of `steps` is inside [start, end]."""
        return not (step / steps < self.start or (step + 1) / steps > self.end)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edit:
    """The image that a request starts from; `image` and `mask` have the request's size.

    `mask`: pixels from 128 on are made anew, the others stay; None: all are. `strength`: the share of the steps that
    run, above 0 and at most 1. `overlay`: put the image's own pixels back where the mask is 0, and mix where it is
    neither 0 nor 255: decoded latents are only nearly the image. `rounds_up`: a step of which `strength` covers a part
    runs, as in diffusers' pipelines for transformers (`RequestTerms`); those for UNets leave it out.
    """

    image: RgbImage
    mask: GreyImage | None = None
    strength: Annotated[
        float,
        RequestField(
            type=Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)],
            about="share of the steps that run; unset: 1 with a mask, else 0.8",
            echoed=True,
        ),
    ] = 1.0
    overlay: Annotated[
        bool, RequestField(type=bool, about="put the image's own pixels back outside of the mask; unset: true")
    ] = True

    rounds_up: bool = False

    def steps_of(self, steps: int) -> int:
        """Return how many of a schedule's steps run, the last ones."""
        share = min(steps * self.strength, steps)
        return steps - int(steps - share) if self.rounds_up else int(share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose a request is. While several tenants wait they share the engine's time by `weight`.

    `queued_s`: at most so many predicted compute-seconds of it may wait; None: as many as the queue takes.
    """

    name: str = "default"
    weight: float = 1.0
    queued_s: float | None = None

    @property
    def counts(self) -> bool:
        """Whether its requests are counted, and forecasts learn from them: all but plait's own warm-up, which has no
        name, is as small as can be, and pays for what is done once."""
        return bool(self.name)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageRequest:
    """A fully resolved request: no defaults left open. Image i uses seed `seed + i`.

    `sigmas` None: as the model's folder says. `eta` is DDIM's noise, 0 to 1. `guidance_rescale`: the share of the
    guided output that is brought back to the deviation of the conditional one. `clip_skip`: the layers that the text
    encoders leave out at their end, for the prompt (`negative_clip_skip`: for the negative prompt).

    `true_cfg_scale`: what FLUX.1 calls guidance by a negative prompt (its `guidance_scale` is an input of the model).
    `max_sequence_length`: what T5's text is padded to, unmasked; None: the model's own. `reference`: an image of any
    size that the model reads, as FLUX.1 Kontext does.

    `prompt_2` and `negative_prompt_2`: what the second text encoder reads (None: what the first does). For SDXL only:
    the sizes that it was trained to know of its images: `original_size` and `target_size` `(width, height)`
    (None: the image's), and the `(left, top)` of a `crop`.

    `deadline_s` counts from acceptance. `lora_free_steps` is k of BOUNDED_ASYNC (0 for EXACT): steps [0, k) run
    without the LoRA set, all others with it, whenever the set arrived, so a seed always gives the same image.
    `wants_progress`: somebody reads its progress, step by step. `model`: the base model's name; empty: the engine's
    first. `tried_again_s`: how long after its arrival it is tried again, as an engine's process died with it; no client
    can say so, since it goes before others.
    """

    request_id: str
    prompt: str
    width: int
    height: int
    seed: int
    scheduler: Annotated[
        Scheduler,
        RequestField(
            type=choice(Scheduler), about="the sampler; heun and dpmpp_sde run the model twice a step", echoed=True
        ),
    ]
    sigmas: Annotated[
        Sigmas | None,
        RequestField(
            type=choice(Sigmas),
            about="how noise levels are spaced; unset: as the model says. Not with every sampler",
            echoed=True,
            control="Schedule type",
        ),
    ] = None
    eta: Annotated[
        float,
        RequestField(type=Fraction, about="noise of ddim", infotext="Eta DDIM", echoed=True, control="Eta (DDIM)"),
    ] = 0.0
    steps: Annotated[int, RequestField(type=whole(1), name="num_inference_steps", echoed=True)]
    guidance_scale: Annotated[float, RequestField(type=between(0.0, MAX_SCALE), only_some=True, echoed=True)]
    guidance_rescale: Annotated[
        float,
        RequestField(
            type=Fraction,
            about="0.7 takes back the overexposure of high guidance_scale; 0 does nothing",
            infotext="CFG rescale",
            only_some=True,
            echoed=True,
            control="CFG rescale",
        ),
    ] = 0.0
    true_cfg_scale: Annotated[
        float,
        RequestField(
            type=between(1.0, 20.0),
            about="FLUX.1: guidance by a negative_prompt, for which the model runs twice a step; 1: none",
            infotext="True CFG scale",
            only_some=True,
            echoed=True,
            control="True CFG scale",
        ),
    ] = 1.0
    clip_skip: Annotated[
        int,
        RequestField(
            type=whole(0, 64),
            about="text encoder layers that the prompt leaves out, as in diffusers, and with prompt_syntax: a1111 the "
            "negative prompt too; A1111's `Clip skip` is one more",
            infotext="Clip skip",
            write=lambda layers: str(layers + 1),
            only_some=True,
            echoed=True,
            control="Clip skip (layers)",
        ),
    ] = 0
    max_sequence_length: Annotated[
        int | None,
        RequestField(
            type=whole(1, 512),
            about="SD3, FLUX.1: the tokens that T5's text is filled up to, which are part of the image; unset: the "
            "model's own",
            infotext="Max sequence length",
            only_some=True,
            echoed=True,
            control="Text length (tokens)",
        ),
    ] = None
    negative_prompt: Annotated[str | None, RequestField(type=Text, only_some=True)] = None
    prompt_syntax: Annotated[
        PromptSyntax,
        RequestField(
            type=choice(PromptSyntax),
            about="a1111: (word:1.2), ((word)), [word], BREAK and <lora:name:0.8> have a meaning",
            infotext="Prompt syntax",
            only_some=True,
            control="Prompt syntax",
        ),
    ] = PromptSyntax.PLAIN
    prompt_2: Annotated[
        str | None,
        RequestField(
            type=Text,
            about="SDXL, SD3: for the second text encoder; FLUX.1: for T5; unset: prompt",
            infotext="Prompt 2",
            only_some=True,
        ),
    ] = None
    negative_prompt_2: Annotated[
        str | None,
        RequestField(type=Text, about="SDXL, SD3, FLUX.1: as prompt_2", infotext="Negative prompt 2", only_some=True),
    ] = None
    original_size: Annotated[
        tuple[int, int] | None,
        RequestField(
            type=PixelSize, about='SDXL: "WIDTHxHEIGHT"; unset: size', infotext="Original size", only_some=True
        ),
    ] = None
    target_size: Annotated[
        tuple[int, int] | None,
        RequestField(type=PixelSize, about='SDXL: "WIDTHxHEIGHT"; or size', infotext="Target size", only_some=True),
    ] = None
    crop: Annotated[
        tuple[int, int],
        RequestField(type=Corner, about="SDXL: [left, top]; unset: [0, 0]", infotext="Crop", only_some=True),
    ] = (0, 0)
    n: Annotated[int, RequestField(type=whole(1, MAX_IMAGES))] = 1
    loras: LoraSet = ()
    controlnets: tuple[ControlRef, ...] = ()
    edit: Edit | None = None
    reference: RgbImage | None = None
    lora_policy: Annotated[LoraPolicy, RequestField(type=choice(LoraPolicy))] = LoraPolicy.EXACT
    lora_free_steps: Annotated[int, RequestField(type=whole(0), about="k of bounded_async")] = 0
    deadline_s: float | None = None
    partial_images: Annotated[int, RequestField(type=whole(0, 3))] = 0
    wants_progress: bool = False
    tenant: Tenant = Tenant()
    model: str = ""
    tried_again_s: float | None = None

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image."""
        return tuple(self.seed + i for i in range(self.n))

    @property
    def first_step(self) -> int:
        """The step of the schedule that it begins with: an edit leaves out the noisiest ones."""
        return 0 if self.edit is None else self.steps - self.edit.steps_of(self.steps)

    @property
    def run_steps(self) -> int:
        """How many of its `steps` run. What counts steps (`lora_free_steps`, ControlNets' start and end, progress)
        counts these."""
        return self.steps - self.first_step

    @property
    def calls(self) -> int:
        """How many denoiser calls its steps make."""
        per_step = self.scheduler.calls_per_step
        return per_step * self.run_steps - (per_step - 1)

    def steps_after(self, calls: int) -> int:
        """Return how many steps are complete after so many denoiser calls."""
        return self.run_steps if calls >= self.calls else calls // self.scheduler.calls_per_step

    @property
    def negative_clip_skip(self) -> int:
        """The layers that the text encoders leave out for the negative prompt: none in diffusers, in A1111 as many as
        for the prompt."""
        return self.clip_skip if self.prompt_syntax is PromptSyntax.A1111 else 0

    def loras_at(self, call: int) -> LoraSet:
        """Return the LoRA set whose weights denoiser call `call` (0-based) needs."""
        return () if call // self.scheduler.calls_per_step < self.lora_free_steps else self.loras


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where a request's time went, in seconds. `lora_s` is waiting for the set plus merging; the parts never overlap.

    `queue_s` waiting for the compute thread or for other groups' steps, `encode_s` prompt and control image,
    `denoise_s` the steps that the request took part in, `decode_s` VAE decode and image post-processing.
    """

    queue_s: float
    lora_s: float
    encode_s: float
    denoise_s: float
    decode_s: float
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageResult:
    """What a finished request returns. `flagged[i]`: the safety checker blacked out image i. `hints`: what may not be
    meant, for people."""

    request_id: str
    images: tuple[RgbImage, ...]
    seeds: tuple[int, ...]
    flagged: tuple[bool, ...]
    lora_policy: LoraPolicy
    lora_free_steps: int
    timings: Timings
    hints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`step` steps of `steps` are done."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """An image of the current estimate, `index` 0-based among the request's partial images."""

    index: int
    step: int
    image: RgbImage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finished:
    """The last event of a successful request."""

    result: ImageResult


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed:
    """The last event of a failed request; `error` is an `EngineError` (or a bug's own exception)."""

    error: Exception


Event: TypeAlias = Progress | Preview | Finished | Failed
