"""Checks on what a job submitted over HTTP may contain, run before anything else reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from plait.tuning.service.errors import InvalidJob
from plait_loadtest.load import builtin_names

__all__ = ["check_untrusted"]

_OPENING = (
    yaml.BlockMappingStartToken, yaml.BlockSequenceStartToken, yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken
)  # fmt: skip
_CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
_DEEPEST = 30


def check_untrusted(text: str) -> None:
    """Check an untrusted job. Raises `InvalidJob`, or `yaml.YAMLError` for what is not YAML."""
    _check_tokens(text)
    _check_paths(yaml.safe_load(text))


def _check_tokens(text: str) -> None:
    """Raise `InvalidJob` for YAML that could take forever to parse: an alias repeats what it names, so that a few lines
    stand for gigabytes, and nesting costs the square of its depth."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken | yaml.AnchorToken):
            raise InvalidJob("a job sent over HTTP cannot have YAML anchors and aliases")
        if isinstance(token, _OPENING):
            depth += 1
        elif isinstance(token, _CLOSING):
            depth -= 1
        if depth > _DEEPEST:
            raise InvalidJob(f"the job is nested more than {_DEEPEST} levels deep")


def _check_paths(job: Any) -> None:
    """Raise `InvalidJob` if the job names a file of this machine, before any such file is looked at."""
    if not isinstance(job, Mapping):
        return
    target, scenarios = job.get("target"), job.get("scenarios")
    files = {"library": job.get("library"), "storage": job.get("storage")}
    files["target.config"] = target.get("config") if isinstance(target, Mapping) else None
    for at, each in enumerate(scenarios if isinstance(scenarios, list) else ()):
        files[f"scenarios.{at}"] = each if isinstance(each, str) and each not in builtin_names() else None
    for name, value in files.items():
        if value is not None:
            raise InvalidJob(f"{name}: a job sent over HTTP cannot name files of the server", name)
