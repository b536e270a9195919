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
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.bundle import Bundle, load_bundle
from plait_serving.diffusion.bundle import load_controlnet as check_and_load_controlnet
from plait_serving.diffusion.controlnet.local import LocalControlNetClient
from plait_serving.diffusion.controlnet.model import ControlNetModelRunner
from plait_serving.diffusion.controlnet.placed import PlacedControlNetClient
from plait_serving.diffusion.controlnet.placement import StepTimes, measure
from plait_serving.diffusion.decoding import Decoder
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.lora.formats import parse
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.source import ChainSource, LoraSource
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.memory import available_bytes, gigabytes, pixels_that_fit
from plait_serving.diffusion.protocols import ControlCall, ControlNetClient, StepCall
from plait_serving.diffusion.safety import safety_of
from plait_serving.diffusion.samplers import sampler_factory
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.values import ControlRef, ImageRequest, Scheduler

_log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What to serve. "auto" as `device` and `dtype` means CUDA in float16 if available, otherwise the CPU in float32.

    `controlnets` maps names to diffusers folders; `safety_checker` False leaves out a folder's checker (logged).
    """

    model: str | Path
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    safety_checker: bool = True
    lora_source: LoraSource = field(default_factory=lambda: ChainSource(()))
    controlnets: Mapping[str, Path] = field(default_factory=dict)
    knobs: EngineKnobs = field(default_factory=EngineKnobs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembled:
    """A started engine and the parts of it that its surroundings use."""

    engine: Engine
    denoiser: UNetDenoiser
    bundle: Bundle
    loras: LoraCache
    controlnets: Mapping[str, PlacedControlNetClient]

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
        )


def build_engine(
    settings: EngineSettings, *, remote: Mapping[str, Callable[[], ControlNetClient]] | None = None
) -> Assembled:
    """Load the model, build the engine and start it. Raises `ModelError`.

    `remote[name]` makes a client of a ControlNet that runs as a service; without it, the ControlNet can only run in
    this process.
    """
    return run_on_own_thread(lambda: _build(settings, remote or {}))


def _build(settings: EngineSettings, remote: Mapping[str, Callable[[], ControlNetClient]]) -> Assembled:
    device = _resolve_device(settings.device)
    dtype = _resolve_dtype(settings.dtype, device)
    bundle = load_bundle(
        settings.model, revision=settings.revision, dtype=dtype, device=device, safety_checker=settings.safety_checker
    )
    if not settings.safety_checker:
        _log.warning("the safety checker is switched off")
    components = {"unet": bundle.unet}
    components |= {f"text_encoder{'' if i == 0 else f'_{i + 1}'}": part for i, part in enumerate(bundle.text_encoders)}
    targets = LoraTargets.of(components)
    merger = Merger(components)
    # The engine may be reconfigured: what the parts ask of its knobs is read from it, once there is one.
    engines: list[Engine] = []

    def knobs() -> EngineKnobs:
        return engines[0].knobs if engines else settings.knobs

    denoiser = UNetDenoiser(bundle, exact=lambda: knobs().exact)
    loras = LoraCache(
        settings.lora_source, lambda name, path: parse(name, path, targets), host_bytes=settings.knobs.host_lora_bytes
    )
    controlnets = {
        name: PlacedControlNetClient(
            name,
            local=_local_factory(name, folder, bundle),
            remote=remote.get(name),
            wanted=lambda: knobs().controlnet_placement,
            measure=lambda here, there: _measure(here, there, denoiser, bundle),
        )
        for name, folder in settings.controlnets.items()
    }
    engine = Engine(
        stepper=Stepper(
            denoiser=denoiser,
            merger=merger,
            sampler_factory=sampler_factory(bundle),
            controlnets=controlnets,
            clock=time.monotonic,
        ),
        decoder=Decoder(denoiser, safety_of(bundle)),
        loras=loras,
        controlnets=controlnets,
        switch_cost_s=merger.switch_cost_s,
        limits=_limits(bundle),
        knobs=settings.knobs,
        clock=time.monotonic,
    )
    engines.append(engine)
    engine.start()
    return Assembled(engine=engine, denoiser=denoiser, bundle=bundle, loras=loras, controlnets=controlnets)


def _local_factory(name: str, folder: Path, bundle: Bundle) -> Callable[[], ControlNetClient]:
    def make() -> ControlNetClient:
        net = check_and_load_controlnet(
            folder, base=bundle.config, vae_factor=bundle.vae_factor, dtype=bundle.dtype, device=str(bundle.device)
        )
        return LocalControlNetClient(name, ControlNetModelRunner(net))

    return make


def _measure(local: ControlNetClient, remote: ControlNetClient, denoiser: UNetDenoiser, bundle: Bundle) -> StepTimes:
    """Time one guided image's step at both places, with the UNet's encoder half beside the remote one."""
    request = ImageRequest(
        request_id="measure", prompt="", width=bundle.width, height=bundle.height, steps=1, guidance_scale=5.0, seed=0,
        scheduler=Scheduler.EULER,
    )  # fmt: skip
    conditioning = denoiser.prepare(request)
    sample = torch.zeros(
        1, *denoiser.latent_shape(bundle.width, bundle.height), dtype=bundle.dtype, device=bundle.device
    )
    timestep = torch.tensor(500, device=bundle.device)
    image = np.zeros((bundle.height, bundle.width, 3), np.uint8)
    sides = []
    for client in (local, remote):
        session = client.open(image=image, conditioning=conditioning, width=bundle.width, height=bundle.height)
        call = ControlCall(session=session, sample=torch.cat([sample, sample]), timestep=timestep, scale=1.0)
        sides.append((client, call))
    step = StepCall(conditioning=conditioning, sample=sample, timestep=timestep, guidance_scale=5.0, controls=())
    try:
        return measure(local=sides[0], remote=sides[1], encoder=lambda: denoiser.run_encoder_half([step]))
    finally:
        for client, call in sides:
            client.close(call.session)


def _limits(bundle: Bundle) -> ImageLimits:
    """Return what requests may ask for: sizes that the model can take and that the memory which is left can hold."""
    limits = ImageLimits(size_multiple=bundle.size_multiple, min_edge_px=bundle.size_multiple)
    free, native = available_bytes(bundle.device), bundle.width * bundle.height
    pixels = pixels_that_fit(bundle.decoding_bytes_per_pixel, free, native=native, limit=limits.max_pixels)
    if pixels < limits.max_pixels:
        _log.info("images of at most %d pixels: %s of memory are left", pixels, gigabytes(free))
    return replace(limits, max_pixels=pixels)


def _resolve_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def _resolve_dtype(dtype: str, device: str) -> torch.dtype:
    if dtype != "auto":
        return _DTYPES[dtype]
    return torch.float16 if device.startswith("cuda") else torch.float32
