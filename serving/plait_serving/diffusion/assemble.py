"""The engine's composition root: base models, what they share, and the engine over them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch

from plait_kernels.threads import run_on_own_thread
from plait_serving.diffusion.bundle import Bundle
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.denoisers.unet import UNetDenoiser
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.source import LoraSource
from plait_serving.diffusion.lora.targets import LoraTargets, ModuleRef
from plait_serving.diffusion.memory import PROCESS_BYTES, available_bytes, memory_of
from plait_serving.diffusion.protocols import ControlNetClient, LoraProvider
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.residents.base_model import BaseModel, EngineContext, EngineSettings, resolve_device
from plait_serving.diffusion.residents.model_folder import FolderOfModels
from plait_serving.diffusion.residents.roster import ModelFactory, Roster, check_no_twin
from plait_serving.diffusion.values import ControlRef, ImageRequest, Tenant

__all__ = ["Assembled", "EngineSettings", "build_engine", "build_engine_of"]

_log = logging.getLogger(__name__)

_SHARE_FOR_MODELS = 0.8
"""Of the free memory, unless the configuration says how much: images, LoRAs and ControlNets need the rest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assembled:
    """A started engine and the parts of it that its surroundings use. The properties without a name are those of the
    first model."""

    engine: Engine
    roster: Roster

    @property
    def models(self) -> Mapping[str, BaseModel]:
        """The models that are served now."""
        return self.roster.models

    @property
    def loras(self) -> Mapping[str, LoraCache]:
        """Each model's LoRAs."""
        found = {name: model.served.loras for name, model in self.models.items()}
        return {name: cache for name, cache in found.items() if isinstance(cache, LoraCache)}

    @property
    def first(self) -> BaseModel:
        """The model that requests without one mean."""
        return next(iter(self.models.values()))

    @property
    def denoiser(self) -> UNetDenoiser:
        """The denoiser."""
        return self.first.denoiser

    @property
    def bundle(self) -> Bundle:
        """The weights."""
        return self.first.bundle

    @property
    def controlnets(self) -> Mapping[str, MovableControlNetClient]:
        """The clients of its ControlNets."""
        return self.first.controlnets

    def prepared_parts(self) -> frozenset[str]:
        """Return what runs on prepared programs now: "unet", "vae" and names of ControlNets that are in this
        process."""
        return frozenset[str]().union(*(model.prepared for model in self.models.values()))

    def warm_up(self) -> float:
        """Run each code path of the first model once, at the min size and for one step; return the seconds it took.

        An image with every ControlNet settles AUTO placement, too. A ControlNet that does not answer yet is logged: it
        may come up later. Raises any other error.
        """
        started_s = time.perf_counter()
        self.engine.generate(self._warmup_request(()))
        for name in self.controlnets:
            edge = self.first.outline.min_whole_edge
            image = np.zeros((edge, edge, 3), np.uint8)
            try:
                self.engine.generate(self._warmup_request((ControlRef(name=name, image=image),)))
            except ControlNetUnavailable as error:
                _log.warning("warm-up without ControlNet %s: %s", name, error)
        return time.perf_counter() - started_s

    def _warmup_request(self, controlnets: tuple[ControlRef, ...]) -> ImageRequest:
        return ImageRequest(
            request_id="warm-up",
            prompt="warm-up",
            width=self.first.outline.min_whole_edge,
            height=self.first.outline.min_whole_edge,
            steps=1,
            guidance_scale=5.0,
            seed=0,
            scheduler=self.first.served.samplers.default,
            controlnets=controlnets,
            tenant=Tenant(name=""),
        )


def build_engine(
    settings: EngineSettings,
    *,
    remote: Mapping[str, Callable[[], ControlNetClient]] | None = None,
    costs: StepCosts | None = None,
) -> Assembled:
    """Load one model, build the engine and start it. Raises `ModelError`.

    `remote[name]` makes a client of a ControlNet that runs as a service; without it, the ControlNet can only run in
    this process. `costs`: what is known of step times; None: nothing yet.
    """
    return build_engine_of({Path(settings.model).name: settings}, remote=remote, costs=costs)


def build_engine_of(
    models: Mapping[str, EngineSettings],
    *,
    memory_bytes: int | None = None,
    remote: Mapping[str, Callable[[], ControlNetClient]] | None = None,
    costs: StepCosts | None = None,
    folder: FolderOfModels | None = None,
) -> Assembled:
    """Build an engine of several models, of which the first is loaded, and start it. Another one that cannot be used is
    left out, with a line in the log; raises `ModelError` if it is the first.

    The settings differ in what is a model's own. `memory_bytes`: what those in memory may hold; None: a share of
    what is free. `folder`: more models with the settings of the first, which come and go with their folders.
    """
    return run_on_own_thread(lambda: _build(models, memory_bytes, remote or {}, costs, folder))


class _EngineState:
    """The engine, which its parts know of before it is made: the knobs in force, and whether it has no request."""

    def __init__(self, first: EngineKnobs) -> None:
        self._first = first
        self.engine: Engine | None = None
        self.roster: Roster | None = None

    def knobs(self) -> EngineKnobs:
        """Return the knobs in force."""
        return self._first if self.engine is None else self.engine.knobs

    def idle(self) -> bool:
        """Return whether the engine has no request."""
        return self.engine is not None and self.engine.is_idle

    def room_bytes(self) -> int:
        """Return what more models with requests may hold."""
        return sys.maxsize if self.engine is None else self.engine.residents.room_bytes()

    def look_for_models(self) -> None:
        """Look what is in the folder of models now."""
        if self.roster is not None:
            self.roster.look()

    def between_steps(self, function: Callable[[], None]) -> None:
        """Call `function` between two steps."""
        assert self.engine is not None
        self.engine.between_steps(function)


class _LoraCaches:
    """One cache of LoRA files for all models whose modules have equal names and shapes: what it parsed fits them
    all."""

    def __init__(self, host_bytes: int) -> None:
        self._host_bytes = host_bytes
        self._by_shapes: WeakValueDictionary[tuple[tuple[ModuleRef, tuple[int, ...]], ...], LoraCache]
        self._by_shapes = WeakValueDictionary()

    def __call__(self, targets: LoraTargets, source: LoraSource) -> LoraProvider:
        key = tuple(targets.parameters.items())
        found = self._by_shapes.get(key)
        if found is None:
            found = LoraCache(source, lambda name, path: parse(name, path, targets), host_bytes=self._host_bytes)
            self._by_shapes[key] = found
        return found

    def held_bytes(self) -> int:
        """Return what is in memory of all LoRAs."""
        return sum(cache.statistics().resident_bytes for cache in list(self._by_shapes.values()))


def _build(
    settings: Mapping[str, EngineSettings],
    memory_bytes: int | None,
    remote: Mapping[str, Callable[[], ControlNetClient]],
    costs: StepCosts | None,
    folder: FolderOfModels | None,
) -> Assembled:
    first = next(iter(settings.values()))
    state, caches = _EngineState(first.knobs), _LoraCaches(first.knobs.host_lora_bytes)
    is_alone, device = len(settings) == 1 and folder is None, torch.device(resolve_device(first.device))
    if not is_alone and memory_bytes is None:
        free = available_bytes(device) - PROCESS_BYTES
        memory_bytes = int(_SHARE_FOR_MODELS * max(0, free))
    around = EngineContext(
        knobs=state.knobs,
        is_idle=state.idle,
        between_steps=state.between_steps,
        remote=remote,
        loras=caches,
        is_alone=is_alone,
        room_bytes=state.room_bytes,
        free_bytes=None if memory_bytes is None else available_bytes(device) - memory_bytes,
    )
    models: dict[str, BaseModel] = {}
    refused: dict[str, str] = {}
    for name, each in settings.items():
        try:
            model = BaseModel(name, each, around, costs=costs)
            check_no_twin(model, models)
            models[name] = model
        except ModelError as error:
            if not models:
                raise
            refused[name] = error.message
            _log.error("%s is not served: %s", name, error.message)
    engine = Engine(
        models=[model.served for model in models.values()],
        knobs=first.knobs,
        clock=time.monotonic,
        memory_bytes=memory_bytes,
        memory=memory_of(device, excluded=caches.held_bytes),
        look_for_models=state.look_for_models,
    )
    state.engine = engine
    engine.reconfigure(first.knobs)  # the caches share what LoRAs may take
    engine.residents.load_first()
    engine.start()

    def make(name: str, found: Path) -> BaseModel:
        return BaseModel(name, replace(first, model=found, revision=None, config=None), around, costs=costs)

    factory = None if folder is None else ModelFactory(folder=folder, make=make, engine=engine)
    state.roster = Roster(models, factory, refused=refused)
    state.roster.look()
    return Assembled(engine=engine, roster=state.roster)
