"""The Serve application: HTTP ingress -> base model replicas -> one deployment per ControlNet.

`build` is a Serve application builder: ``import_path: plait.app:build`` in a Serve YAML, its ``args`` are `AppArgs`
(``plait deploy render`` writes both).
"""

# No `from __future__ import annotations` here: Serve reads the class of `build`'s argument from its signature.
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve

from plait.config import Section, ServerSection
from plait_serving.config import INGRESS_CPUS, MODEL_CPUS, ControlNetSection, ImagesSection
from plait_serving.deployments.engine import MAX_ONGOING_REQUESTS, EngineReplica, EngineSource
from plait_serving.deployments.ingress import Ingress
from plait_serving.deployments.lazy import LazyControlNet
from plait_serving.diffusion.knobs import Placement

if TYPE_CHECKING:
    from plait_serving.http.context import HttpSettings

APP_NAME = "plait"
INGRESS, ENGINE, CONTROLNET_PREFIX = "ingress", "engine", "controlnet-"
"""Names of the deployments, in Serve's status, in logs and in a Serve YAML."""

_START_TRIES = 2
"""A folder that does not load now will not load the 20th time either (Serve's default)."""


class AppArgs(Section):
    """What the application needs of a plait.yaml."""

    server: ServerSection = ServerSection()
    images: ImagesSection = ImagesSection()


def build(args: AppArgs) -> serve.Application:
    """The application of a configuration. Builds nothing heavy: models are loaded in the replicas."""
    from plait_serving.deployments.images_source import ImagesSource

    return compose(args, ImagesSource(args.images))


def compose(args: AppArgs, source: EngineSource) -> serve.Application:
    """The application around any recipe of an engine (tests bring their own)."""
    images, server = args.images, args.server
    controlnets = _controlnets(images)
    engine = serve.deployment(EngineReplica).options(
        name=ENGINE,
        num_replicas=images.replicas,
        ray_actor_options={"num_cpus": MODEL_CPUS, "num_gpus": images.num_gpus},
        user_config=images.knobs.model_dump(mode="json"),
        graceful_shutdown_timeout_s=server.drain_s,
        **_COMMON,
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS,
        num_replicas=1,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=server.drain_s,
        **_COMMON,
    )
    return ingress.bind(engine.bind(source, controlnets), partial(http_settings, server))


_COMMON: dict[str, Any] = {
    "max_ongoing_requests": MAX_ONGOING_REQUESTS,
    "max_queued_requests": -1,
    "max_constructor_retry_count": _START_TRIES,
    "graceful_shutdown_wait_loop_s": 0.2,
    "health_check_period_s": 5.0,
    "health_check_timeout_s": 30.0,
}


def http_settings(server: ServerSection) -> "HttpSettings":
    """The HTTP side's settings; called in the ingress replica, where its imports belong."""
    from plait_serving.http.auth import ApiKey, Principal, Role
    from plait_serving.http.context import HttpSettings
    from plait_serving.starter.preprocess import PREPROCESSORS

    keys = tuple(
        ApiKey(sha256=key.sha256, principal=Principal(tenant=key.tenant, role=Role(key.role)))
        for key in server.api_keys
    )
    return HttpSettings(api_keys=keys, max_body_bytes=server.largest_body_bytes, preprocessors=PREPROCESSORS)


def _controlnets(images: ImagesSection) -> dict[str, serve.Application]:
    """Each ControlNet as a deployment of its own; none if the knob says that they run beside the base model."""
    if images.knobs.controlnet_placement is Placement.LOCAL:
        return {}
    return {name: _controlnet(name, section, images) for name, section in images.resolved_controlnets().items()}


def _controlnet(name: str, section: ControlNetSection, images: ImagesSection) -> serve.Application:
    deployment = serve.deployment(LazyControlNet).options(
        name=CONTROLNET_PREFIX + name,
        num_replicas=section.replicas,
        ray_actor_options={"num_cpus": MODEL_CPUS, "num_gpus": section.num_gpus},
        user_config={"threads": section.threads},
        **_COMMON,
    )
    return deployment.bind(name=name, folder=str(section.folder), dtype=images.dtype, device=images.device)
