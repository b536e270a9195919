"""The engine's composition root: base models, what they share, and the engine over them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch

from plait_kernels.threads import run_on_own_thread
from plait_serving.diffusion.controlnet.movable_client import MovableControlNetClient
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import ControlNetUnavailable, ModelError
from plait_serving.diffusion.families import open_family
from plait_serving.diffusion.families.encoders import SharedEncoders
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.lora.cache import LoraCache
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.memory import PROCESS_BYTES, available_bytes, memory_of, resolve_device
from plait_serving.diffusion.models.folder import FolderOfModels
from plait_serving.diffusion.models.model import Model, image_limits
from plait_serving.diffusion.protocols import ControlNetClient
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.sources.file_kinds import stem_of
from plait_serving.diffusion.sources.resolve import conversion, resolve_source
from plait_serving.diffusion.values import ControlRef, ImageRequest, Tenant

__all__ = ["EngineSettings", "build_engine", "build_engine_of", "check_model", "warm_up"]

_log = logging.getLogger(__name__)

_SHARE_FOR_MODELS = 0.8
"""Of the free memory, unless the configuration says how much: images, LoRAs and ControlNets need the rest."""

Remote: TypeAlias = Mapping[str, Callable[[], ControlNetClient]]
"""What makes a client of each ControlNet that is a service."""


def build_engine(settings: EngineSettings, *, remote: Remote | None = None, costs: StepCosts | None = None) -> Engine:
    """Load one model, build the engine and start it. Raises `ModelError`.

    `remote[name]` makes a client of a ControlNet that runs as a service; without it, the ControlNet can only run in
    this process. `costs`: what is known of step times; None: nothing yet.
    """
    return build_engine_of({Path(settings.model).name: settings}, remote=remote, costs=costs)


def build_engine_of(
    models: Mapping[str, EngineSettings],
    *,
    memory_bytes: int | None = None,
    remote: Remote | None = None,
    costs: StepCosts | None = None,
    folder: FolderOfModels | None = None,
) -> Engine:
    """Build an engine of several models, of which the first is loaded, and start it. Another one that cannot be used is
    left out, with a line in the log; raises `ModelError` if it is the first.

    The settings differ in what is a model's own. `memory_bytes`: what those in memory may hold; None: a share of
    what is free. `folder`: more models with the settings of the first, which come and go with their folders.
    """

    def build() -> Engine:
        first, may_hold, is_alone = next(iter(models.values())), memory_bytes, len(models) == 1 and folder is None
        device = torch.device(resolve_device(first.device))
        if not is_alone and may_hold is None:
            may_hold = int(_SHARE_FOR_MODELS * max(0, available_bytes(device) - PROCESS_BYTES))
        loras: WeakValueDictionary[Hashable, LoraCache] = WeakValueDictionary()
        memory = memory_of(
            device, excluded=lambda: sum(each.statistics().resident_bytes for each in list(loras.values()))
        )
        engine = Engine(knobs=first.knobs, clock=time.monotonic, memory_bytes=may_hold, memory=memory)
        host = Host(
            knobs=lambda: engine.knobs,
            room_bytes=engine.pool.room_bytes,
            is_idle=lambda: engine.is_idle,
            between_steps=engine.between_steps,
            encoders=engine.pool.encoders,
        )
        free_bytes = None if may_hold is None else available_bytes(device) - may_hold
        maker = _Maker(
            host=host, loras=loras, remote=remote or {}, costs=costs, is_alone=is_alone, free_bytes=free_bytes
        )
        for name, each in models.items():
            try:
                engine.pool.add(maker.make(name, each))
            except ModelError as error:
                if not engine.pool.models:
                    raise
                engine.pool.refuse(name, error.message)
        engine.pool.load_first()
        engine.start()
        if folder is not None:
            one = replace(first, revision=None, config=None)
            engine.pool.watch(folder, lambda name, found: maker.make(name, replace(one, model=found)))
        return engine

    return run_on_own_thread(build)


def warm_up(engine: Engine) -> float:
    """Run each code path of the first model once, at the min size and for one step; return the seconds it took.

    An image with every ControlNet, and another one: with AUTO at each place. A ControlNet that does not answer yet is
    logged: it may come up later. Raises any other error.
    """
    started_s, model = time.perf_counter(), engine.pool.first
    edge = model.family.min_whole_edge
    request = ImageRequest(
        request_id="warm-up",
        prompt="a",
        width=edge,
        height=edge,
        steps=1,
        guidance_scale=model.family.terms.guidance_scale,
        seed=0,
        scheduler=model.family.terms.samplers.default,
        tenant=Tenant(name=""),
    )
    engine.generate(request)
    for name in (*model.controlnets, *model.controlnets):
        image = np.zeros((edge, edge, 3), np.uint8)
        try:
            engine.generate(replace(request, controlnets=(ControlRef(name=name, image=image),)))
        except ControlNetUnavailable as error:
            _log.warning("warm-up without ControlNet %s: %s", name, error)
    return time.perf_counter() - started_s


def check_model(settings: EngineSettings) -> None:
    """Raise `ModelError` for a folder, or a checkpoint in one file, that no engine of these settings would load, as far
    as all but the weights tell: nothing is written or fetched."""
    path = Path(settings.model)
    if stem_of(path.name) is not None and not path.is_dir():
        conversion(path, settings.config)
        return
    with _told(path):
        open_family(path, settings, Host(knobs=lambda: settings.knobs, encoders=SharedEncoders()))


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raise what a configuration makes of the code that reads it as `ModelError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{folder}: its configuration is damaged: {error!r}") from error


@dataclass(slots=True, kw_only=True)
class _Maker:
    """Makes the models of one engine, and keeps what they share: LoRA files, and ControlNets that run in this process.

    `loras`: a cache for all models whose modules have equal names and shapes: what it parsed fits them all. `is_alone`:
    it makes one only. `free_bytes`: what is left beside all that models may take; None: that has no bound."""

    host: Host
    loras: WeakValueDictionary[Hashable, LoraCache]
    remote: Remote
    costs: StepCosts | None
    is_alone: bool
    free_bytes: int | None
    _local: WeakValueDictionary[Path, ControlNetClient] = field(default_factory=WeakValueDictionary)

    def make(self, name: str, settings: EngineSettings) -> Model:
        """Read a model's folder, without its weights. Raises `ModelError`."""
        cache = settings.prepared_folder.parent
        folder = resolve_source(settings.model, settings.revision, config=settings.config, cache=cache)
        with _told(folder):
            return self._made(name, folder, settings)

    def _made(self, name: str, folder: Path, settings: EngineSettings) -> Model:
        family = open_family(folder, settings, self.host)
        unfit: dict[str, str] = {}
        if not self.is_alone:  # alone, it is an error that one is unfit, and said when it is first used
            found = {net: family.why_unfit(folder) for net, folder in settings.controlnets.items()}
            unfit = {net: why for net, why in found.items() if why is not None}
        fit = {net: folder for net, folder in settings.controlnets.items() if net not in unfit}
        return Model(
            name=name,
            family=family,
            limits=image_limits(family, settings.limits, self._left_bytes(family)),
            loras=self._loras_of(family.lora_targets, settings),
            costs=StepCosts() if self.costs is None else self.costs,
            controlnets={net: self._controlnet(net, folder, family) for net, folder in fit.items()},
            unfit=unfit,
        )

    def _left_bytes(self, family: Family) -> int:
        """Return what images may take: what is left beside the model, or beside all that may be in memory."""
        if self.free_bytes is not None:
            return self.free_bytes
        return available_bytes(family.device) - family.weights_bytes - family.shared_bytes()

    def _loras_of(self, targets: LoraTargets, settings: EngineSettings) -> LoraCache:
        key = tuple(targets.parameters.items())
        found = self.loras.get(key)
        if found is None:
            found = self.loras[key] = LoraCache(
                settings.lora_source, partial(parse, targets=targets), host_bytes=settings.knobs.host_lora_bytes
            )
        return found

    def _controlnet(self, name: str, folder: Path, family: Family) -> MovableControlNetClient:
        return MovableControlNetClient(
            name,
            local=partial(self._here, name, folder, family),
            remote=self.remote.get(name),
            wanted=lambda: self.host.knobs().controlnet_placement,
        )

    def _here(self, name: str, folder: Path, family: Family) -> ControlNetClient:
        """Return the client of a ControlNet in this process, one for all models of the family."""
        client = self._local.get(folder)
        if client is None:
            client = self._local[folder] = family.controlnet(name, folder)
        return client
