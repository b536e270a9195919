"""`DEPLOYMENT.knob`: the names that a tuning job uses for settings of a plait configuration, and where they are in it.

A deployment has its knobs (the contents of `user_config`) and further settings of its section, such as `replicas`
and `num_gpus`; a recommendation model also has `MODEL.mode`, split or whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from plait.config import PlaitConfig, parse_config
from plait.errors import ConfigError, PlaitError
from plait.tuning.forms import KeyPath, set_at
from plait_serving.deployments import CONTROLNET_PREFIX, ENGINE, worker_name
from plait_serving.images.config import ImagesSection
from plait_serving.ranking.config import RankModelSection
from plait_serving.spelling import hint


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobPlace:
    """One knob: the path of its value in plait.yaml, and its current value. `active`: its deployment runs in this
    configuration."""

    path: KeyPath
    value: Any
    active: bool = True


def knob_places(config: PlaitConfig) -> dict[str, KnobPlace]:
    """Return every knob of the configuration's deployments, by name."""
    places = {} if config.images is None else dict(_of_images(config.images))
    for name, section in config.ranking_models.items():
        places |= _of_ranking_model(name, section)
    return places


def check_names(config: PlaitConfig, names: Iterable[str]) -> None:
    """Check that the deployments have these knobs. Raises `PlaitError` that names each unknown one and the existing
    ones."""
    names = tuple(names)
    places = knob_places(config)
    own: dict[str, list[str]] = {}
    for name in sorted(places):
        deployment, _, knob = name.rpartition(".")
        own.setdefault(deployment, []).append(knob)
    problems = []
    for name in names:
        deployment, dot, knob = name.rpartition(".")
        if not dot:
            what = "no DEPLOYMENT.knob of plait; a service of another kind is tuned with target.command or target.apply"
            problems.append(f"{name}: {what}")
        elif deployment not in own:
            problems.append(f"{name}: there is no deployment {deployment!r}{_or(deployment, own)}")
        elif name not in places:
            problems.append(f"{name}: {deployment} has no knob {knob!r}{_or(knob, own[deployment])}")
        elif not places[name].active and not _may_run(deployment, names):
            problems.append(f"{name}: {deployment} does not run in this configuration")
    if problems:
        raise PlaitError("knobs: " + "; ".join(problems))


def check_values(config: PlaitConfig, name: str, values: Iterable[Any]) -> None:
    """Check each value that the job lists for a knob. Raises `PlaitError` if the knob does not allow one of them."""
    for value in values:
        try:
            apply_knobs(config, {name: value})
        except ConfigError as error:
            raise PlaitError(f"knobs: {name} cannot be {value!r}: {'; '.join(error.problems)}") from error


def apply_knobs(config: PlaitConfig, values: Mapping[str, Any]) -> PlaitConfig:
    """Return the configuration with these knobs, by name. Raises `ConfigError` if a value is refused, `PlaitError` for
    unknown names."""
    data = config.model_dump(mode="json")
    for path, value in settings_of(config, values).items():
        set_at(data, path, value)
    return parse_config(data, source="knobs", folder=Path.cwd())


def known_values(config: PlaitConfig, names: Iterable[str]) -> dict[str, Any]:
    """Return the current values of these knobs in the configuration."""
    places = knob_places(config)
    return {name: places[name].value for name in names}


def settings_of(config: PlaitConfig, values: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Return the knobs as settings of plait.yaml, by path. Models and ControlNets that the file leaves to the starter's
    folder are written out too, since a knob cannot be set without its model. Raises `PlaitError` for unknown names."""
    places = knob_places(config)
    if unknown := values.keys() - places.keys():
        check_names(config, unknown)
    settings: dict[KeyPath, Any] = {}
    for name, value in values.items():
        settings |= {**_folder_of(config, places[name].path), places[name].path: value}
    return settings


def _of_images(images: ImagesSection) -> Iterator[tuple[str, KnobPlace]]:
    yield from _fields(ENGINE, ("images", "knobs"), images.knobs)
    yield from _fields(ENGINE, ("images",), images, only={"replicas", "num_cpus", "num_gpus"})
    services, own = images.controlnet_services(), {"threads", "replicas", "num_cpus", "num_gpus"}
    for name, section in images.resolved_controlnets().items():
        path = ("images", "controlnets", name)
        yield from _fields(CONTROLNET_PREFIX + name, path, section, only=own, active=name in services)


def _of_ranking_model(name: str, section: RankModelSection) -> Iterator[tuple[str, KnobPlace]]:
    own = ("recommend", "models", name)
    yield from _fields(name, own, section, only={"mode"})
    for role in ("cn", "hn", "whole"):
        part, deployment, active = getattr(section, role), worker_name(name, role), role in section.parts
        yield from _fields(deployment, (*own, role, "knobs"), part.knobs, active=active)
        yield from _fields(deployment, (*own, role), part, only={*type(part).model_fields} - {"knobs"}, active=active)


def _fields(
    deployment: str, path: KeyPath, section: BaseModel, *, only: set[str] | None = None, active: bool = True
) -> Iterator[tuple[str, KnobPlace]]:
    for name, value in section.model_dump(mode="json", include=only).items():
        yield f"{deployment}.{name}", KnobPlace(path=(*path, name), value=value, active=active)


def _may_run(deployment: str, names: Iterable[str]) -> bool:
    """Return whether one of the other knobs can start a deployment that does not run now."""
    names = set(names)
    model = deployment.partition("-")[2]
    return f"{model}.mode" in names or (
        deployment.startswith(CONTROLNET_PREFIX) and f"{ENGINE}.controlnet_placement" in names
    )


def _folder_of(config: PlaitConfig, path: KeyPath) -> dict[KeyPath, Any]:
    """Return the settings that complete the entry which holds a knob; empty if the file has them."""
    if path[:2] == ("images", "controlnets") and config.images is not None and config.images.controlnets is None:
        found = config.images.resolved_controlnets()
        return {
            ("images", "controlnets", name, key): value
            for name, section in found.items()
            for key, value in (("folder", str(section.folder)), ("preprocessor", section.preprocessor))
        }
    if path[:2] == ("recommend", "models") and config.recommend is not None and config.recommend.models is None:
        return {
            ("recommend", "models", name, "folder"): str(section.folder)
            for name, section in config.ranking_models.items()
        }
    return {}


def _or(name: str, there: Iterable[str]) -> str:
    return hint(name, there) or f"; there is {', '.join(there)}"
