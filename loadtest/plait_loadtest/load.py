"""From a name, a file or a mapping, plus overriding settings, to a frozen `Scenario`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import resources
from os.path import expanduser
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from plait_loadtest import scenario as model
from plait_loadtest import strict_yaml
from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import Scenario
from plait_loadtest.validate import validate

_SUFFIXES = (".yaml", ".yml", ".json")  # JSON is YAML


def _by_tag(union: Any, tag: str) -> dict[str, type[BaseModel]]:
    return {each.model_fields[tag].default: each for each in get_args(get_args(union)[0])}


_ARRIVALS, _MIX = _by_tag(model.Arrivals, "kind"), _by_tag(model.MixClass, "api")

_PLACES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("mix.*.inputs.*", model.InferInput), ("mix.*.edits", model.Edits), ("mix.*.controlnets", model.ControlNets),
    ("mix.*.loras", model.Loras), ("slo", model.Slo), ("target.check", model.ResponseCheck),
    ("limits", model.GeneratorLimits), ("target", model.LoadTarget), ("", Scenario),
)  # fmt: skip
"""What a setting may mean that is misspelt, or stands in the wrong place; of equal names the last counts."""

_Node = dict[str, Any]


def builtin_names() -> tuple[str, ...]:
    """Return the names of the scenarios that ship with the package."""
    files = resources.files("plait_loadtest").joinpath("builtin").iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


def load_scenario(source: str | Path | Mapping[str, object], overrides: Mapping[str, object]) -> Scenario:
    """Return the scenario of a built-in name, a YAML file or a mapping, with `overrides` set, validated and ready to
    plan.

    `overrides` are dotted settings: `duration_s`, `arrivals.rate_per_s`, `target.headers.authorization`; a class of
    the mix is addressed by its position, its name or `*` for all: `mix.*.steps`. A new `arrivals.kind` keeps the
    settings that both kinds have, such as the rate. Paths in a file are relative to it, others to the current
    folder. Raises `ScenarioError`, one sentence that names the field.
    """
    said, folder, settings = _read(source)
    make_paths_absolute(settings, folder)
    # The containers that overrides need where the scenario leaves the default.
    settings.setdefault("arrivals", model.PoissonArrivals(rate_per_s=1.0).model_dump())
    settings.setdefault("mix", [{}])
    for key, value in sorted(overrides.items(), key=lambda item: item[0] != "arrivals.kind"):
        _override(settings, key, _plain(value))
    make_paths_absolute(settings, Path.cwd())
    _fit_stages(settings)
    try:
        for field in strict_yaml.not_text(settings):
            raise ScenarioError(f"{field}: is not valid Unicode")
        _check_needs(settings)
        scenario = Scenario.model_validate(_with_apis(settings))
        validate(scenario)
    except ValidationError as error:
        raise ScenarioError(said + _sentence(error)) from error
    except ScenarioError as error:
        raise ScenarioError(said + str(error)) from error
    return scenario


def as_yaml(scenario: Scenario) -> str:
    """Return every setting as YAML, defaults included; `load_scenario` makes the same scenario from it."""
    return yaml.safe_dump(_plain(scenario.model_dump()), sort_keys=False, allow_unicode=True, width=120)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(source: str | Path | Mapping[str, object]) -> tuple[str, Path, _Node]:
    """Return the prefix of messages, the folder that relative paths start from, and the settings."""
    if isinstance(source, Mapping):
        settings = _plain(source)
        return "", Path.cwd(), dict(settings)
    if isinstance(source, str) and source in builtin_names():
        text = resources.files("plait_loadtest").joinpath("builtin", f"{source}.yaml").read_text(encoding="utf-8")
        return f"{source}: ", Path.cwd(), {"name": source} | _parse(text, source)
    path = Path(source)
    if not path.is_file() and isinstance(source, str) and path.suffix not in _SUFFIXES:
        raise ScenarioError(f"{source!r} is neither a scenario of plait ({', '.join(builtin_names())}) nor a file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return f"{path}: ", path.absolute().parent, {"name": path.stem} | _parse(text, str(path))


def _parse(text: str, source: str) -> _Node:
    try:
        settings = strict_yaml.parse(text, source)[1]
    except strict_yaml.NotYaml as error:
        raise ScenarioError(str(error)) from error
    if settings is None:
        raise ScenarioError(f"{source}: it is empty")
    if not isinstance(settings, dict):
        raise ScenarioError(f"{source}: a scenario is a mapping of settings")
    return dict(_plain(settings))


def _plain(value: Any) -> Any:
    """Return a copy made of plain mappings, lists, strings and numbers, which may be changed and dumped."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# ---- completing ------------------------------------------------------------------------------------------------------


def _fit_stages(settings: _Node) -> None:
    """Let the stages decide how long the run is, where nothing else does."""
    arrivals = settings["arrivals"]
    if isinstance(arrivals, dict) and arrivals.get("kind") == "step" and not {"duration_s", "count"} & settings.keys():
        with suppress(KeyError, TypeError, ValueError):  # pydantic says what is wrong
            settings["duration_s"] = sum(seconds for seconds, _ in arrivals["stages"])


def _with_apis(settings: _Node) -> _Node:
    """Set the target's API on each class of the mix that does not give its own."""
    target, mix = settings.get("target"), settings["mix"]
    api = target.get("api", "images") if isinstance(target, dict) else "images"
    if not isinstance(mix, list):
        return settings
    return settings | {"mix": [{"api": api} | entry if isinstance(entry, dict) else entry for entry in mix]}


def make_paths_absolute(settings: _Node, folder: Path) -> None:
    """Make paths absolute, in place, so that a scenario means the same files wherever its text is kept."""
    for holder, key in path_settings(settings):
        value = holder[key]
        if isinstance(value, str):
            holder[key] = absolute(value, folder)
        elif isinstance(value, list):
            holder[key] = [absolute(item, folder) if isinstance(item, str) else item for item in value]


def absolute(path: str, folder: Path) -> str:
    """Return a path that starts from `folder`, or from a home folder (`~`)."""
    return str(folder / expanduser(path))


def path_settings(settings: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield every setting of a scenario that names files: what holds it, and its key there."""
    mix = settings.get("mix")
    holders: list[tuple[object, str]] = [(settings.get("arrivals"), "file"), (settings.get("target"), "ca")]
    for entry in mix if isinstance(mix, list) else []:
        if isinstance(entry, dict):
            holders += [(entry, "prompts_file"), (entry, "body_file"), (entry.get("controlnets"), "images")]
            holders += [(entry.get("edits"), key) for key in ("images", "masks")]
    for holder, key in holders:
        if isinstance(holder, dict) and key in holder:
            yield holder, key


def _check_needs(settings: _Node) -> None:
    needs = settings.get("needs")
    for key in needs if isinstance(needs, list) else []:
        node: object = settings
        for part in str(key).split("."):
            if isinstance(node, list):
                node = dict(enumerate(node)).get(int(part)) if part.isdecimal() else None
            else:
                node = node.get(part) if isinstance(node, dict) else None
        if node is None:
            raise ScenarioError(f"{key} must be given: this scenario has no default for it")


# ---- overriding ------------------------------------------------------------------------------------------------------


def _override(settings: _Node, key: str, value: object) -> None:
    if key == "arrivals.kind" and isinstance(settings["arrivals"], dict):
        kept = _ARRIVALS[value].model_fields if isinstance(value, str) and value in _ARRIVALS else {}
        common = {name: old for name, old in settings["arrivals"].items() if name in kept}
        settings["arrivals"] = common | {"kind": value}
        return
    holders: list[object] = [settings]
    *way, last = key.split(".")
    for depth, part in enumerate(way, start=1):
        holders = [child for holder in holders for child in _children(holder, part, ".".join(way[:depth]))]
    for holder in holders:
        if not isinstance(holder, dict):
            raise ScenarioError(f"{key}: {'.'.join(way)} has no settings of its own")
        holder[last] = value


def _children(holder: object, part: str, path: str) -> list[object]:
    """Return what `part` refers to in `holder`: one entry of a mapping, or one or all of a list."""
    if isinstance(holder, dict):
        if holder.get(part) is None:
            holder[part] = {}
        return [holder[part]]
    if not isinstance(holder, list):
        raise ScenarioError(f"{path}: there is no such setting")
    named = [entry for entry in holder if isinstance(entry, dict) and entry.get("name") == part]
    found = holder if part == "*" else named or (holder[int(part) : int(part) + 1] if part.isdecimal() else [])
    if not found:
        raise ScenarioError(f"{path}: there is no such entry; use a position from 0, a name, or * for all")
    return list(found)


# ---- saying what is wrong --------------------------------------------------------------------------------------------


def _sentence(error: ValidationError) -> str:
    """Return the first problem, with the name of its field; an unknown one goes first."""
    first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    beside = _suggestion(first["loc"]) if first["type"] == "extra_forbidden" else ""
    return strict_yaml.sentence(first, ".".join(_field_parts(first["loc"])), beside=beside)


def _field_parts(location: tuple[int | str, ...]) -> list[str]:
    """Return the location without the names of pydantic's union members, which users do not write."""
    parts = [str(part) for part in location]
    if len(parts) > 1 and parts[0] == "arrivals" and parts[1] in _ARRIVALS:
        del parts[1]
    if len(parts) > 2 and parts[0] == "mix" and parts[2] in _MIX:
        del parts[2]
    return [part for part in parts if "[" not in part]


def _suggestion(location: tuple[int | str, ...]) -> str:
    if location[0] == "arrivals":
        kind = str(location[1])
        return f" for {kind} arrivals, which have {', '.join(_ARRIVALS[kind].model_fields)}"
    here, name = re.sub(r"\.\d+", ".*", ".".join(_field_parts(location[:-1]))), str(location[-1])
    kinds = [_MIX[str(location[2])]] if location[0] == "mix" else [*_MIX.values()]
    places = [*_PLACES, *(("mix.*", kind) for kind in kinds)]
    own = {field: "" for place, each in places if place == here for field in each.model_fields}
    known = {field: f"{place}.".lstrip(".") for place, each in places for field in each.model_fields} | own
    near = [name] if name in known else _near(name, own) or _near(name, known)
    return f" (did you mean {known[near[0]]}{near[0]}?)" if near else ""


def _near(name: str, known: Mapping[str, str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known), n=1)
