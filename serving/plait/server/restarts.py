"""The effect of a configuration change on running deployments: new knobs, more replicas, or a restart.

Serve restarts the replicas of a deployment whose *version* changed or that needs other resources; a changed
`user_config` is passed to running replicas, and a changed count only starts or stops some
(`DeploymentVersion.requires_actor_restart` in ray/serve/_private/version.py, Ray 2.60). So a version stands for
everything that a constructor receives, except knobs and counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from plait.config import CONTROLNET_PREFIX, ENGINE, INGRESS, ServedConfig, worker_name
from plait_serving.images.config import MODEL_CPUS, ImagesSection
from plait_serving.ranking.config import WORKER_CPUS, RankModelSection
from plait_serving.sections import INGRESS_CPUS

__all__ = ["DeploymentPlan", "Effect", "effects", "plans", "versions"]


class Effect(StrEnum):
    """What happens to a deployment, from the cheapest to the most expensive."""

    RECONFIGURED = "reconfigured"
    SCALED = "scaled"
    RESTARTED = "restarted"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan:
    """One deployment as the configuration specifies it. `fixed`: what only a restart changes, as JSON; `num_cpus` and
    `num_gpus`: what Ray reserves for a replica."""

    fixed: str
    knobs: Mapping[str, Any]
    num_cpus: float
    replicas: Any = 1
    num_gpus: float = 0.0


def plans(config: ServedConfig) -> dict[str, DeploymentPlan]:
    """Return the plans of all deployments by name."""
    ingress = DeploymentPlan(
        fixed=_json(_ingress(config)), knobs={}, num_cpus=INGRESS_CPUS, replicas=config.server.ingress_replicas
    )
    found = {INGRESS: ingress}
    if config.images is not None:
        found |= _images(config.images)
    for name, section in config.ranking_models.items():
        for role, part in section.parts.items():
            rest = part.model_dump(mode="json")
            rest.pop("knobs", None)
            replicas = rest.pop("replicas")
            found[worker_name(name, role)] = DeploymentPlan(
                fixed=_json({**_package(section), "role": role, **rest}),
                knobs=part.capped_knobs.model_dump(mode="json"),
                replicas=replicas,
                num_cpus=part.num_cpus or WORKER_CPUS,
                num_gpus=rest.get("num_gpus", 0.0),
            )
    return found


def versions(config: ServedConfig, *, salt: str) -> dict[str, str]:
    """Return Serve's version of each deployment. `salt`: unique per run of a server, so that new code never counts as
    old."""
    return {
        name: hashlib.sha256(f"{salt}\n{name}\n{plan.fixed}".encode()).hexdigest()[:16]
        for name, plan in plans(config).items()
    }


def effects(before: ServedConfig, after: ServedConfig) -> dict[str, Effect]:
    """Return the effect of changing from `before` to `after`, by deployment; unaffected deployments are left out."""
    old, new = plans(before), plans(after)
    found: dict[str, Effect] = {name: Effect.REMOVED for name in old if name not in new}
    for name, plan in new.items():
        if name not in old:
            found[name] = Effect.ADDED
        elif plan.fixed != old[name].fixed:
            found[name] = Effect.RESTARTED
        elif plan.replicas != old[name].replicas:
            found[name] = Effect.SCALED
        elif plan.knobs != old[name].knobs:
            found[name] = Effect.RECONFIGURED
    return found


def _ingress(config: ServedConfig) -> dict[str, Any]:
    return {
        "server": config.server.model_dump(mode="json"),
        "images": config.images is not None,
        "models": {name: _package(section) for name, section in config.ranking_models.items()},
        "tuning": config.tuning.model_dump(mode="json"),
    }


def _images(images: ImagesSection) -> dict[str, DeploymentPlan]:
    dumped = images.model_dump(mode="json", exclude={"knobs", "replicas", "controlnets"})
    controlnets = {name: str(section.folder) for name, section in images.resolved_controlnets().items()}
    fixed = {**dumped, "controlnets": controlnets, "services": sorted(images.controlnet_services())}
    found = {
        ENGINE: DeploymentPlan(
            fixed=_json(fixed),
            knobs=images.capped_knobs.model_dump(mode="json"),
            replicas=images.model_dump(mode="json")["replicas"],
            num_cpus=images.num_cpus or MODEL_CPUS,
            num_gpus=images.num_gpus,
        )
    }
    for name, section in images.controlnet_services().items():
        own = {
            "folder": str(section.folder),
            "dtype": images.dtype,
            "device": images.device,
            "executor": images.executor.value,
            "cpus": section.num_cpus,
            "gpus": section.num_gpus,
        }
        found[CONTROLNET_PREFIX + name] = DeploymentPlan(
            fixed=_json(own),
            knobs={"threads": section.thread_cap},
            replicas=section.model_dump(mode="json")["replicas"],
            num_cpus=section.num_cpus or MODEL_CPUS,
            num_gpus=section.num_gpus,
        )
    return found


def _package(section: RankModelSection) -> dict[str, str]:
    return {"folder": str(section.folder), "mode": section.mode}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)
