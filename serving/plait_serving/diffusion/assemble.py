"""The engine's composition root: the only place that chooses implementations for its interfaces."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from plait_fabric.threads import run_on_own_thread
from plait_kernels.executors.audit import Auditor
from plait_kernels.executors.cuda_capture import CudaCapture
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.bundle import Bundle, load_bundle, resolve_source
from plait_serving.diffusion.controlnet.local import LocalControlNetClient
from plait_serving.diffusion.controlnet.model import load_controlnet
from plait_serving.diffusion.controlnet.placed import PlacedControlNetClient
from plait_serving.diffusion.controlnet.placement import StepTimes, measure, probe_sizes, time_step_s
from plait_serving.diffusion.decoding import Decoder
from plait_serving.diffusion.denoisers.graphed import graphed_halves
from plait_serving.diffusion.denoisers.row_wise import row_wise_halves
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.hub import fetch_from_hub
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.lora.formats import parse
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.source import ChainSource, LoraSource
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.memory import available_bytes, gigabytes, pixels_that_fit
from plait_serving.diffusion.preparation import (
    Preparer,
    auditor_for,
    default_prepared_folder,
    preparer_for,
    uses_graphs,
)
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient, StepCall
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.safety import safety_of
from plait_serving.diffusion.samplers import sampler_factory
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.takeover import Takeover
from plait_serving.diffusion.values import ControlRef, ImageRequest, Scheduler, Tenant

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to serve. "auto" as `device` and `dtype` means CUDA in float16 if available, otherwise the CPU in float32.

    `controlnets` maps names to diffusers folders; `safety_checker` False leaves out a folder's checker (logged).
    `limits`: what requests may ask for at most; the multiple that edges have is the model's own.
    `prepared_folder` keeps what executors converted; `converts` False uses what is there and converts nothing.
    `audit_every`: one program call in so many, and the first of each shape, is computed again by torch; 0: none.
    """

    model: str | Path
    revision: str | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembled:
    """A started engine and the parts of it that its surroundings use."""

    engine: Engine
    denoiser: UNetDenoiser
    bundle: Bundle
    loras: LoraCache
    controlnets: Mapping[str, PlacedControlNetClient]
    prepared: set[str]
    auditor: Auditor

    def prepared_parts(self) -> frozenset[str]:
        """Return what runs on prepared programs now: "unet", "vae" and names of ControlNets that are in this
        process."""
        return frozenset(self.prepared)

    def warm_up(self) -> float:
        """Run each code path once, at the min size and for one step; return the seconds it took.

        An image with every ControlNet settles AUTO placement, too. A ControlNet that does not answer yet is logged: it
        may come up later. Raises any other error.
        """
        started_s = time.perf_counter()
        self.engine.generate(self._warmup_request(()))
        for name in self.controlnets:
            image = np.zeros((self.bundle.min_whole_edge, self.bundle.min_whole_edge, 3), np.uint8)
            try:
                self.engine.generate(self._warmup_request((ControlRef(name=name, image=image),)))
            except ControlNetUnavailable as error:
                _log.warning("warm-up without ControlNet %s: %s", name, error)
        return time.perf_counter() - started_s

    def _warmup_request(self, controlnets: tuple[ControlRef, ...]) -> ImageRequest:
        return ImageRequest(
            request_id="warm-up",
            prompt="warm-up",
            width=self.bundle.min_whole_edge,
            height=self.bundle.min_whole_edge,
            steps=1,
            guidance_scale=5.0,
            seed=0,
            scheduler=Scheduler.EULER,
            controlnets=controlnets,
            tenant=Tenant(name=""),
        )


def build_engine(
    settings: EngineSettings,
    *,
    remote: Mapping[str, Callable[[], ControlNetClient]] | None = None,
    costs: StepCosts | None = None,
) -> Assembled:
    """Load the model, build the engine and start it. Raises `ModelError`.

    `remote[name]` makes a client of a ControlNet that runs as a service; without it, the ControlNet can only run in
    this process. `costs`: what is known of step times; None: nothing yet.
    """
    return run_on_own_thread(lambda: _build(settings, remote or {}, costs))


class _LiveKnobs:
    """The knobs in force: the engine may be reconfigured, and its parts are made before it is."""

    def __init__(self, first: EngineKnobs) -> None:
        self._first = first
        self.engine: Engine | None = None

    def __call__(self) -> EngineKnobs:
        return self._first if self.engine is None else self.engine.knobs

    def idle(self) -> bool:
        """Return whether the engine has no request."""
        return self.engine is not None and self.engine.is_idle


def _build(
    settings: EngineSettings, remote: Mapping[str, Callable[[], ControlNetClient]], costs: StepCosts | None
) -> Assembled:
    folder = resolve_source(settings.model, settings.revision, fetch_from_hub)
    knobs = _LiveKnobs(settings.knobs)
    auditor = auditor_for(settings.audit_every, cache=settings.prepared_folder, idle=knobs.idle)
    takeover = Takeover(preparer := _preparer(settings, knobs, auditor), folder)
    bundle = _bundle(settings, folder, mapped=takeover.mapped)
    weights = takeover.unet_weights(bundle)
    texts = {f"text_encoder{'' if i == 0 else f'_{i + 1}'}": part for i, part in enumerate(bundle.text_encoders)}
    merger, text_merger = Merger({"unet": bundle.unet}, before_write=weights.take), Merger(texts)
    denoiser = UNetDenoiser(
        bundle,
        text_version=lambda: text_merger.version,
        exact=lambda: knobs().exact,
        weights=weights,
        vae_weights=takeover.vae_weights(bundle),
    )
    takeover.adopt(denoiser)
    if uses_graphs(settings.executor, bundle.device):
        denoiser.adopt(graphed_halves(bundle.unet, CudaCapture(bundle.device)))
    elif preparer is None and bundle.device.type == "cpu" and bundle.dtype is torch.float32:
        denoiser.adopt_row_wise(row_wise_halves(bundle.unet))
    loras = _loras(settings, LoraTargets.of({"unet": bundle.unet, **texts}))
    controlnets = _controlnets(settings, remote, knobs, denoiser, bundle, preparer, takeover.prepared)
    engine = Engine(
        denoiser=denoiser,
        stepper=Stepper(
            denoiser=denoiser,
            merger=merger,
            text_merger=text_merger,
            sampler_factory=sampler_factory(bundle),
            controlnets=controlnets,
            clock=time.monotonic,
        ),
        decoder=Decoder(denoiser, safety_of(bundle)),
        loras=loras,
        controlnets=controlnets,
        switch_cost_s=merger.switch_cost_s,
        limits=_limits(bundle, settings.limits),
        knobs=settings.knobs,
        clock=time.monotonic,
        costs=costs,
    )
    knobs.engine = engine
    engine.start()
    if settings.converts:
        takeover.convert_behind(engine, denoiser, merger=merger, weights=weights)
    return Assembled(
        engine=engine,
        denoiser=denoiser,
        bundle=bundle,
        loras=loras,
        controlnets=controlnets,
        prepared=takeover.prepared,
        auditor=auditor,
    )


def _controlnets(  # noqa: PLR0917
    settings: EngineSettings,
    remote: Mapping[str, Callable[[], ControlNetClient]],
    knobs: _LiveKnobs,
    denoiser: UNetDenoiser,
    bundle: Bundle,
    preparer: Preparer | None,
    prepared: set[str],
) -> dict[str, PlacedControlNetClient]:
    """Return a client for each ControlNet, which runs here or as a service."""
    return {
        name: PlacedControlNetClient(
            name,
            local=_local_factory(
                name,
                controlnet,
                bundle,
                preparer,
                prepared,
                graphs=uses_graphs(settings.executor, bundle.device),
            ),
            remote=remote.get(name),
            wanted=lambda: knobs().controlnet_placement,
            measure=lambda here, there: _measure(here, there, denoiser, bundle),
        )
        for name, controlnet in settings.controlnets.items()
    }


def _preparer(settings: EngineSettings, knobs: Callable[[], EngineKnobs], auditor: Auditor) -> Preparer | None:
    device = resolve_device(settings.device)
    return preparer_for(
        settings.executor,
        device=device,
        dtype=resolve_dtype(settings.dtype, device),
        threads=lambda: knobs().threads,
        cache=settings.prepared_folder,
        auditor=auditor,
    )


def _bundle(settings: EngineSettings, folder: Path, *, mapped: bool) -> Bundle:
    device = resolve_device(settings.device)
    dtype = resolve_dtype(settings.dtype, device)
    if not settings.safety_checker:
        _log.warning("the safety checker is switched off")
    return load_bundle(folder, dtype=dtype, device=device, safety_checker=settings.safety_checker, mapped=mapped)


def _loras(settings: EngineSettings, targets: LoraTargets) -> LoraCache:
    return LoraCache(
        settings.lora_source, lambda name, path: parse(name, path, targets), host_bytes=settings.knobs.host_lora_bytes
    )


def _local_factory(
    name: str, folder: Path, bundle: Bundle, preparer: Preparer | None, prepared: set[str], *, graphs: bool
) -> Callable[[], ControlNetClient]:
    def make() -> ControlNetClient:
        runner = load_controlnet(
            folder,
            base=bundle.config,
            vae_factor=bundle.vae_factor,
            dtype=bundle.dtype,
            device=str(bundle.device),
            preparer=preparer,
            adopted=lambda: prepared.add(name),
            graphs=graphs,
        )
        return LocalControlNetClient(name, runner)

    return make


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


def _limits(bundle: Bundle, wanted: ImageLimits) -> ImageLimits:
    """Return what requests may ask for: at most what is wanted, in sizes that the model can take and that the memory
    which is left can hold."""
    limits = replace(wanted, size_multiple=bundle.size_multiple, min_edge_px=bundle.size_multiple)
    free, native = available_bytes(bundle.device), bundle.width * bundle.height
    pixels = pixels_that_fit(bundle.decoding_bytes_per_pixel, free, native=native, limit=limits.max_pixels)
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
