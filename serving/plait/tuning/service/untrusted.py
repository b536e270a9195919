"""Checks on what a job submitted over HTTP may contain, run before anything else reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from plait.tuning.service.job_view import JobQueueError
from plait_autoconfig.jobs.spec import ServiceTarget
from plait_loadtest import strict_yaml
from plait_loadtest.load import builtin_names, path_settings

_OPENING = (
    yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken, yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken
)  # fmt: skip
_CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_DEEPEST = 30

_HARMLESS = re.compile(
    r"images\.(knobs\.\w+|defaults\.\w+|replicas|num_cpus|num_gpus)"
    r"|images\.controlnets\.[\w-]+\.(replicas|num_cpus|num_gpus|threads)"
    r"|recommend\.models\.[\w-]+\.(mode|(cn|hn|whole)(\.(?!folder)\w+)+)"
)
"""What `target.settings` may set. Everything else of a configuration names files, models or addresses, or opens one. No
folder either: a model's name may have dots, and be `a.cn`."""

_LEFT_OUT: tuple[tuple[str, Any], ...] = (("images", None), ("recommend", None), ("images.controlnets", {}))


def check_untrusted(text: str) -> None:
    """Check an untrusted job. Raises `JobQueueError`, or `yaml.YAMLError` or `NotYaml` for what is not YAML."""
    _check_tokens(text)
    _check_paths(strict_yaml.parse(text, "the job")[1])


def _check_tokens(text: str) -> None:
    """Raise `JobQueueError` for YAML that could take forever to parse: an alias repeats what it names, so that a few
    lines stand for gigabytes, and nesting costs the square of its depth."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
            raise JobQueueError("invalid_job", "a job sent over HTTP cannot have YAML anchors and aliases")
        if isinstance(token, _OPENING):
            depth += 1
        elif isinstance(token, _CLOSING):
            depth -= 1
        if depth > _DEEPEST:
            raise JobQueueError("invalid_job", f"the job is nested more than {_DEEPEST} levels deep")


def _check_paths(job: Any) -> None:
    """Raise `JobQueueError` if the job names a file of this machine, or where to connect to, before anything is looked
    at."""
    if not isinstance(job, Mapping):
        return
    target, scenarios = job.get("target"), job.get("scenarios")
    files = {"library": job.get("library"), "storage": job.get("storage")}
    if isinstance(target, Mapping):
        files |= {f"target.{name}": target.get(name) for name in ("config", *ServiceTarget.model_fields)}
        _check_settings(target.get("settings"))
    for at, each in enumerate(scenarios if isinstance(scenarios, list) else ()):
        if isinstance(each, Mapping):
            files |= {f"scenarios.{at}.{name}": value for name, value in _named_by(each)}
        elif isinstance(each, str) and each not in builtin_names():
            files[f"scenarios.{at}"] = each
    for name, value in files.items():
        if value is not None:
            why = f"{name}: a job sent over HTTP cannot name files or commands of the server, or addresses"
            raise JobQueueError("invalid_job", why, name)


def _named_by(scenario: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the files that a scenario names, and its address: the load goes to the clone that is tuned."""
    yield from ((key, holder[key]) for holder, key in path_settings(scenario))
    target = scenario.get("target")
    if isinstance(target, Mapping):
        yield "target.url", target.get("url")


def _check_settings(settings: Any) -> None:
    for path, value in settings.items() if isinstance(settings, Mapping) else ():
        is_harmless = _HARMLESS.fullmatch(str(path)) is not None and not _names_folder(value)
        if not is_harmless and (path, value) not in _LEFT_OUT:
            why = f"target.settings: a job sent over HTTP sets knobs, replicas, cores, defaults, not {str(path)[:100]}"
            raise JobQueueError("invalid_job", why, "target.settings")


def _names_folder(value: Any) -> bool:
    return isinstance(value, Mapping) and ("folder" in value or any(map(_names_folder, value.values())))
