"""The one table of what is deployed: a row for each deployment of the Serve application, and what calls others first.

Whoever must know what runs reads it here: the application itself (`plait.app`), what a change restarts (`effects`), the
tuner's prices, placement, manifests, and `plait serve --show-deployments`. A row names its class rather than importing
it, so that the table costs neither Ray nor torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from plait.config import PlaitConfig, ServedConfig, ServerSection
from plait.errors import PlaitError
from plait.targets import call
from plait_deploy.placement.values import Reservation
from plait_serving.cores import capped
from plait_serving.deployments import CONTROLNET_PREFIX, ENGINE, INGRESS, worker_name
from plait_serving.diffusion.knobs import Placement
from plait_serving.images.config import ControlNetSection, ImagesSection, ResultsSection
from plait_serving.ranking.config import (
    CnSection,
    HnSection,
    RankModelSection,
    RankRole,
    ShardsSection,
    shard_role,
)
from plait_serving.sections import Replicas, Role, Section
from plait_serving.starter.words import image_words, ranking_words

if TYPE_CHECKING:
    from plait_serving.http.context import HttpSettings

INGRESS_CPUS, MODEL_CPUS, WORKER_CPUS = 0.1, 0.4, 0.2
"""Logical CPUs that Ray counts for a replica of the ingress, of a model for images and of one that ranks without
`num_cpus`. Small, so that all fit on a small machine."""

_ROUTING_PERIOD_S = 1.0
"""How often replicas say what waits at them and which models they have."""
_NOT_ENGINES = {"replicas", "num_cpus", "num_gpus", "results", "knobs"}
"""What an engine's replicas do not read of the section of images."""
_NOT_HTTP = {"port", "direct_port", "ingress_replicas", "start_new_first", "drain_s", "ready_timeout_s"}
"""What `http_settings` does not read of the server's section."""

SectionT = TypeVar("SectionT", bound=Section)
_Section = ImagesSection | ControlNetSection | CnSection | HnSection | ShardsSection


@dataclass(frozen=True, slots=True, kw_only=True)
class HandleOf:
    """Stands among the arguments of a row for Serve's handle of another one, by its name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(Reservation):
    """A row. `target`: the class, as `module:Class`; `args`: what it is constructed with, and `knobs` what running
    replicas receive (Serve's `user_config`); `scaling`: how the number of replicas follows the load, if it does;
    `options`: Serve's, of which a change reaches what runs; `finishes`: whether requests are finished before a stop."""

    target: str
    args: Mapping[str, Any]
    knobs: Mapping[str, Any] | None = None
    scaling: Replicas | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    finishes: bool = False

    @property
    def starts_first(self) -> bool:
        """Whether new replicas start before old ones stop."""
        return bool(self.options["max_surge_percent"])

    @property
    def fixed(self) -> str:
        """What only a restart changes, as JSON: the same in every process."""
        fixed = self.target, self.args, self.num_cpus, self.num_gpus
        return json.dumps(fixed, sort_keys=True, default=_plain)

    def version(self, salt: str) -> str:
        """Return Serve's version of the deployment, which stands for the arguments that are bound to it. `salt`: unique
        per run of a server, so that new code never counts as old."""
        return hashlib.sha256(f"{salt}\n{self.name}\n{self.fixed}".encode()).hexdigest()[:16]

    def changes(self) -> dict[str, str]:
        """Return what a change of each key does: restart, scale or reconfigure."""
        restarts = [key for name, value in self.args.items() for key in _keys(name, value)]
        return {
            **dict.fromkeys((*restarts, "num_cpus", "num_gpus"), "restart"),
            "replicas": "scale",
            **dict.fromkeys((*self.options, *(self.knobs or ())), "reconfigure"),
        }


def deployments(
    config: ServedConfig, *, engine: Callable[[Mapping[str, Any]], Any] | None = None
) -> tuple[Deployment, ...]:
    """Return the table; each row calls only rows below it. `engine`: another source of base models than the section
    (tests supply their own)."""
    server, images = config.server, config.images
    rows: list[Deployment] = []
    if images is not None:
        rows += _of_images(images, server, engine or _engine_of(images))
    for name, section in config.ranking_models.items():
        rows += _of_model(name, section, server)
    return (_ingress(config, rows), *rows)


def _ingress(config: ServedConfig, rows: Sequence[Deployment]) -> Deployment:
    server, images, tuning = config.server, config.images, config.tuning
    served = config.model_dump(mode="json", include={"server", "images", "recommend"})
    return Deployment(
        name=INGRESS,
        target="plait_serving.deployments.ingress:Ingress",
        args={
            "handles": {row.name: HandleOf(name=row.name) for row in rows},
            "settings": partial(
                http_settings,
                server=ServerSection(**server.model_dump(exclude=_NOT_HTTP)),
                words=starter_words(config),
                results=None if images is None or images.results is None else _whole(images.results),
            ),
            "ranking": {name: section.folder for name, section in config.ranking_models.items()},
            "routers": partial(call, "plait.tuning.service.http:tuning_routers", tuning=_whole(tuning))
            if tuning.enabled
            else None,
            "direct": None
            if server.direct_port is None
            else {"host": server.host, "port": server.direct_port, "drain_s": server.drain_s},
        },
        knobs={"config": served} if tuning.enabled else None,
        num_cpus=INGRESS_CPUS,
        min_replicas=server.ingress_replicas,
        max_replicas=server.ingress_replicas,
        options={
            "max_surge_percent": server.surge_percent(num_gpus=0.0, replicas=server.ingress_replicas),
            "graceful_shutdown_timeout_s": server.drain_s,
        },
        finishes=True,
    )


def starter_words(config: ServedConfig) -> Mapping[str, Callable[[], Mapping[str, Any]]]:
    """Return what reads the words of the starter models that are served, by the names that requests use."""
    found: dict[str, Callable[[], Mapping[str, Any]]] = {}
    if config.images is not None:
        found |= dict.fromkeys(config.images.starters, image_words)
    if config.recommend is not None and config.recommend.models is None:
        found |= dict.fromkeys(config.ranking_models, ranking_words)
    return found


def http_settings(
    server: ServerSection,
    *,
    words: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
    results: ResultsSection | None = None,
) -> HttpSettings:
    """Return the settings of the HTTP side; called in the ingress replica, where its imports belong. `words`: what
    reads the words that a model knows."""
    from plait_serving.http.context import HttpSettings
    from plait_serving.http.edge.auth import ANYONE, Principal
    from plait_serving.starter.preprocess import PREPROCESSORS

    return HttpSettings(
        api_keys=server.api_keys,
        tenants=server.tenants,
        anyone=Principal(tenant=ANYONE.tenant, role=Role.USER) if server.is_open else ANYONE,
        allowed_hosts=server.answered_hosts,
        allowed_origins=server.allowed_origins,
        trusted_proxies=server.trusted_proxies,
        a1111_api=server.a1111_api,
        max_body_bytes=server.largest_body_bytes,
        max_bodies_bytes=8 * max(server.largest_body_bytes, 64 << 20),
        preprocessors=PREPROCESSORS,
        results=results,
        words={name: read() for name, read in (words or {}).items()},
    )


def _whole(section: SectionT) -> SectionT:
    """Return a section with all its keys set: of what is bound, the others are not read, and not shown."""
    return section.model_copy(update=dict(section))


def _engine_of(images: ImagesSection) -> Callable[[Mapping[str, Any]], Any]:
    """Return what makes an engine in its replica, of a section that sets what replicas read: no numbers of them, what
    Ray reserves, knobs, and what others read."""
    nets = images.resolved_controlnets().items()
    read = {
        "device": device_of(images.device, images.num_gpus),
        "controlnets": {name: {"folder": it.folder, "preprocessor": it.preprocessor} for name, it in nets},
    }
    section = ImagesSection(**images.model_dump(exclude=_NOT_ENGINES) | read)
    return partial(call, "plait_serving.deployments.images.hosted:open_images", images=section)


def _of_images(
    images: ImagesSection, server: ServerSection, source: Callable[[Mapping[str, Any]], Any]
) -> Iterator[Deployment]:
    """Yield the base model's row, and those of its ControlNets."""
    services = images.controlnet_services()
    # Requests go to replicas that have their model, if there are several.
    routed = {
        "request_router_config": {
            "request_router_class": "plait_serving.deployments.images.router:ModelRouter",
            "request_routing_stats_period_s": _ROUTING_PERIOD_S,
        }
    }
    yield _row(
        images,
        server,
        MODEL_CPUS,
        name=ENGINE,
        target="plait_serving.deployments.images.engine:EngineReplica",
        args={
            "source": source,
            "controlnets": {name: HandleOf(name=CONTROLNET_PREFIX + name) for name in services},
        },
        knobs=capped(images.knobs, images.num_cpus).model_dump(mode="json"),
        options={
            "graceful_shutdown_timeout_s": server.drain_s,
            **(routed if len(images.base_models) > 1 or images.models_folder is not None else {}),
        },
        finishes=True,
        workload="images",
    )
    for name, section in services.items():
        yield _row(
            section,
            server,
            MODEL_CPUS,
            name=CONTROLNET_PREFIX + name,
            target="plait_serving.deployments.images.controlnet:ControlNetDeployment",
            args={
                "name": name,
                "folder": str(section.folder),
                "dtype": images.dtype,
                "device": device_of(images.device, section.num_gpus),
                "executor": images.executor.value,
                "audit_every": images.audit_every,
            },
            knobs={"threads": capped(section, section.num_cpus).threads},
            workload="images",
        )


def _of_model(name: str, section: RankModelSection, server: ServerSection) -> Iterator[Deployment]:
    """Yield the rows of a recommendation model."""
    held = section.cn.shard_section
    dealt = None if held is None else {"shards": held.count, "memory_bytes": held.memory_bytes}
    shards = [shard_role(number) for number in range(held.count)] if held is not None else []

    for part_name, part in section.parts.items():
        role: RankRole = "shard" if isinstance(part, ShardsSection) else part_name  # type: ignore[assignment]
        more: dict[str, Any] = {}
        if isinstance(part, HnSection):
            more |= {"device": device_of("auto", part.num_gpus), "executor": section.executor}
        if role == "cn":
            more["hns"] = HandleOf(name=worker_name(name, "hn"))
            if shards:
                more |= {"dealt": dealt, "shards": [HandleOf(name=worker_name(name, it)) for it in shards]}
        elif role == "shard":
            more |= {"dealt": dealt, "shard": shards.index(part_name)}
        yield _row(
            part,
            server,
            WORKER_CPUS,
            name=worker_name(name, part_name),
            target="plait_serving.deployments.ranking.worker:RankWorker",
            args={
                "name": name,
                "folder": section.folder,
                "role": role,
                "omp_wait": part.omp_wait,
                "between_hosts": section.between_hosts,
                **more,
            },
            knobs={} if isinstance(part, ShardsSection) else capped(part.knobs, part.num_cpus).model_dump(mode="json"),
            is_shard=role == "shard",
            memory_bytes=(part.memory_bytes or 0) if isinstance(part, ShardsSection) else 0,
            finishes=role in ("whole", "cn"),
            workload="ranking",
        )


def _row(
    section: _Section, server: ServerSection, usual_cpus: float, *, options: Mapping[str, Any] | None = None, **row: Any
) -> Deployment:
    """Return a row with what a section says of replicas and what they reserve. `usual_cpus`: of one without
    `num_cpus`."""
    num_gpus = getattr(section, "num_gpus", None) or 0.0
    surge = server.surge_percent(num_gpus=num_gpus, replicas=section.max_replicas)
    return Deployment(
        num_cpus=section.num_cpus or usual_cpus,
        num_gpus=num_gpus,
        min_replicas=section.min_replicas,
        max_replicas=section.max_replicas,
        scaling=section.replicas if isinstance(section.replicas, Replicas) else None,
        options={"max_surge_percent": surge, **(options or {})},
        **row,
    )


def device_of(device: str, num_gpus: float | None) -> str:
    """Return where a replica runs: without a part of a GPU on the CPU, unless a device is named. Ray does not hide GPUs
    from it."""
    return "cpu" if device == "auto" and not num_gpus else device


def finishing(rows: Sequence[Deployment]) -> tuple[str, ...]:
    """Return the deployments that finish their requests before a stop, in this order: what is in front last."""
    front, *rest = (row.name for row in rows if row.finishes)
    return (*rest, front)


def logical_cpus(config: ServedConfig) -> int:
    """Return the logical CPUs that Ray must have so that every replica can be placed, those of ControlNets that a knob
    runs beside the base model now included."""
    if (images := config.images) is not None:
        knobs = images.knobs.model_copy(update={"controlnet_placement": Placement.REMOTE})
        config = config.model_copy(update={"images": images.model_copy(update={"knobs": knobs})})
    return math.ceil(sum(row.max_replicas * row.num_cpus for row in deployments(config)))


def spare_cpus(rows: Sequence[Deployment]) -> int:
    """Return the logical CPUs that Ray must have so that in an update one more replica has room."""
    return math.ceil(max((row.num_cpus for row in rows if row.starts_first), default=0))


def check_cpus(config: PlaitConfig) -> None:
    """Raise `PlaitError` if a local Ray is to have fewer logical CPUs than replicas reserve at the start: they would
    wait for room until `server.ready_timeout_s` is over."""
    there, needed = config.ray.num_cpus, sum(row.min_replicas * row.num_cpus for row in deployments(config))
    if config.ray.is_local and there is not None and round(needed, 3) > there:
        raise PlaitError(f"ray.num_cpus: {there} is too few for the replicas, which reserve {needed:.4g}")


class Effect(StrEnum):
    """What happens to a deployment, from the cheapest to the most expensive."""

    RECONFIGURED = "reconfigured"
    SCALED = "scaled"
    RESTARTED = "restarted"
    ADDED = "added"
    REMOVED = "removed"


def effects(before: Sequence[Deployment], after: Sequence[Deployment]) -> dict[str, Effect]:
    """Return the effect of replacing the deployments `before` by `after`, by name; unaffected ones are left out.

    Serve restarts the replicas of a deployment whose version changed or that needs other resources; other options are
    passed to running replicas, and a changed count only starts or stops some
    (`DeploymentVersion.requires_actor_restart` in ray/serve/_private/version.py, Ray 2.60).
    """
    old = {row.name: row for row in before}
    found = dict.fromkeys(old.keys() - {row.name for row in after}, Effect.REMOVED)
    for row in after:
        was = old.get(row.name)
        if was is None:
            found[row.name] = Effect.ADDED
        elif row.fixed != was.fixed:
            found[row.name] = Effect.RESTARTED
        elif _count(row) != _count(was):
            found[row.name] = Effect.SCALED
        elif (row.knobs, row.options) != (was.knobs, was.options):
            found[row.name] = Effect.RECONFIGURED
    return found


def _count(row: Deployment) -> tuple[Any, ...]:
    return row.min_replicas, row.max_replicas, row.scaling


def document_of(rows: Sequence[Deployment]) -> list[dict[str, Any]]:
    """Return the table as plain data."""
    return [
        {
            "name": row.name,
            "class": row.target.rpartition(":")[2],
            "replicas": {"min": row.min_replicas, "max": row.max_replicas},
            "num_cpus": row.num_cpus,
            "num_gpus": row.num_gpus,
            "memory_bytes": row.memory_bytes,
            "knobs": dict(row.knobs or {}),
            "changes": row.changes(),
        }
        for row in rows
    ]


def _keys(name: str, value: Any) -> Iterator[str]:
    """Yield the keys of an argument: those of a section, and of what holds one, or its own name."""
    if isinstance(value, BaseModel):
        yield from (f"{name}.{key}" for key in type(value).model_fields if key in value.model_fields_set)
    elif isinstance(value, partial):
        yield from (key for inner, it in value.keywords.items() for key in _keys(inner, it))
    elif is_dataclass(value) and not isinstance(value, HandleOf):
        for inner, it in ((each.name, getattr(value, each.name)) for each in fields(value)):
            yield from _keys(inner if isinstance(it, BaseModel) else f"{name}.{inner}", it)
    else:
        yield name


def _plain(value: Any) -> Any:
    """Return what stands for an argument, in every process alike."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value), {it.name: getattr(value, it.name) for it in fields(value)}]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return repr(value)
