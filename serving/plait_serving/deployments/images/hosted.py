"""The engine of an `images` section with its image service, for both the engine's replica and `plait generate`."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from plait_fabric.cores import usable_cores
from plait_serving.cores import HostCores, threads_of_host
from plait_serving.deployments.fabric_endpoints import socket_folder
from plait_serving.deployments.images.audits import audit_text
from plait_serving.deployments.images.controlnet import ServeConnect
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.assemble import Assembled, EngineSettings, build_engine
from plait_serving.diffusion.controlnet.remote import RemoteControlNetClient
from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.lora.formats import MAX_FILE_BYTES
from plait_serving.diffusion.lora.remote import RemoteEntry, RemoteSource
from plait_serving.diffusion.lora.source import ChainSource, FolderSource, LoraSource
from plait_serving.diffusion.queue.usage import TenantUsage
from plait_serving.images.config import STARTER_FOLDER, ImagesSection
from plait_serving.images.local import LocalImageService
from plait_serving.images.service import BaseModelCard, Catalog, ControlNetCard, ImageService, LoraCard
from plait_serving.starter.preprocess import PREPROCESSORS

__all__ = ["HostedImages", "load_images", "open_images"]

_log = logging.getLogger(__name__)

_CONTROLNETS_TIMEOUT_S = 120.0
"""Time to load torch and a ControlNet next to the base model, on two busy cores."""


def open_images(images: ImagesSection, controlnets: Mapping[str, Any]) -> HostedImages:
    """Load the models and make the warm-up images. `controlnets`: Serve handles of those that are deployments.

    Raises `ModelError`.
    """
    services = _services(controlnets)
    hosted = load_images(images, services)
    for name in wait_for_replicas(services, timeout_s=_CONTROLNETS_TIMEOUT_S):
        _log.warning("ControlNet %s has no replica after %.0f s; going on", name, _CONTROLNETS_TIMEOUT_S)
    hosted.warm_up()
    return hosted


def load_images(
    images: ImagesSection,
    services: Mapping[str, ServeConnect] | None = None,
    *,
    lora_formats: bool = True,
    converts: bool = True,
) -> HostedImages:
    """Load the base model and start its engine, without a warm-up image. Raises `ModelError`.

    `services`: the ControlNets that are deployments. One that runs in this process is loaded when first used.
    `lora_formats=False` leaves the formats out of the catalog, so that no LoRA file is opened for it.
    `converts=False` runs what an executor converted before, and leaves the rest to torch.
    """
    loras = lora_source(images)
    settings = EngineSettings(
        model=model_folder(images),
        revision=images.revision,
        dtype=images.dtype,
        device=images.device,
        executor=images.executor,
        safety_checker=images.safety_checker,
        lora_source=loras,
        controlnets={name: section.folder for name, section in images.resolved_controlnets().items()},
        knobs=images.capped_knobs,
        limits=ImageLimits(**images.limits.model_dump()),
        converts=converts,
        audit_every=images.audit_every if converts else 0,
    )
    remote = {
        name: partial(RemoteControlNetClient, name, connect, worth_moving=connect.worth_moving)
        for name, connect in (services or {}).items()
    }
    assembled = build_engine(settings, remote=remote)
    return HostedImages(images, assembled, LoraCards(loras, str(assembled.bundle.family), formats=lora_formats))


class HostedImages:
    """A `HostedEngine` that wraps a real engine."""

    def __init__(self, images: ImagesSection, assembled: Assembled, lora_cards: LoraCards) -> None:
        self._images = images
        self._assembled = assembled
        self._lora_cards = lora_cards
        self._service = LocalImageService(
            engine=assembled.engine,
            catalog=self._catalog,
            metrics_text=lambda: metrics_text(assembled) + host_metrics_text(_host()),
        )

    @property
    def service(self) -> ImageService:
        """The service that takes requests."""
        return self._service

    @property
    def alive(self) -> bool:
        """Whether the compute thread runs."""
        return self._assembled.engine.alive

    def check_progress(self) -> None:
        """Raise `Stuck` if a thread of the engine hangs."""
        self._assembled.engine.check_progress()

    def warm_up(self) -> None:
        """Make the warm-up images; from then on the service is ready."""
        seconds = self._assembled.warm_up()
        _log.info("%s is warm after %.1f s", self._images.public_name, seconds)
        self._service.warmed_up(seconds)

    def reconfigure(self, knobs: EngineKnobs) -> None:
        """Apply new knobs; running requests continue."""
        self._assembled.engine.reconfigure(knobs)
        _log.info("knobs: %s", knobs)

    def stop(self, *, drain_s: float) -> None:
        """Refuse new requests, give the accepted ones `drain_s`, then fail the rest."""
        self._assembled.engine.stop(drain_s=drain_s)

    def _catalog(self) -> Catalog:
        bundle = self._assembled.bundle
        family = str(bundle.family)
        model = BaseModelCard(
            name=self._images.public_name,
            family=family,
            default_width=bundle.width,
            default_height=bundle.height,
            default_steps=self._images.defaults.steps,
            default_guidance_scale=self._images.default_guidance_scale,
            default_scheduler=self._images.defaults.scheduler,
            dtype=str(bundle.dtype).removeprefix("torch."),
            limits=self._assembled.engine.limits,
        )
        controlnets = tuple(
            ControlNetCard(name=name, family=family, preprocessor=section.preprocessor)
            for name, section in self._images.resolved_controlnets().items()
        )
        return Catalog(
            model=model,
            loras=self._lora_cards.cards(),
            controlnets=controlnets,
            preprocessors=tuple(sorted(PREPROCESSORS)),
        )


class LoraCards:
    """The LoRAs that exist now, as cards. Each file is inspected once, and again when it changes; without `formats`
    none is."""

    def __init__(self, source: LoraSource, family: str, *, formats: bool = True) -> None:
        self._source = source
        self._family = family
        self._reads_formats = formats
        self._formats: dict[tuple[str, str], str] = {}

    def cards(self) -> tuple[LoraCard, ...]:
        """Return the cards, sorted by name."""
        entries = self._source.list()
        known = {(name, entry.stamp): self._formats.get((name, entry.stamp)) for name, entry in entries.items()}
        self._formats = {key: found or self._format(*key) for key, found in known.items()}
        return tuple(LoraCard(name=name, family=self._family, format=fmt) for (name, _), fmt in self._formats.items())

    def _format(self, name: str, stamp: str) -> str:  # noqa: ARG002  # the stamp is the key's other half
        """Return the format of a file in a folder; a store's entry is not downloaded for a listing."""
        if not (self._reads_formats and isinstance(self._source, FolderSource)):
            return "unknown"
        try:
            keys = inspect(self._source.fetch(name), max_bytes=MAX_FILE_BYTES).tensors
        except EngineError:
            return "unreadable"
        return "kohya" if any(key.startswith(("lora_unet_", "lora_te")) for key in keys) else "peft"


def model_folder(images: ImagesSection) -> str:
    """Return what the engine loads: a folder or a hub id."""
    return str(STARTER_FOLDER / images.model) if images.is_starter else images.model


def lora_source(images: ImagesSection) -> LoraSource:
    """Return the source of the section's LoRAs."""
    store, folder = images.loras.store, images.resolved_lora_folder()
    if store is not None:
        entries = {
            name: RemoteEntry(path=entry.path, sha256=entry.sha256, nbytes=entry.nbytes)
            for name, entry in store.entries.items()
        }
        return RemoteSource(store.url, entries, cache_folder=store.cache_folder)
    return ChainSource(()) if folder is None else FolderSource(folder)


def metrics_text(assembled: Assembled) -> str:
    """Return the metrics of the engine and the LoRA cache in Prometheus' text format."""
    engine, loras = assembled.engine.statistics(), assembled.loras.statistics()
    gauges = {
        "engine_replicas": 1,  # several replicas add up
        "engine_requests_waiting": engine.waiting,
        "engine_requests_running": engine.running,
        "engine_queued_compute_seconds": round(engine.queued_s, 3),
        "lora_cache_resident_bytes": loras.resident_bytes,
        "lora_cache_resident": loras.resident,
    }
    counters = {
        "engine_steps": engine.steps,
        "engine_rows": engine.rows,
        "engine_lora_switches": engine.lora_switches,
        "engine_finished": engine.finished,
        "engine_failed": engine.failed,
        "engine_cancelled": engine.cancelled,
        "engine_rejected": engine.rejected,
        "lora_cache_hits": loras.hits,
        "lora_cache_misses": loras.misses,
        "lora_cache_evictions": loras.evictions,
    }
    lines = [f"# TYPE plait_{name} gauge\nplait_{name} {value}" for name, value in gauges.items()]
    lines += [f"# TYPE plait_{name}_total counter\nplait_{name}_total {value}" for name, value in counters.items()]
    lines += _tenant_lines(assembled.engine.usage())
    lines.append("# TYPE plait_engine_prepared gauge")
    lines += [f'plait_engine_prepared{{part="{part}"}} 1' for part in sorted(assembled.prepared_parts())]
    return "\n".join(lines) + "\n" + audit_text(assembled.auditor.statistics())


def _tenant_lines(usage: Mapping[str, TenantUsage]) -> list[str]:
    """Return what each tenant used: the account that `http/usage.py` reads."""
    by_metric: dict[str, list[str]] = {}
    for tenant, used in sorted(usage.items()):
        counters = {
            "image_requests_finished": used.finished,
            "image_requests_failed": used.failed,
            "image_requests_cancelled": used.cancelled,
            "image_requests_rejected": used.rejected,
            "images": used.images,
            "image_pixels": used.pixels,
            "image_steps": used.steps,
            "image_compute_seconds": round(used.compute_s, 6),
        }
        for name, value in counters.items():
            line = f'plait_tenant_{name}_total{{tenant="{tenant}"}} {value}'
            by_metric.setdefault(f"# TYPE plait_tenant_{name} counter", []).append(line)
    return [line for head, lines in by_metric.items() for line in (head, *lines)]


def host_metrics_text(host: HostCores) -> str:
    """Return what the replicas of the engine's host may use, in Prometheus' text format."""
    gauges = {
        "host_cores": host.cores,
        "host_threads_planned": host.planned_threads,
        "host_shared": int(host.is_shared),
    }
    return "".join(f"# TYPE plait_{name} gauge\nplait_{name} {value}\n" for name, value in gauges.items())


def _host() -> HostCores:
    return threads_of_host(socket_folder(), cores=usable_cores())


def _services(handles: Mapping[str, Any]) -> dict[str, ServeConnect]:
    """Return a `ServeConnect` for each ControlNet that is a deployment."""
    return {name: ServeConnect(name, handle) for name, handle in handles.items()}


def wait_for_replicas(services: Mapping[str, ServeConnect], *, timeout_s: float, poll_s: float = 0.5) -> list[str]:
    """Wait at most `timeout_s` until every ControlNet has a replica that answers; return the names of those without
    one.

    All deployments start at once; a placement measured before they are up would stay wrong.
    """
    until_s = time.monotonic() + timeout_s
    missing = list(services)
    while missing and time.monotonic() < until_s:
        try:
            services[missing[0]].replicas()
            missing.pop(0)
        except ControlNetUnavailable:
            time.sleep(poll_s)
    return missing
