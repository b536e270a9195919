"""The engine of an `images` section as an image service, for both the engine's replica and `plait generate`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from plait_disagg.queue.scale import Gauge
from plait_kernels.cores import usable_cores
from plait_serving.cores import capped, socket_folder, threads_of_host
from plait_serving.deployments.images.counted import counted
from plait_serving.deployments.images.lora_cards import LoraCards
from plait_serving.deployments.ray_internals import given_knobs
from plait_serving.deployments.scaling import engine_pressure
from plait_serving.diffusion.admission import ImageLimits, nearest_size
from plait_serving.diffusion.assemble import Remote, build_engine_of, warm_up
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.lora.source import FolderSource, LoraSource, NoLoras
from plait_serving.diffusion.models.folder import FolderOfModels
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.settings import EngineSettings
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest
from plait_serving.health import Health
from plait_serving.images.config import ImagesSection
from plait_serving.images.routing import ReplicaState
from plait_serving.images.service import AliasCard, BaseModelCard, Catalog, ControlNetCard
from plait_serving.replica_metrics import ReplicaMetrics

if TYPE_CHECKING:
    from plait_serving.deployments.fabric_endpoints import ServeReplicas
    from plait_serving.diffusion.protocols import ControlNetClient

_log = logging.getLogger(__name__)

_CONTROLNETS_TIMEOUT_S = 120.0
"""Time to load torch and a ControlNet next to the base model, on two busy cores: all deployments start at once."""
_POLL_S = 0.5


def open_images(controlnets: Mapping[str, Any], *, images: ImagesSection) -> HostedImages:
    """Load the models and make the warm-up images, with the replica's knobs. `controlnets`: Serve handles of those that
    are deployments.

    Raises `ModelError`.
    """
    images = images.model_copy(update={"knobs": EngineKnobs.model_validate(given_knobs())})
    reached = {name: _reached(name, handle) for name, handle in controlnets.items()}
    hosted = load_images(images, {name: client for name, (_, client) in reached.items()})
    services = {name: service for name, (service, _) in reached.items()}
    until_s = time.monotonic() + _CONTROLNETS_TIMEOUT_S  # a placement measured before they are up would stay wrong
    missing = list(services)
    while missing and time.monotonic() < until_s:
        if services[missing[0]].answer():
            missing.pop(0)
        else:
            time.sleep(_POLL_S)
    for name in missing:
        _log.warning("ControlNet %s has no replica after %.0f s; going on", name, _CONTROLNETS_TIMEOUT_S)
    hosted.warm_up()
    return hosted


def _reached(name: str, handle: Any) -> tuple[ServeReplicas, Callable[[], ControlNetClient]]:
    """Return the replicas of a ControlNet, and what makes a client of them. An engine without one that is a deployment
    does not load the fabric."""
    from plait_serving.deployments.fabric_endpoints import ServeReplicas
    from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient

    service = ServeReplicas(f"ControlNet {name}", handle)
    return service, partial(RemoteControlNetClient, name, service.connect, worth_moving=service.worth_moving)


def load_images(
    images: ImagesSection,
    remote: Remote | None = None,
    *,
    lora_formats: bool = True,
    converts: bool = True,
) -> HostedImages:
    """Load the first base model and start the engine, without a warm-up image. Raises `ModelError`.

    `remote`: clients of the ControlNets that are deployments. One that runs in this process is loaded when first used.
    `lora_formats=False` leaves the formats out of the catalog, so that no LoRA file is opened for it.
    `converts=False` runs what an executor converted before, and leaves the rest to torch.
    """
    loras = lora_source(images)
    settings = {
        name: EngineSettings(
            model=base.folder,
            revision=base.revision,
            config=base.config,
            dtype=images.dtype,
            device=images.device,
            executor=images.executor,
            safety_checker=images.safety_checker,
            lora_source=loras,
            controlnets={name: section.folder for name, section in images.resolved_controlnets().items()},
            knobs=capped(images.knobs, images.num_cpus),
            limits=ImageLimits(**images.limits.model_dump()),
            converts=converts,
            audit_every=images.audit_every if converts else 0,
        )
        for name, base in images.base_models.items()
    }
    folder = None if images.models_folder is None else FolderOfModels(images.models_folder)
    engine = build_engine_of(settings, memory_bytes=images.memory_bytes, remote=remote, folder=folder)
    return HostedImages(images, engine, LoraCards(loras, lambda: _family(engine), formats=lora_formats))


def _family(engine: Engine) -> str:
    """Return the family of all models; "unknown" if they are of several."""
    families = {model.family.kind for model in engine.pool.models.values()}
    return families.pop() if len(families) == 1 else "unknown"


class HostedImages:
    """An `ImageService` over an engine in this process, and what the deployment needs from it. All calls into the
    engine are made on other threads than the event loop's."""

    def __init__(self, images: ImagesSection, engine: Engine, lora_cards: LoraCards) -> None:
        self._images = images
        self.engine = engine
        self._lora_cards = lora_cards
        self._reports = 0
        self._gauge = Gauge(self._readings, engine_pressure)
        self._warmup_s: float | None = None

    def warm_up(self) -> None:
        """Make the warm-up images; from then on it is ready while the engine is alive."""
        self._warmup_s = warm_up(self.engine)
        _log.info("%s is warm after %.1f s", self._images.public_name, self._warmup_s)

    async def catalog(self, *, anew: bool = False) -> Catalog:  # noqa: ARG002  # it is always
        """Return what can be requested now."""
        return await asyncio.to_thread(self._catalog)

    async def health(self) -> Health:
        """Report ready once warmed up and while the engine is alive."""
        if self._warmup_s is None:
            return Health(ready=False, reason="the warm-up image is not made yet")
        if not self.engine.alive:
            return Health(ready=False, reason="the engine has stopped", warmup_s=self._warmup_s)
        return Health(ready=True, warmup_s=self._warmup_s)

    async def counts(self) -> Sequence[ReplicaMetrics]:
        """Return what the engine counts."""
        return [await asyncio.to_thread(self._counted)]

    async def rest(self, model: str, *, asleep: bool) -> None:
        """Tell the engine."""
        await asyncio.to_thread(self.engine.rest, model, asleep=asleep)

    async def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Submit the request to the engine and yield its events."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:
                # The reader's loop has ended since (a command that was interrupted): nobody is left to tell.
                if not loop.is_closed():
                    raise

        # A submit that has begun cannot be called back: the shield lets it end, so that what cancels it is never lost.
        submitting = asyncio.ensure_future(asyncio.to_thread(self.engine.submit, request, sink))
        try:
            cancel = await asyncio.shield(submitting)
        except EngineError as error:
            yield Failed(error=error)
            return
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel)
            raise
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = isinstance(event, Finished | Failed)
                yield event
        finally:
            if not ended:
                cancel()

    def reconfigure(self, knobs: EngineKnobs) -> None:
        """Apply new knobs; running requests continue."""
        self.engine.reconfigure(knobs)
        _log.info("knobs: %s", knobs)

    def pressure(self) -> float:
        """Return how much of its capacity is used, since the last call."""
        return self._gauge.read()

    def _readings(self) -> dict[str, float]:
        compute_s = sum(used.compute_s for used in self.engine.usage().values())
        return {"compute_s": compute_s, "queued_s": self.engine.statistics().queued_s}

    def routing_state(self) -> ReplicaState:
        """Return by what requests are sent to replicas."""
        engine = self.engine
        pool, self._reports = engine.pool, self._reports + 1
        resident, wanted = set(pool.statistics().resident), engine.open_models()
        load_s = {name: model.load_s for name, model in pool.models.items()}
        loras = {name for cache in pool.loras for name in cache.resident_names()}
        return ReplicaState(
            number=self._reports,
            queued_s=engine.statistics().queued_s + sum(load_s.get(name, 0.0) for name in wanted - resident),
            models=frozenset(resident | wanted),
            loras=frozenset(loras),
            load_s=load_s,
            request_s=engine.request_s(),
        )

    def stop(self, *, drain_s: float) -> None:
        """Refuse new requests, give the accepted ones `drain_s`, then fail the rest."""
        self.engine.stop(drain_s=drain_s)

    def _counted(self) -> ReplicaMetrics:
        return counted(self.engine, threads_of_host(socket_folder(), cores=usable_cores()))

    def _catalog(self) -> Catalog:
        pool, images = self.engine.pool, self._images
        pool.look(always=False)
        models = pool.models
        families = self._families
        return Catalog(
            models=tuple(self._card(name, model) for name, model in models.items()),
            aliases=tuple(
                AliasCard(name=name, model=alias.model, loras=alias.loras)
                for name, alias in images.aliases.items()
                if alias.model in models
            ),
            loras=self._lora_cards.cards(),
            controlnets=tuple(
                ControlNetCard(name=name, family=families.get(name, "unknown"), preprocessor=section.preprocessor)
                for name, section in images.resolved_controlnets().items()
            ),
            refused={**pool.refused, **self._unfit},
        )

    def _card(self, name: str, model: Model) -> BaseModelCard:
        family, defaults, terms = model.family, self._images.defaults, model.family.terms
        width, height = nearest_size(family.width, family.height, model.limits.sizes, model.limits.size_multiple)
        return BaseModelCard(
            name=name,
            family=family.kind,
            default_width=width,
            default_height=height,
            default_steps=terms.steps if defaults.steps is None else defaults.steps,
            default_guidance_scale=self._images.guidance_of(name, terms),
            default_scheduler=(
                defaults.scheduler if defaults.scheduler in terms.samplers.among else terms.samplers.default
            ),
            terms=terms,
            dtype=str(family.dtype).removeprefix("torch."),
            controlnets=tuple(model.controlnets),
            limits=model.limits,
        )

    @property
    def _unfit(self) -> dict[str, str]:
        """Why no model takes a ControlNet, in the words of the last that refused it."""
        found = {name: why for model in self.engine.pool.models.values() for name, why in model.unfit.items()}
        return {f"ControlNet {name}": why for name, why in found.items() if name not in self._families}

    @property
    def _families(self) -> dict[str, str]:
        """The families of the models that take each ControlNet."""
        return {name: model.family.kind for model in self.engine.pool.models.values() for name in model.controlnets}


def _cancel(submitting: asyncio.Future[Callable[[], None]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result()()


def lora_source(images: ImagesSection) -> LoraSource:
    """Return the source of the section's LoRAs."""
    store, folder = images.loras.store, images.resolved_lora_folder()
    if store is not None:
        from plait_serving.diffusion.lora.remote import RemoteEntry, RemoteSource

        entries = {name: RemoteEntry(**entry.model_dump()) for name, entry in store.entries.items()}
        return RemoteSource(store.url, entries, cache_folder=store.cache_folder)
    return NoLoras() if folder is None else FolderSource(folder)
