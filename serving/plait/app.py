"""The Serve application: HTTP ingress -> base model replicas -> one deployment per ControlNet; and beside them one or
two deployments per recommendation model.

`build` is a Serve application builder: ``import_path: plait.app:build`` in a Serve YAML, its ``args`` are `AppArgs`
(``plait deploy render`` writes both).
"""

# No `from __future__ import annotations` here: Serve reads the class of `build`'s argument from its signature.
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve

from plait.config import CONTROLNET_PREFIX, ENGINE, INGRESS, PlaitConfig, ServedConfig, ServerSection, worker_name
from plait_serving.deployments.direct import Direct
from plait_serving.deployments.images.source import EngineSource, ImagesSource
from plait_serving.deployments.ingress import Ingress
from plait_serving.deployments.lazy import LazyControlNet, LazyEngine, LazyRankWorker
from plait_serving.deployments.ranking.scaling import autoscaling
from plait_serving.deployments.ranking.source import PackageSource, RankModel, RankSource
from plait_serving.images.config import MODEL_CPUS, ControlNetSection, ImagesSection
from plait_serving.ranking.config import (
    WORKER_CPUS,
    CnSection,
    HnSection,
    RankModelSection,
    RankRole,
    Replicas,
    WholeSection,
)
from plait_serving.sections import INGRESS_CPUS

if TYPE_CHECKING:
    from fastapi import APIRouter

    from plait_serving.http.context import HttpSettings

APP_NAME = "plait"
_MAX_ONGOING_REQUESTS = 100_000
"""Serve must never queue in front of us: ours are bounded queues, which can say when to come back."""
_START_TRIES = 2
"""A folder that does not load now will not load the 20th time either (Serve's default)."""


class AppArgs(ServedConfig):
    """What the application needs of a plait.yaml."""


def build(args: AppArgs) -> serve.Application:
    """The application of a configuration. Builds nothing heavy: models are loaded in the replicas."""
    return compose(args, None if args.images is None else ImagesSource(args.images))


def application(config: PlaitConfig) -> serve.Application:
    """The application of a whole plait.yaml."""
    return build(AppArgs(server=config.server, images=config.images, recommend=config.recommend, tuning=config.tuning))


def compose(
    args: AppArgs, source: EngineSource | None, *, rank_sources: Mapping[str, RankSource] | None = None
) -> serve.Application:
    """The application around any recipe of an engine, and of recommendation models by name (tests bring their own)."""
    server, recommenders = args.server, args.recommenders
    engine = None if source is None or args.images is None else _engine(args.images, source, drain_s=server.drain_s)
    sources = {name: PackageSource(section.folder) for name, section in recommenders.items()} | dict(rank_sources or {})
    hns = {
        name: _bound(name, section, "hn", sources[name])
        for name, section in recommenders.items()
        if section.mode == "split"
    }
    rankers = {name: _ranker(name, section, sources[name], hns.get(name)) for name, section in recommenders.items()}
    models = {
        name: RankModel(source=sources[name], replicas=part.least, max_replicas=part.most)
        for name, part in ((name, section.parts[section.asked]) for name, section in recommenders.items())
    }
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=server.drain_s,
        **_COMMON,
    )
    routers = partial(tuning_routers, args) if args.tuning.enabled else tuple
    direct = server.direct_port and Direct(host=server.host, port=server.direct_port, drain_s=server.drain_s)
    return ingress.bind(engine, partial(http_settings, server), rankers, models, hns, routers=routers, direct=direct)


_COMMON: dict[str, Any] = {
    "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
    "max_queued_requests": -1,
    "max_constructor_retry_count": _START_TRIES,
    "graceful_shutdown_wait_loop_s": 0.2,
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 30.0,
}


def http_settings(server: ServerSection) -> "HttpSettings":
    """The HTTP side's settings; called in the ingress replica, where its imports belong."""
    from plait_serving.http.context import HttpSettings
    from plait_serving.http.edge.auth import ApiKey, Principal, Role
    from plait_serving.http.edge.hosts import LOOPBACK_HOSTS
    from plait_serving.starter.preprocess import PREPROCESSORS

    keys = tuple(
        ApiKey(sha256=key.sha256, principal=Principal(tenant=key.tenant, role=Role(key.role)))
        for key in server.api_keys
    )
    hosts = server.allowed_hosts
    if hosts or (hosts is None and server.is_loopback and not keys):
        hosts = (*LOOPBACK_HOSTS, server.host, *(hosts or ()))  # its own as well: plait asks it how it is
    return HttpSettings(
        api_keys=keys,
        allowed_hosts=hosts or (),
        max_body_bytes=server.largest_body_bytes,
        preprocessors=PREPROCESSORS,
    )


def tuning_routers(args: AppArgs) -> "tuple[APIRouter, ...]":
    """The routes of tuning jobs; called in the ingress replica."""
    import yaml

    from plait.server.state import state_root
    from plait.tuning.service.actor import ActorTuningService
    from plait.tuning.service.http import tuning_router
    from plait.tuning.service.job_queue import JobQueueSettings

    config = yaml.safe_dump(args.model_dump(mode="json", exclude={"tuning"}))
    folder = args.tuning.folder or state_root(os.environ) / "tuning"
    return (tuning_router(ActorTuningService(JobQueueSettings(folder=folder, config=config, live=args.tuning.live))),)


def _engine(images: ImagesSection, source: EngineSource, *, drain_s: float) -> serve.Application:
    """The base model with its ControlNets."""
    controlnets = {name: _controlnet(name, it, images) for name, it in images.controlnet_services().items()}
    engine = serve.deployment(LazyEngine).options(
        name=ENGINE,
        num_replicas=images.replicas,
        ray_actor_options={"num_cpus": MODEL_CPUS, "num_gpus": images.num_gpus},
        user_config=images.knobs.model_dump(mode="json"),
        graceful_shutdown_timeout_s=drain_s,
        **_COMMON,
    )
    return engine.bind(source, controlnets)


def _controlnet(name: str, section: ControlNetSection, images: ImagesSection) -> serve.Application:
    deployment = serve.deployment(LazyControlNet).options(
        name=CONTROLNET_PREFIX + name,
        num_replicas=section.replicas,
        ray_actor_options={"num_cpus": MODEL_CPUS, "num_gpus": section.num_gpus},
        user_config={"threads": section.threads},
        **_COMMON,
    )
    return deployment.bind(name=name, folder=str(section.folder), dtype=images.dtype, device=images.device)


def _ranker(
    name: str, section: RankModelSection, source: RankSource, hns: serve.Application | None
) -> serve.Application:
    """The deployment that the ingress asks, with the one behind it."""
    if hns is None:
        return _bound(name, section, "whole", source)
    return _bound(name, section, "cn", source, hns=hns, hn_count=section.hn.least, max_hns=section.hn.most)


def _bound(name: str, section: RankModelSection, role: RankRole, source: RankSource, **more: Any) -> serve.Application:
    part = section.parts[role]
    return _rank_worker(name, role, part).bind(
        name=name, source=source, role=role, knobs=part.knobs.model_dump(mode="json"), omp_wait=part.omp_wait, **more
    )


def _rank_worker(name: str, role: RankRole, part: CnSection | HnSection | WholeSection) -> serve.Deployment:
    num_gpus = 0.0 if isinstance(part, CnSection) else part.num_gpus
    count: dict[str, Any] = {"num_replicas": part.replicas}
    if isinstance(part.replicas, Replicas):
        count = {"autoscaling_config": autoscaling(part.replicas)}
    return serve.deployment(LazyRankWorker).options(
        name=worker_name(name, role),
        **count,
        ray_actor_options={"num_cpus": WORKER_CPUS, "num_gpus": num_gpus},
        user_config=part.knobs.model_dump(mode="json"),
        **_COMMON,
    )
