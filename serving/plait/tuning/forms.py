"""The forms of a configuration outside of plait: arguments, environment, the text of a YAML or JSON file. Settings are
by the names that knobs set, or by their paths in the file.

In YAML an existing value is replaced in place, a missing key is added at the top of its section, and everything else
stays unchanged, including comments. An entry of a list goes by its position, from 0, or its `name`. The result is
parsed again and compared with the intended settings, so a file that is too unusual for this is refused, never mangled.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from plait.errors import PlaitError
from plait_autoconfig.values import Value
from plait_serving.spelling import hint

KeyPath = tuple[str, ...]

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
    paths: dict[KeyPath, Any] = {tuple(name.split(".")): value for name, value in settings.items()}
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return with_settings(text, paths, makes_sections=False)
        data = json.loads(text)
        for place, value in paths.items():
            set_at(data, place, value, makes_sections=False)
    except (OSError, ValueError, yaml.YAMLError, PlaitError) as error:
        raise PlaitError(f"{path}: {' '.join(str(error).split())}") from error
    return json.dumps(data, indent=2) + "\n"


def with_settings(text: str, settings: Mapping[KeyPath, Any], *, makes_sections: bool = True) -> str:
    """Return the text with these settings, by path. Raises `PlaitError` if it cannot be edited, and as `set_at`."""
    wanted = _unshared(yaml.safe_load(text) or {})
    try:
        for path, value in settings.items():
            text = _with_one(text, path, value)
            set_at(wanted, path, value, makes_sections=makes_sections)
        same = yaml.safe_load(text) == wanted
    except yaml.YAMLError:
        same = False
    if not same:
        listed = ", ".join(f"{'.'.join(path)}={_inline(value)}" for path, value in settings.items())
        raise PlaitError(f"the file is written in a way that cannot be edited safely; please set by hand: {listed}")
    return text


def diff(before: str, after: str, *, name: str) -> str:
    """Return the changes as a unified diff; empty if there are none."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), fromfile=name, tofile=f"{name} (tuned)"
    )
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def _with_one(text: str, path: KeyPath, value: Any) -> str:
    node, depth = yaml.compose(text, yaml.SafeLoader), 0
    if not isinstance(node, yaml.CollectionNode):  # nothing but comments
        return _end_of(text) + _block(path, value, indent=0)
    while True:
        found = _child(node, path[depth])
        if found is None:
            if not isinstance(node, yaml.MappingNode):
                raise _no_entry(path)
            return _inserted(text, node, path[depth:], value)
        depth += 1
        if depth == len(path):
            return _replaced(text, found, _inline(value))
        if not isinstance(found, yaml.CollectionNode):  # `section:` without anything, or null
            return _replaced(text, found, _inline(_nested(path[depth:], value)))
        node = found


def _child(node: yaml.CollectionNode, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == key), None)
    entries = (_child(each, "name") if isinstance(each, yaml.MappingNode) else None for each in node.value)
    at = _position([getattr(each, "value", None) for each in entries], key)
    return None if at is None else node.value[at]


def _position(names: Sequence[object], key: str) -> int | None:
    """Return which entry of a list is meant, by their names; None if there is none."""
    if key in names:
        return names.index(key)
    return int(key) if key.isdecimal() and int(key) < len(names) else None


def _replaced(text: str, node: yaml.Node, by: str) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    old = text[start:end]
    gap = " " if start and text[start - 1] == ":" else ""
    return text[:start] + gap + by + old[len(old.rstrip()) :] + text[end:]


def _inserted(text: str, node: yaml.MappingNode, path: KeyPath, value: Any) -> str:
    start = node.start_mark.index
    if node.flow_style:
        more = ", " if node.value else ""
        return text[: start + 1] + f"{path[0]}: {_inline(_nested(path[1:], value))}{more}" + text[start + 1 :]
    indent = node.start_mark.column
    if not indent:
        return _end_of(text) + _block(path, value, indent=0)
    line = text.rfind("\n", 0, start) + 1
    if text[line:start].strip():  # the entry of a list, after its hyphen
        return text[:start] + _block(path, value, indent=indent).lstrip() + " " * indent + text[start:]
    while text[:line].rstrip("\n").rpartition("\n")[2].lstrip().startswith("#"):  # a comment stays with its key
        line = text.rfind("\n", 0, line - 1) + 1
    return text[:line] + _block(path, value, indent=indent) + text[line:]


def _block(path: KeyPath, value: Any, *, indent: int) -> str:
    lines = [" " * (indent + 2 * depth) + f"{key}:" for depth, key in enumerate(path)]
    return "\n".join(lines) + f" {_inline(value)}\n"


def _nested(path: KeyPath, value: Any) -> Any:
    for key in reversed(path):
        value = {key: value}
    return value


def _inline(value: Any) -> str:
    """Return the value as one line of YAML that is valid anywhere, including between braces."""
    text = yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
    return text.strip()[1:-1]


def _unshared(value: Any) -> Any:
    """Return a copy in which no object appears in two places, as an alias (`*it`) makes it."""
    if isinstance(value, list):
        return [_unshared(each) for each in value]
    return {key: _unshared(each) for key, each in value.items()} if isinstance(value, dict) else value


def _end_of(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def set_at(data: Any, path: KeyPath, value: Any, *, makes_sections: bool = True) -> None:
    """Set a value of nested mappings and lists; mappings are made on the way, or only where there is nothing below a
    key (`makes_sections` false). Raises `PlaitError` for an entry of a list, or a section, that is not there."""
    *way, last = path
    for depth, key in enumerate(way, 1):
        where = _place(data, key, path)
        there = data[where] if isinstance(data, list) else data.get(where)
        if not isinstance(there, dict | list):
            is_empty = there is None and (isinstance(data, list) or where in data)
            if not (makes_sections or is_empty):
                names = [] if isinstance(data, list) else [name for name in data if isinstance(name, str)]
                raise PlaitError(f"{'.'.join(path)}: there is no section {'.'.join(path[:depth])}{hint(key, names)}")
            there = data[where] = {}
        data = there
    data[_place(data, last, path)] = value


def _place(data: dict[str, Any] | list[Any], key: str, path: KeyPath) -> Any:
    if isinstance(data, dict):
        return key
    if not isinstance(data, list):
        raise PlaitError(f"{'.'.join(path)}: the file holds neither a mapping nor a list")
    at = _position([each.get("name") if isinstance(each, dict) else None for each in data], key)
    if at is None:
        raise _no_entry(path)
    return at


def _no_entry(path: KeyPath) -> PlaitError:
    return PlaitError(f"{'.'.join(path)}: the list has no such entry, by position or by name")
