"""The Serve application: HTTP ingress -> base model replicas -> one deployment per ControlNet; and, next to them, one
or two deployments per recommendation model.

`build` is a Serve application builder: `import_path: plait.app:build` in a Serve YAML, with `AppArgs` as its `args`
(`plait deploy render` writes both).
"""

# No `from __future__ import annotations` here: Serve reads the class of `build`'s argument from its signature.
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from plait.config import (
    CONTROLNET_PREFIX,
    ENGINE,
    INGRESS,
    PlaitConfig,
    ServedConfig,
    ServerSection,
    TuningSection,
    worker_name,
)
from plait_deploy.on_ray.declared import placed_options
from plait_deploy.on_ray.names import name_at
from plait_deploy.placement.demands import task_of
from plait_serving.deployments.direct import Direct
from plait_serving.deployments.images.engine_source import EngineSource, ImagesSource
from plait_serving.deployments.ingress import Ingress
from plait_serving.deployments.lazy import LazyControlNet, LazyEngine, LazyRankWorker
from plait_serving.deployments.node_class_handle import PlacedHandle
from plait_serving.deployments.ranking.package_source import PackageSource, RankModel, RankSource
from plait_serving.deployments.scaling import autoscaling
from plait_serving.images.config import MODEL_CPUS, ControlNetSection, ImagesSection, ResultsSection
from plait_serving.ranking.config import WORKER_CPUS, HnSection, RankModelSection, RankRole, WholeSection, shard_role
from plait_serving.sections import INGRESS_CPUS, Replicas
from plait_serving.starter.words import image_words, ranking_words

if TYPE_CHECKING:
    from fastapi import APIRouter

    from plait_serving.http.context import HttpSettings
    from plait_serving.images.results import ResultsSettings

_MAX_ONGOING_REQUESTS = 100_000
"""Serve must never queue in front of us: our queues are bounded and can tell clients when to retry."""
_HEALTH_CHECK_PERIOD_S = 1.0
"""Serve learns that a replica died when it checks it next, and starts another only then. A check costs both processes
less than a millisecond."""
_ROUTING_PERIOD_S = 1.0
"""How often replicas say what waits at them and which models they have."""
_START_TRIES = 2
"""The number of attempts to start: a folder that does not load now will not load the 20th time either (Serve's
default)."""


class AppArgs(ServedConfig):
    """The parts of a plait.yaml that the application needs. `node_classes`: with any, deployments are placed on nodes
    of these classes by the policy of `plait_deploy.on_ray`."""

    node_classes: tuple[str, ...] = ()


def build(args: AppArgs) -> serve.Application:
    """Build the application of a configuration. This is cheap: models are loaded in the replicas."""
    return compose(args, None if args.images is None else ImagesSource.for_replicas(args.images))


def application(config: PlaitConfig) -> serve.Application:
    """Build the application of a whole plait.yaml."""
    return build(AppArgs(server=config.server, images=config.images, recommend=config.recommend, tuning=config.tuning))


def compose(
    args: AppArgs, source: EngineSource | None, *, rank_sources: Mapping[str, RankSource] | None = None
) -> serve.Application:
    """Build the application from any engine source, and from ranking sources by model name (tests supply their own).

    A deployment restarts when what is bound to it changes (`plait.server.restarts`): numbers of replicas, knobs, and
    what it does not read are not bound.
    """
    server, sources, deploy = args.server, rank_sources or {}, _Deploying(args)
    engine = None
    if source is not None and args.images is not None:
        engine = _engine(args.images, source, deploy, drain_s=server.drain_s)
    ranking = {
        name: _rank_model(name, section, sources.get(name), deploy) for name, section in args.ranking_models.items()
    }
    ingress = _made(Ingress).options(
        name=INGRESS,
        num_replicas=server.ingress_replicas,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=server.drain_s,
        max_surge_percent=server.surge_percent(num_gpus=0.0, replicas=server.ingress_replicas),
        user_config={"config": args.model_dump(mode="json", exclude={"tuning"})} if args.tuning.enabled else None,
        **_COMMON,
    )
    routers = partial(tuning_routers, args.tuning) if args.tuning.enabled else None
    direct = server.direct_port and Direct(host=server.host, port=server.direct_port, drain_s=server.drain_s)
    results = None if args.images is None else args.images.results
    read = ServerSection(**server.model_dump(exclude=_NOT_HTTP))
    settings = partial(http_settings, read, words=starter_words(args), results=results)
    controlnets = [it for name, it in deploy.handles.items() if name.startswith(CONTROLNET_PREFIX)]
    return ingress.bind(
        engine,
        settings,
        ranking,
        controlnets=controlnets,
        routers=routers,
        direct=direct,
        behind=deploy.handles,
    )


@cache
def _made(of: type) -> serve.Deployment:
    """Return a class as a deployment; Serve takes 20 ms to make one."""
    return serve.deployment(serve.ingress()(of) if of is Ingress else of)


class _Deploying:
    """Makes the deployments behind the ingress, and remembers their handles by name."""

    def __init__(self, args: AppArgs) -> None:
        self.node_classes, self._server = args.node_classes, args.server
        self.handles: dict[str, Any] = {}

    def __call__(
        self,
        made: serve.Deployment,
        bind: Callable[[serve.Deployment], serve.Application],
        *,
        name: str,
        replicas: int | Replicas,
        num_cpus: float,
        num_gpus: float,
        **options: Any,
    ) -> Any:
        """Return what stands for Serve's handle: the application, or those of all classes of nodes."""
        bound = replicas.max if isinstance(replicas, Replicas) else replicas
        surge = self._server.surge_percent(num_gpus=num_gpus, replicas=bound)
        made = made.options(**options, max_surge_percent=surge, **_COMMON)
        plain = made.options(name=name, ray_actor_options={"num_cpus": num_cpus, "num_gpus": num_gpus})
        if self.node_classes:
            task = task_of(name, num_cpus=num_cpus, num_gpus=num_gpus)
            options_at = {
                of: {"name": name_at(name, of), **placed_options(task, bound, of)} for of in self.node_classes
            }
            handle: Any = PlacedHandle({of: bind(made.options(**options)) for of, options in options_at.items()})
        elif isinstance(replicas, Replicas):
            handle = bind(plain.options(autoscaling_config=autoscaling(replicas)))
        else:
            handle = bind(plain.options(num_replicas=replicas))
        self.handles[name] = handle
        return handle


_NOT_HTTP = {"port", "direct_port", "ingress_replicas", "start_new_first", "drain_s", "ready_timeout_s"}
"""What `http_settings` does not read of the server's section."""
_COMMON: dict[str, Any] = {
    "max_ongoing_requests": _MAX_ONGOING_REQUESTS,
    "max_queued_requests": -1,
    "max_constructor_retry_count": _START_TRIES,
    "graceful_shutdown_wait_loop_s": 0.2,
    "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
    "health_check_timeout_s": 30.0,
}


def starter_words(args: AppArgs) -> Mapping[str, Callable[[], Mapping[str, Any]]]:
    """Return what reads the words of the starter models that are served, by the names that requests use."""
    found: dict[str, Callable[[], Mapping[str, Any]]] = {}
    if args.images is not None:
        found |= dict.fromkeys(args.images.starters, image_words)
    if args.recommend is not None and args.recommend.models is None:
        found |= dict.fromkeys(args.ranking_models, ranking_words)
    return found


def http_settings(
    server: ServerSection,
    *,
    words: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
    results: ResultsSection | None = None,
) -> "HttpSettings":
    """Return the settings of the HTTP side; called in the ingress replica, where its imports belong. `words`: what
    reads the words that a model knows."""
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
        allowed_origins=server.allowed_origins,
        max_body_bytes=server.largest_body_bytes,
        max_bodies_bytes=8 * max(server.largest_body_bytes, 64 << 20),
        preprocessors=PREPROCESSORS,
        results=None if results is None else _kept_at(results),
        words={name: read() for name, read in (words or {}).items()},
    )


def _kept_at(section: ResultsSection) -> "ResultsSettings":
    from plait_serving.images.results import ResultsSettings

    return ResultsSettings(
        url=section.place,
        lifetime_s=section.lifetime_s,
        max_bytes=section.max_bytes,
        public_url=section.public_url,
    )


def tuning_routers(tuning: TuningSection, user_config: Mapping[str, Any]) -> "tuple[APIRouter, ...]":
    """Return the routers for tuning jobs; called in the ingress replica. `user_config`: as it is at any moment; its
    `config` is what runs."""
    import yaml

    from plait.server.state import state_root
    from plait.tuning.service.actor import ActorTuningService
    from plait.tuning.service.http import tuning_router
    from plait.tuning.service.job_queue import JobQueueSettings

    folder = tuning.folder or state_root(os.environ) / "tuning"

    def settings() -> JobQueueSettings:
        return JobQueueSettings(folder=folder, config=yaml.safe_dump(user_config["config"]), live=tuning.live)

    return (tuning_router(ActorTuningService(settings)),)


def _engine(images: ImagesSection, source: EngineSource, deploy: _Deploying, *, drain_s: float) -> Any:
    """Build the base model's deployment with its ControlNets."""
    services = images.controlnet_services()
    controlnets = {name: _controlnet(name, it, images, deploy) for name, it in services.items()}
    return deploy(
        _made(LazyEngine),
        lambda made: made.bind(source, controlnets),
        name=ENGINE,
        replicas=images.replicas,
        num_cpus=images.num_cpus or MODEL_CPUS,
        num_gpus=images.num_gpus,
        user_config=images.capped_knobs.model_dump(mode="json"),
        graceful_shutdown_timeout_s=drain_s,
        **_routing(images),
    )


def _routing(images: ImagesSection) -> dict[str, Any]:
    """Return the options by which requests go to replicas that have their model, if there are several."""
    if not images.has_several_models:
        return {}
    return {
        "request_router_config": RequestRouterConfig(
            request_router_class="plait_serving.deployments.images.router:ModelRouter",
            request_routing_stats_period_s=_ROUTING_PERIOD_S,
        )
    }


def _controlnet(name: str, section: ControlNetSection, images: ImagesSection, deploy: _Deploying) -> Any:
    return deploy(
        _made(LazyControlNet),
        lambda made: made.bind(
            name=name,
            folder=str(section.folder),
            dtype=images.dtype,
            device=images.device,
            executor=images.executor.value,
            audit_every=images.audit_every,
        ),
        name=CONTROLNET_PREFIX + name,
        replicas=section.replicas,
        num_cpus=section.num_cpus or MODEL_CPUS,
        num_gpus=section.num_gpus,
        user_config={"threads": section.thread_cap},
    )


def _rank_model(name: str, section: RankModelSection, given: RankSource | None, deploy: _Deploying) -> RankModel:
    """Return a recommendation model with the deployment that the ingress calls and, if it is split, the one behind
    that."""
    source = given or PackageSource(section.folder)
    dense = given or PackageSource(section.folder, executor=section.executor)
    behind: dict[str, Any] = {}
    hns, shards = None, tuple[Any, ...]()
    if section.mode == "split":
        hns = _rank_workers(name, section, "hn", dense, deploy)
        behind = {"hns": hns}
        if (held := section.cn.shard_section) is not None:
            dealt: dict[str, Any] = {"shards": held.count, "memory_bytes": held.memory_bytes}
            shards = tuple(
                _rank_workers(name, section, "shard", source, deploy, dealt=dealt, shard=number)
                for number in range(held.count)
            )
            behind |= {"dealt": dealt, "shards": shards}
    entry = section.entry_role
    workers = _rank_workers(name, section, entry, dense if entry == "whole" else source, deploy, **behind)
    return RankModel(source=source, workers=workers, hns=hns, shards=shards)


def _rank_workers(
    name: str, section: RankModelSection, role: RankRole, source: RankSource, deploy: _Deploying, **more: Any
) -> Any:
    part_name = shard_role(more["shard"]) if role == "shard" else role
    part = section.parts[part_name]
    return deploy(
        _made(LazyRankWorker),
        lambda made: made.bind(
            name=name,
            source=source,
            role=role,
            omp_wait=part.omp_wait,
            between_hosts=section.between_hosts,
            **more,
        ),
        name=worker_name(name, part_name),
        replicas=part.replicas,
        num_cpus=part.num_cpus or WORKER_CPUS,
        num_gpus=part.num_gpus if isinstance(part, HnSection | WholeSection) else 0.0,
        user_config=part.capped_knobs.model_dump(mode="json"),
    )
