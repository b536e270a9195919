"""`module:function` or `file.py:function`: a user's function that a command is to call."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from plait.errors import PlaitError
from plait_serving.imports import importing


def load_target(text: str) -> Callable[[], Any]:
    """Import the module and return the function: this runs the user's code. Modules and files are resolved from the
    current folder, as `python -m` does. Raises `PlaitError`."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise PlaitError(f"{text!r} is not module:function or file.py:function")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    found = getattr(module, name, None)
    if not callable(found):
        raise PlaitError(f"{where} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def call(target: str, *arguments: Any, **named: Any) -> Any:
    """Call the `module:function` of ours, which the process that calls it imports."""
    with importing():
        function = resolve_name(target)
    return function(*arguments, **named)


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise PlaitError(f"{path}: there is no such file")
    sys.path.insert(0, str(path.parent))  # what the file imports lies beside it
    # A name of its own: a user's file may be called like a library that we need.
    spec = importlib.util.spec_from_file_location(f"plait_target_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look themselves up here
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise PlaitError(f"{path}: line {error.lineno}: {error.msg}") from error
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name + ".").startswith(error.name + "."):
            raise PlaitError(f"there is no module {name!r} in {Path.cwd()} or on the path") from error
        raise
