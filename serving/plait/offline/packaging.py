"""Recommendation models: packaged from a user's function that builds one, and updated: with what differs in a retrained
module, published to a running server, folded in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
from plait_disagg.refresh.errors import RefreshError
from plait_disagg.refresh.fold import fold_updates
from plait_disagg.refresh.make import make_update
from plait_disagg.refresh.update import UpdateManifest, write_update

_RETURNS = "must return (module, inputs) or (module, inputs, items)"
_TIMEOUT_S = 900.0
"""Longer than the server's own max wait for its workers."""


@dataclass(frozen=True, kw_only=True)
class UserModel:
    """The result of a user's function."""

    module: nn.Module
    inputs: tuple[Input, ...]
    items: Items | None = None


def make(target: str, *, out: Path | None = None) -> UserModel:
    """Call the function behind `module:function` or `file.py:function`, which may take minutes. Raises `PlaitError` if
    it does not exist or returns something else, or `out`, where its model is to go, is taken; exceptions of the
    function itself pass through to the user."""
    if out is not None and out.exists():
        raise PlaitError(f"{out} exists already")
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


def update(module: nn.Module, package: Path, out: Path, *, version: str) -> UpdateManifest:
    """Write the update from the newest version of a package to a retrained module. Raises `PlaitError`."""
    with told(RefreshError, GraphError, PackageError, ValueError, file=out):
        return write_update(out, make_update(package, module, version=version))


def fold(package: Path, out: Path) -> Manifest:
    """Write a package with its updates folded in. Raises `PlaitError`."""
    with told(PackageError, file=out):
        return fold_updates(package, out)


def publish_over_http(url: str, model: str, folder: Path, *, api_key: str | None) -> str:
    """Publish an update on a running server, whose machine must see the folder under the same path; return the version
    that is then served. Raises `PlaitError` with the server's own message."""
    import httpx2

    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise PlaitError("--api-key (PLAIT_API_KEY) has a character that no header may have, as the end of a line")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    body = {"parameters": {"update": str(folder.absolute())}}
    at = f"{url.rstrip('/')}/v2/repository/models/{quote(model, safe='')}/load"
    wrong = (httpx2.InvalidURL, httpx2.UnsupportedProtocol)
    with told(httpx2.HTTPError, about=url), told(*wrong, about=f"{url!r} is not http://HOST:PORT"):
        answer = httpx2.post(at, json=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    data: Any = None
    with suppress(ValueError):  # what stands before the server may answer with a page
        data = answer.json()
    said = data if isinstance(data, dict) else {}
    if answer.status_code == 200 and "version" in said:
        return str(said["version"])
    why = said.get("error")
    why = why if isinstance(why, str) else f"{url} answered {answer.status_code}"
    raise PlaitError(f"{why} (--api-key, or PLAIT_API_KEY)" if answer.status_code in (401, 403) else why)
