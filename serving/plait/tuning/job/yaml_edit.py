"""Writes settings into the text of a plait.yaml and leaves everything else unchanged, including comments.

An existing value is replaced in place; a missing key is added at the top of its section. The result is parsed again
and compared with the intended settings, so a file that is too unusual for this is refused, never mangled.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import yaml

from plait.errors import PlaitError

KeyPath = tuple[str, ...]


def with_settings(text: str, settings: Mapping[KeyPath, Any]) -> str:
    """Return the text with these settings, by path. Raises `PlaitError` if the text cannot be edited."""
    wanted = _unshared(yaml.safe_load(text) or {})
    try:
        for path, value in settings.items():
            text = _with_one(text, path, value)
            _set(wanted, path, value)
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
    if not isinstance(node, yaml.MappingNode):  # nothing but comments
        return _end_of(text) + _block(path, value, indent=0)
    while True:
        found = _child(node, path[depth])
        if found is None:
            return _inserted(text, node, path[depth:], value)
        depth += 1
        if depth == len(path):
            return _replaced(text, found, _inline(value))
        if not isinstance(found, yaml.MappingNode):  # `section:` without anything, or null
            return _replaced(text, found, _inline(_nested(path[depth:], value)))
        node = found


def _child(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for name, value in node.value if name.value == key), None)


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
    return {key: _unshared(each) for key, each in value.items()} if isinstance(value, dict) else value


def _end_of(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _set(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[path[-1]] = value
