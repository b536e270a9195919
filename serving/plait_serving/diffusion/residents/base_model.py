"""One base model, made from its settings: what is always here, and what `load` brings into memory and may leave again.

The only place that chooses implementations for a model's interfaces.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from plait_kernels.executors.cuda_capture import CudaCapture
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.bundle import Bundle, check_controlnet, load_bundle
from plait_serving.diffusion.controlnet.local import LocalControlNetClient
from plait_serving.diffusion.controlnet.model import load_controlnet
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.controlnet.placement import StepTimes, measure, probe_sizes, time_step_s
from plait_serving.diffusion.decoding import Decoder, safety_of
from plait_serving.diffusion.denoisers.compiled import graphed_halves, row_wise_halves
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.emulation import warn_of_emulation
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.source import ChainSource, LoraSource
from plait_serving.diffusion.lora.targets import LoraTargets, components_of
from plait_serving.diffusion.memory import available_bytes, gigabytes, pixels_that_fit
from plait_serving.diffusion.preparation import (
    Preparer,
    auditor_for,
    default_prepared_folder,
    preparer_for,
    uses_graphs,
)
from plait_serving.diffusion.program_switch import ProgramSwitch
from plait_serving.diffusion.prompt import PromptEncoder
from plait_serving.diffusion.prompt_tokens import PromptTokens
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient, LoraProvider, StepCall
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.forecast import WorkForecast
from plait_serving.diffusion.residents.model import ModelParts, ServedModel
from plait_serving.diffusion.samplers import sampler_factory, samplers_of
from plait_serving.diffusion.sources.resolve import resolve_source
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.values import ImageRequest, Scheduler

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to serve. "auto" as `device` and `dtype` means CUDA in float16 if available, otherwise the CPU in float32.

    `config`: the folder with a single file's configurations, if they are not the published ones.
    `controlnets` maps names to diffusers folders; `safety_checker` False leaves out a folder's checker (logged).
    `limits`: what requests may ask for at most; the multiple that edges have is the model's own.
    `prepared_folder` keeps what executors converted; `converts` False uses what is there and converts nothing.
    `audit_every`: one program call in so many, and the first of each shape, is computed again by torch; 0: none.
    """

    model: str | Path
    revision: str | None = None
    config: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    safety_checker: bool = True
    lora_source: LoraSource = field(default_factory=lambda: ChainSource(()))
    controlnets: Mapping[str, Path] = field(default_factory=dict)
    knobs: EngineKnobs = field(default_factory=EngineKnobs)
    limits: ImageLimits = field(default_factory=ImageLimits)
    executor: ExecutorName = ExecutorName.AUTO
    prepared_folder: Path = field(default_factory=default_prepared_folder)
    converts: bool = True
    audit_every: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What a model needs of the engine that it is in. `remote[name]` makes a client of a ControlNet that is a service;
    `local` keeps the clients of those that run in this process, which models of a family share; `loras` returns the
    provider for a model of such targets. `is_alone`: it has no other model. `room_bytes`: what programs of one that has
    requests may still take. `free_bytes`: what is left beside all that models may take; None: what can be allocated."""

    knobs: Callable[[], EngineKnobs]
    is_idle: Callable[[], bool]
    between_steps: Callable[[Callable[[], None]], None]
    remote: Mapping[str, Callable[[], ControlNetClient]]
    loras: Callable[[LoraTargets, LoraSource], LoraProvider]
    is_alone: bool = True
    room_bytes: Callable[[], int] = lambda: sys.maxsize
    free_bytes: int | None = None
    local: WeakValueDictionary[Path, LocalControlNetClient] = field(default_factory=WeakValueDictionary)


class BaseModel:
    """Makes a `ServedModel`. `denoiser` and `bundle` are those in memory now; `unfit` says of ControlNets, by name, why
    they are not for it."""

    def __init__(self, name: str, settings: EngineSettings, around: EngineContext, *, costs: StepCosts | None) -> None:
        """Read the model's folder, its weights only if it is alone. Raises `ModelError`. `costs`: what is known of step
        times."""
        self._settings = settings
        self._around = around
        self.folder = resolve_source(
            settings.model, settings.revision, config=settings.config, cache=settings.prepared_folder.parent
        )
        self._device = resolve_device(settings.device)
        self._dtype = resolve_dtype(settings.dtype, self._device)
        if self._device == "cpu" and self._dtype is torch.bfloat16:
            warn_of_emulation()
        self.prepared: set[str] = set()
        self.unfit: dict[str, str] = {}
        self.auditor = auditor_for(settings.audit_every, cache=settings.prepared_folder, idle=around.is_idle)
        self._preparer = self._make_preparer()
        self.outline = self._bundle(outline=True)
        self._ready = self._read() if around.is_alone else None
        self._tokens = PromptTokens(self.outline.tokenizers, max_words=settings.limits.max_prompt_tokens)
        self._denoiser: UNetDenoiser | None = None
        self._loaded: Bundle | None = None
        self.controlnets = self._controlnets()
        costs = StepCosts() if costs is None else costs
        self.served = ServedModel(
            name=name,
            limits=image_limits(self.outline, settings.limits, around.free_bytes),
            loras=around.loras(
                LoraTargets.of(components_of(self.outline.unet, self.outline.text_encoders)), settings.lora_source
            ),
            controlnets=self.controlnets,
            measure=PromptEncoder(self.outline, tokens=self._tokens).size,
            load=self._load,
            leave=self._leave,
            close=self._close,
            nbytes=self.outline.weights_bytes,
            costs=costs,
            forecast=WorkForecast(costs),
            samplers=samplers_of(self.outline.scheduler_config),
        )

    @property
    def denoiser(self) -> UNetDenoiser:
        """The denoiser; the model is resident."""
        assert self._denoiser is not None
        return self._denoiser

    @property
    def bundle(self) -> Bundle:
        """The weights; the model is resident."""
        assert self._loaded is not None
        return self._loaded

    def _load(self) -> ModelParts:
        """Bring the weights into memory, with the programs that were prepared before."""
        takeover, bundle = self._ready or self._read()
        self._ready = None
        weights = takeover.unet_weights(bundle)
        components = components_of(bundle.unet, bundle.text_encoders)
        texts = {name: part for name, part in components.items() if name != "unet"}
        merger, text_merger = Merger({"unet": bundle.unet}, before_write=weights.take), Merger(texts)
        denoiser = UNetDenoiser(
            bundle,
            text_version=lambda: text_merger.version,
            exact=lambda: self._around.knobs().exact,
            weights=weights,
            vae_weights=takeover.vae_weights(bundle),
            tokens=self._tokens,
        )
        takeover.adopt(denoiser, self.prepared)
        if uses_graphs(self._settings.executor, bundle.device):
            denoiser.adopt(graphed_halves(bundle.unet, CudaCapture(bundle.device)))
        elif self._preparer is None and bundle.device.type == "cpu" and bundle.dtype is torch.float32:
            denoiser.adopt_row_wise(row_wise_halves(bundle.unet))
        stepper = Stepper(
            denoiser=denoiser,
            merger=merger,
            text_merger=text_merger,
            sampler_factory=sampler_factory(bundle),
            controlnets=self.controlnets,
            clock=time.monotonic,
        )
        self._loaded, self._denoiser = bundle, denoiser
        if self._settings.converts:
            takeover.convert_behind(
                self._around.between_steps, denoiser, merger=merger, weights=weights, prepared=self.prepared
            )
        return ModelParts(
            stepper=stepper, decoder=Decoder(denoiser, safety_of(bundle)), switch_cost_s=merger.switch_cost_s
        )

    def _read(self) -> tuple[ProgramSwitch, Bundle]:
        takeover = ProgramSwitch(self._preparer, self.folder)
        return takeover, self._bundle(mapped=takeover.mapped)

    def _leave(self) -> None:
        """Let go of the weights."""
        self._loaded = self._denoiser = None
        self.prepared -= {"unet", "vae"}
        self.auditor.forget()

    def _close(self) -> None:
        """Let go of clients, and of what refers back to here: memory is free at once, not at a garbage collection."""
        for client in self.controlnets.values():
            client.shutdown()
        self.controlnets, self.served.controlnets = {}, {}
        self.served.load = self.served.leave = self.served.close = _has_left

    def _bundle(self, *, mapped: Collection[str] = (), outline: bool = False) -> Bundle:
        return load_bundle(
            self.folder,
            dtype=self._dtype,
            device=self._device,
            safety_checker=self._settings.safety_checker,
            mapped=mapped,
            outline=outline,
            tokenizers=() if outline else self.outline.tokenizers,
        )

    def _make_preparer(self) -> Preparer | None:
        around = self._around
        return preparer_for(
            self._settings.executor,
            device=self._device,
            dtype=self._dtype,
            threads=lambda: around.knobs().threads,
            cache=self._settings.prepared_folder,
            auditor=self.auditor,
            room_bytes=around.room_bytes,
        )

    def _controlnets(self) -> dict[str, MovableControlNetClient]:
        """Return a client for each ControlNet that fits the model; each runs here or as a service."""
        return {
            name: MovableControlNetClient(
                name,
                local=partial(self._local, name, folder),
                remote=self._around.remote.get(name),
                wanted=lambda: self._around.knobs().controlnet_placement,
                measure=lambda here, there: _measure(here, there, self.denoiser, self.bundle),
            )
            for name, folder in self._settings.controlnets.items()
            if self._takes(name, folder)
        }

    def _takes(self, name: str, folder: Path) -> bool:
        """Return whether a ControlNet is one for this model, as far as its folder says; if not, `unfit` says why."""
        if self._around.is_alone:
            return True  # then it is an error that it is not, and said when it is first used
        try:
            check_controlnet(folder, base=self.outline.config, vae_factor=self.outline.vae_factor)
        except ModelError as error:
            self.unfit[name] = error.message
            return False
        return True

    def _local(self, name: str, folder: Path) -> ControlNetClient:
        """Return the client of a ControlNet in this process, one for all models of the family."""
        client = self._around.local.get(folder)
        if client is None:
            runner = load_controlnet(
                folder,
                base=self.outline.config,
                vae_factor=self.outline.vae_factor,
                dtype=self._dtype,
                device=self._device,
                preparer=self._preparer,
                adopted=lambda: self.prepared.add(name),
                graphs=uses_graphs(self._settings.executor, self.outline.device),
            )
            client = self._around.local[folder] = LocalControlNetClient(name, runner)
        return client


def _has_left() -> Any:
    """Do nothing: in place of what refers to the model."""


def _measure(local: ControlNetClient, remote: ControlNetClient, denoiser: UNetDenoiser, bundle: Bundle) -> StepTimes:
    """Time one guided image's step with the ControlNet at both places."""
    sizes = probe_sizes(bundle.width, bundle.height, multiple=bundle.size_multiple)
    return measure(lambda size: _times_at(size, local, remote, denoiser, bundle), sizes)


def _times_at(
    size: tuple[int, int], local: ControlNetClient, remote: ControlNetClient, denoiser: UNetDenoiser, bundle: Bundle
) -> StepTimes:
    width, height = size
    request = ImageRequest(
        request_id="measure", prompt="", width=width, height=height, steps=1, guidance_scale=5.0, seed=0,
        scheduler=Scheduler.EULER,
    )  # fmt: skip
    conditioning = denoiser.prepare(request)
    sample = torch.zeros(1, *denoiser.latent_shape(width, height), dtype=bundle.dtype, device=bundle.device)
    timestep = torch.tensor(500, device=bundle.device)
    extra = sample.new_zeros(1, bundle.extra_channels, *sample.shape[2:]) if bundle.inpaints else None
    step = StepCall(
        conditioning=conditioning, sample=sample, timestep=timestep, guidance_scale=5.0, controls=(), extra=extra
    )

    def step_s(client: ControlNetClient) -> float:
        image = np.zeros((height, width, 3), np.uint8)
        session = client.open(image=image, conditioning=conditioning, width=width, height=height)
        call = ControlCall(session=session, sample=torch.cat([sample, sample]), timestep=timestep, scale=1.0)
        try:
            return time_step_s(client, call, encoder=lambda: denoiser.run_encoder_half([step]))
        finally:
            client.close(session)

    return StepTimes(local_s=step_s(local), remote_s=step_s(remote))


def image_limits(outline: Bundle, wanted: ImageLimits, free_bytes: int | None) -> ImageLimits:
    """Return what requests may ask for: at most what is wanted, in sizes that the model can take and that the free
    memory can hold."""
    limits = replace(wanted, size_multiple=outline.size_multiple, min_edge_px=outline.size_multiple)
    free, native = free_bytes, outline.width * outline.height
    free = max(0, available_bytes(outline.device) if free is None else free)
    pixels = pixels_that_fit(outline.decoding_bytes_per_pixel, free, native=native, limit=limits.max_pixels)
    if pixels < limits.max_pixels:
        _log.info("images of at most %d pixels: %s of memory are left", pixels, gigabytes(free))
    return replace(limits, max_pixels=pixels)


def resolve_device(device: str) -> str:
    """Return what "auto" means here: CUDA if available, otherwise the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_dtype(dtype: str, device: str) -> torch.dtype:
    """Return what "auto" means on a device: float16 with CUDA, otherwise float32."""
    if dtype != "auto":
        return _DTYPES[dtype]
    return torch.float16 if device.startswith("cuda") else torch.float32
