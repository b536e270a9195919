"""`plait models package`: from a user's function that builds a model to a folder that plait serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from plait.errors import PlaitError, told
from plait.targets import load_target
from plait_disagg.graph.capture import obstacles
from plait_disagg.graph.errors import GraphError, UnsupportedOperator
from plait_disagg.graph.inputs import Bag, Dense, Ids, Input
from plait_disagg.graph.report import advice
from plait_disagg.graph.store import load_program
from plait_disagg.package.items import Items
from plait_disagg.package.manifest import CN, Manifest, PackageError
from plait_disagg.package.write import PackageOptions, write_package

_RETURNS = "must return (module, inputs) or (module, inputs, items)"


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """The result of a user's function."""

    module: nn.Module
    inputs: tuple[Input, ...]
    items: Items | None = None


def make(target: str) -> UserModel:
    """Call the function behind `module:function` or `file.py:function`. Raises `PlaitError` if it does not exist or
    returns something else; exceptions of the function itself pass through to the user."""
    returned = load_target(target)()
    if not isinstance(returned, tuple) or len(returned) not in (2, 3):
        raise PlaitError(f"{target}: {_RETURNS}, not {type(returned).__name__}")
    module, inputs, *rest = returned
    items = rest[0] if rest else None
    if not isinstance(module, nn.Module):
        raise PlaitError(f"{target}: {_RETURNS}; the module is no torch.nn.Module but {type(module).__name__}")
    if not isinstance(inputs, Sequence) or not all(isinstance(item, Dense | Ids | Bag) for item in inputs):
        raise PlaitError(f"{target}: {_RETURNS}; inputs must be a list of Dense, Ids and Bag")
    if items is not None and not isinstance(items, Items):
        raise PlaitError(f"{target}: {_RETURNS}; items must be plait_disagg.package.items.Items")
    return UserModel(module=module.eval(), inputs=tuple(inputs), items=items)


@told(ValueError)
def explain(made: UserModel) -> tuple[UnsupportedOperator, ...]:
    """Return all obstacles of a model, in one pass. Raises `PlaitError` for an invalid declaration."""
    return obstacles(made.module, made.inputs)


def package(made: UserModel, folder: Path, *, name: str, options: PackageOptions) -> Manifest:
    """Write the folder. Raises `PlaitError`, naming the operator or the input, if the model cannot be packaged."""
    with told(GraphError, PackageError, ValueError, file=folder):
        return write_package(folder, made.module, made.inputs, name=name, items=made.items, options=options)


def advised(folder: Path, options: PackageOptions) -> tuple[str, ...]:
    """Return what the author of a model that was just packaged should know about its cut."""
    cn = load_program((folder / CN).read_text(encoding="utf-8"))
    return advice(cn, candidates=options.candidates, ids_per_bag=options.ids_per_bag)
