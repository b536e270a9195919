"""The Serve application: HTTP ingress -> base model replicas -> one deployment per ControlNet; and, next to them, one
or two deployments per recommendation model.

`build` is a Serve application builder: `import_path: plait.app:build` in a Serve YAML, with `AppArgs` as its `args`
(`plait deploy render` writes both).
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

_MAX_ONGOING_REQUESTS = 100_000
"""Serve must never queue in front of us: our queues are bounded and can tell clients when to retry."""
_HEALTH_CHECK_PERIOD_S = 1.0
"""Serve learns that a replica died when it checks it next, and starts another only then. A check costs both processes
less than a millisecond."""
_START_TRIES = 2
"""The number of attempts to start: a folder that does not load now will not load the 20th time either (Serve's
default)."""


class AppArgs(ServedConfig):
    """The parts of a plait.yaml that the application needs."""


def build(args: AppArgs) -> serve.Application:
    """Build the application of a configuration. This is cheap: models are loaded in the replicas."""
    return compose(args, None if args.images is None else ImagesSource(args.images))


def application(config: PlaitConfig) -> serve.Application:
    """Build the application of a whole plait.yaml."""
    return build(AppArgs(server=config.server, images=config.images, recommend=config.recommend, tuning=config.tuning))


def compose(
    args: AppArgs, source: EngineSource | None, *, rank_sources: Mapping[str, RankSource] | None = None
) -> serve.Application:
    """Build the application from any engine source, and from ranking sources by model name (tests supply their own)."""
    server, sources = args.server, rank_sources or {}
    engine = None if source is None or args.images is None else _engine(args.images, source, drain_s=server.drain_s)
    ranking = {
        name: _rank_model(name, section, sources.get(name) or PackageSource(section.folder, executor=section.executor))
        for name, section in args.ranking_models.items()
    }
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS,
        num_replicas=server.ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=server.drain_s,
        **_COMMON,
    )
    routers = partial(tuning_routers, args) if args.tuning.enabled else tuple
    direct = server.direct_port and Direct(host=server.host, port=server.direct_port, drain_s=server.drain_s)
    return ingress.bind(engine, partial(http_settings, server), ranking, routers=routers, direct=direct)


_COMMON: dict[str, Any] = {
    "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
    "max_queued_requests": -1,
    "max_constructor_retry_count": _START_TRIES,
    "graceful_shutdown_wait_loop_s": 0.2,
    "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
    "health_check_timeout_s": 30.0,
}


def http_settings(server: ServerSection) -> "HttpSettings":
    """Return the settings of the HTTP side; called in the ingress replica, where its imports belong."""
    from plait_serving.http.context import HttpSettings
    from plait_serving.http.edge.auth import ANYONE, ApiKey, Principal, Role
    from plait_serving.http.edge.tenants import TenantLimits
    from plait_serving.starter.preprocess import PREPROCESSORS

    without_key = Principal(tenant=ANYONE.tenant, role=Role.USER)
    keys = tuple(
        ApiKey(sha256=key.sha256, principal=Principal(tenant=key.tenant, role=Role(key.role)))
        for key in server.api_keys
    )
    tenants = {name: TenantLimits(**section.model_dump()) for name, section in server.tenants.items()}
    return HttpSettings(
        api_keys=keys,
        tenants=tenants,
        anyone=without_key if server.is_open else ANYONE,
        allowed_hosts=server.answered_hosts,
        max_body_bytes=server.largest_body_bytes,
        preprocessors=PREPROCESSORS,
    )


def tuning_routers(args: AppArgs) -> "tuple[APIRouter, ...]":
    """Return the routers for tuning jobs; called in the ingress replica."""
    import yaml

    from plait.server.state import state_root
    from plait.tuning.service.actor import ActorTuningService
    from plait.tuning.service.http import tuning_router
    from plait.tuning.service.job_queue import JobQueueSettings

    config = yaml.safe_dump(args.model_dump(mode="json", exclude={"tuning"}))
    folder = args.tuning.folder or state_root(os.environ) / "tuning"
    return (tuning_router(ActorTuningService(JobQueueSettings(folder=folder, config=config, live=args.tuning.live))),)


def _engine(images: ImagesSection, source: EngineSource, *, drain_s: float) -> serve.Application:
    """Build the base model's deployment with its ControlNets."""
    controlnets = {name: _controlnet(name, it, images) for name, it in images.controlnet_services().items()}
    engine = serve.deployment(LazyEngine).options(
        name=ENGINE,
        num_replicas=images.replicas,
        ray_actor_options={"num_cpus": images.num_cpus or MODEL_CPUS, "num_gpus": images.num_gpus},
        user_config=images.capped_knobs.model_dump(mode="json"),
        graceful_shutdown_timeout_s=drain_s,
        **_COMMON,
    )
    return engine.bind(source, controlnets)


def _controlnet(name: str, section: ControlNetSection, images: ImagesSection) -> serve.Application:
    deployment = serve.deployment(LazyControlNet).options(
        name=CONTROLNET_PREFIX + name,
        num_replicas=section.replicas,
        ray_actor_options={"num_cpus": section.num_cpus or MODEL_CPUS, "num_gpus": section.num_gpus},
        user_config={"threads": section.thread_cap},
        **_COMMON,
    )
    return deployment.bind(
        name=name,
        folder=str(section.folder),
        dtype=images.dtype,
        device=images.device,
        executor=images.executor.value,
        audit_every=images.audit_every,
    )


def _rank_model(name: str, section: RankModelSection, source: RankSource) -> RankModel:
    """Return a recommendation model with the deployment that the ingress calls and, if it is split, the one behind
    that."""
    hns = _rank_workers(name, section, "hn", source) if section.mode == "split" else None
    behind = (
        {} if hns is None else {"hns": hns, "hn_count": section.hn.min_replicas, "max_hns": section.hn.max_replicas}
    )
    entry = section.parts[section.entry_role]
    return RankModel(
        source=source,
        workers=_rank_workers(name, section, section.entry_role, source, **behind),
        hns=hns,
        replicas=entry.min_replicas,
        max_replicas=entry.max_replicas,
    )


def _rank_workers(
    name: str, section: RankModelSection, role: RankRole, source: RankSource, **more: Any
) -> serve.Application:
    part = section.parts[role]
    return _rank_deployment(name, role, part).bind(
        name=name,
        source=source,
        role=role,
        knobs=part.capped_knobs.model_dump(mode="json"),
        omp_wait=part.omp_wait,
        **more,
    )


def _rank_deployment(name: str, role: RankRole, part: CnSection | HnSection | WholeSection) -> serve.Deployment:
    num_gpus = 0.0 if isinstance(part, CnSection) else part.num_gpus
    count: dict[str, Any] = {"num_replicas": part.replicas}
    if isinstance(part.replicas, Replicas):
        count = {"autoscaling_config": autoscaling(part.replicas)}
    return serve.deployment(LazyRankWorker).options(
        name=worker_name(name, role),
        **count,
        ray_actor_options={"num_cpus": part.num_cpus or WORKER_CPUS, "num_gpus": num_gpus},
        user_config=part.capped_knobs.model_dump(mode="json"),
        **_COMMON,
    )
