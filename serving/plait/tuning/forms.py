"""The forms of a configuration outside of plait: arguments, environment, a YAML or JSON file. Settings are by the names
that knobs set."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yaml import YAMLError

from plait.errors import PlaitError
from plait.tuning.yaml_edit import set_at, with_settings
from plait_autoconfig.values import Value

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def as_argv(settings: Mapping[str, Value]) -> tuple[str, ...]:
    """Return `--NAME=VALUE` for each; `--NAME` for true, `--no-NAME` for false."""
    return tuple(
        f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name}={value}"
        for name, value in settings.items()
    )


def as_environment(settings: Mapping[str, Value]) -> dict[str, str]:
    """Return the variables. Raises `PlaitError` for a name that no variable can have."""
    for name in settings:
        if not _VARIABLE.fullmatch(name):
            raise PlaitError(f"{name}: no variable of an environment can be called so; let the knob set another name")
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}


def as_file(path: Path, settings: Mapping[str, Value]) -> str:
    """Return the text of a YAML or JSON file with the values at the paths that the names are, `server.threads`; an
    entry of a list goes by its position or its `name`. Comments of YAML stay. Raises `PlaitError`, also for a section
    that the file does not have: a misspelt one would be added, and nothing would be tuned."""
    paths: dict[tuple[str, ...], Any] = {tuple(name.split(".")): value for name, value in settings.items()}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return with_settings(text, paths, makes_sections=False)
        data = json.loads(text)
        for place, value in paths.items():
            set_at(data, place, value, makes_sections=False)
    except (OSError, ValueError, YAMLError, PlaitError) as error:
        raise PlaitError(f"{path}: {' '.join(str(error).split())}") from error
    return json.dumps(data, indent=2) + "\n"
