"""From the text of a job file to a `JobSpec`: paths become absolute, every error names its line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from plait_autoconfig.designers import check_name
from plait_autoconfig.errors import DesignerError, JobRefused
from plait_autoconfig.jobs.past_runs import measured_candidates
from plait_autoconfig.jobs.spec import JobSpec
from plait_loadtest import strict_yaml
from plait_loadtest.errors import LoadtestError
from plait_loadtest.load import absolute, builtin_names, load_scenario, make_paths_absolute

_Location = tuple[int | str, ...]


def parse_job(text: str, *, folder: Path, source: str = "the job") -> JobSpec:
    """Return the job of a YAML (or JSON) text; its relative paths start from `folder`.

    Raises `JobRefused`: one sentence with `source`, line and field.
    """
    try:
        root, settings = strict_yaml.parse(text, source)
    except strict_yaml.NotYaml as error:
        raise JobRefused(str(error)) from error
    if not isinstance(settings, dict):
        raise JobRefused(f"{source}: a job is a mapping of settings")
    try:
        return job_of(settings, folder=folder)
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
        location = tuple(part for part in first["loc"] if part not in {"int", "float", "choice"} or part in settings)
        if location[:1] == ("target",):
            location = (location[0], *location[2:])  # without the kind of target
        at = _line_of(root, location)
        beside = " for a service of yours" if first["loc"][:2] == ("target", "service") else ""
        said = strict_yaml.sentence(first, ".".join(map(str, location)) or "the job", beside=beside)
        said = said.removeprefix("the job: ") if first["type"] == "value_error" else said
        raise JobRefused(f"{source}{f', line {at}' if at else ''}: {said}") from error
    except JobRefused as error:
        raise JobRefused(f"{source}: {error}") from error


def job_of(settings: Mapping[str, Any], *, folder: Path) -> JobSpec:
    """Validate the job of a mapping, e.g. of an HTTP request. Raises pydantic's `ValidationError`, or `JobRefused` for
    a scenario."""
    for field in strict_yaml.not_text(settings):
        raise JobRefused(f"{field}: not valid Unicode")
    try:
        text = json.dumps(_absolute(settings, folder), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise JobRefused(f"a value is neither text, number, list nor mapping ({error}); quote dates") from error
    spec = JobSpec.model_validate_json(text)
    if spec.candidates == "measured":
        known = {**spec.model_dump(mode="json"), "candidates": measured_candidates(spec)}
        spec = JobSpec.model_validate_json(json.dumps(known))
    try:
        check_name(spec.designer.name)
    except DesignerError as error:
        raise JobRefused(f"designer.name: {error}") from error
    for scenario in spec.scenarios:
        try:
            load_scenario(scenario, {})
        except LoadtestError as error:
            raise JobRefused(f"scenarios: {error}") from error
    return spec


def _absolute(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Make paths absolute, so that a job means the same files wherever its text is kept."""
    changed = dict(settings)
    target, library, scenarios = changed.get("target"), changed.get("library"), changed.get("scenarios")
    if isinstance(target, Mapping):
        named = {key: target[key] for key in ("config", "file", "folder") if isinstance(target.get(key), str)}
        named |= {"folder": "."} if {"command", "apply"} & target.keys() and "folder" not in named else {}
        changed["target"] = {**target, **{key: absolute(each, folder) for key, each in named.items()}}
    if isinstance(library, str) and "://" not in library:
        changed["library"] = absolute(library, folder)
    if isinstance(scenarios, list):
        changed["scenarios"] = deepcopy(scenarios)
        for at, each in enumerate(changed["scenarios"]):
            if isinstance(each, dict):
                make_paths_absolute(each, folder)
            elif isinstance(each, str) and each not in builtin_names():
                changed["scenarios"][at] = absolute(each, folder)
    return changed


def _line_of(root: yaml.Node | None, location: _Location) -> int | None:
    """Return the line of the deepest part of the location that the text has; None for the job as a whole."""
    node, line = root, None
    for part in location:
        found = _child(node, part)
        if found is None:
            break
        node, line = found[0], found[1]
    return line


def _child(node: yaml.Node | None, part: int | str) -> tuple[yaml.Node, int] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == str(part):
                return value, key.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part].start_mark.line + 1
    return None
