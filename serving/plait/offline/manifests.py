"""What a plait.yaml means for a cluster: the Serve application, and what its deployments reserve."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

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
from plait.errors import ConfigError
from plait_deploy.kuberay.sizing import Reservation
from plait_deploy.serve import ServeApplication
from plait_serving.diffusion.knobs import Placement
from plait_serving.images.config import MODEL_CPUS, ControlNetSection, ImagesSection
from plait_serving.ranking.config import WORKER_CPUS, HnSection, ShardsSection, WholeSection
from plait_serving.sections import INGRESS_CPUS


def kuberay_manifests(config: PlaitConfig) -> str:
    """Return the YAML of all objects. Raises `ConfigError` for what contradicts itself or fits no pod."""
    from plait.server.environment import RAY_ENVIRONMENT
    from plait_deploy.errors import DeployError
    from plait_deploy.kuberay.render import render_kuberay
    from plait_serving.deployments.proxy import proxy_environment

    # In a pod the server listens on all interfaces, whatever it does on this machine.
    config = config.model_copy(update={"server": config.server.behind("0.0.0.0")})  # noqa: S104
    try:
        return render_kuberay(
            serve_application(config),
            reservations(config),
            config.deploy,
            port=config.server.port or 8000,
            has_keys=bool(config.server.api_keys),
            longest_request_s=config.server.drain_s,
            ray_version=version("ray"),
            environment={**RAY_ENVIRONMENT, **proxy_environment(config.server.answered_hosts)},
        )
    except DeployError as error:
        raise ConfigError("the manifests", [str(error)]) from error


def serve_application(config: PlaitConfig) -> ServeApplication:
    """Return the application as Serve's config file has it: sections as arguments, knobs with their deployments."""
    args = {"server": config.server.model_dump(mode="json", exclude_defaults=True), **_shapes(config)}
    if config.tuning != TuningSection():
        args["tuning"] = config.tuning.model_dump(mode="json", exclude_defaults=True)
    surges = {one.name: surge_percent(one, config.server) for one in reservations(config)}
    return ServeApplication(name="plait", import_path="plait.app:build", args=args, knobs=config.knobs(), surges=surges)


def surge_percent(one: Reservation, server: ServerSection) -> int:
    """Return Serve's `max_surge_percent` of a deployment."""
    return server.surge_percent(num_gpus=one.num_gpus, replicas=one.max_replicas)


def spare_cpus(config: ServedConfig) -> int:
    """Return the logical CPUs that Ray must have so that in an update one more replica has room."""
    return math.ceil(
        max((one.num_cpus for one in reservations(config) if surge_percent(one, config.server)), default=0)
    )


def reservations(config: ServedConfig) -> list[Reservation]:
    """Return what each deployment of the application reserves (`plait.app` says the same to Ray)."""
    ingresses = config.server.ingress_replicas
    found = [Reservation(name=INGRESS, num_cpus=INGRESS_CPUS, min_replicas=ingresses, max_replicas=ingresses)]
    if (images := config.images) is not None:
        found.append(_of(ENGINE, images))
        found += [_of(CONTROLNET_PREFIX + name, it) for name, it in images.controlnet_services().items()]
    for model, section in config.ranking_models.items():
        for role, part in section.parts.items():
            found.append(
                Reservation(
                    name=worker_name(model, role),
                    num_cpus=part.num_cpus or WORKER_CPUS,
                    num_gpus=part.num_gpus if isinstance(part, HnSection | WholeSection) else 0.0,
                    min_replicas=part.min_replicas,
                    max_replicas=part.max_replicas,
                    is_shard=isinstance(part, ShardsSection),
                    memory_bytes=part.memory_bytes or 0 if isinstance(part, ShardsSection) else 0,
                    workload="ranking",
                )
            )
    return found


def _of(name: str, section: ImagesSection | ControlNetSection) -> Reservation:
    return Reservation(
        name=name,
        num_cpus=section.num_cpus or MODEL_CPUS,
        num_gpus=section.num_gpus,
        min_replicas=section.min_replicas,
        max_replicas=section.max_replicas,
        workload="images",
    )


def _shapes(config: PlaitConfig) -> dict[str, Any]:
    """Return the sections without their knobs, which belong to the deployments, where a change is a reconfigure.

    The knob `controlnet_placement` stays if it is local, since it also decides which deployments exist.
    """
    images, recommend = config.images, config.recommend
    shapes: dict[str, Any] = {"images": None, "recommend": None}
    if images is not None:
        shapes["images"] = images.model_dump(mode="json", exclude_defaults=True, exclude={"knobs"})
        if images.knobs.controlnet_placement is Placement.LOCAL:  # this knob also decides which deployments there are
            shapes["images"]["knobs"] = {"controlnet_placement": Placement.LOCAL.value}
    if recommend is not None:
        parts = {part: {"knobs"} for part in ("cn", "hn", "whole")}
        shapes["recommend"] = recommend.model_dump(
            mode="json", exclude_defaults=True, exclude={"models": {"__all__": parts}}
        )
    return shapes
