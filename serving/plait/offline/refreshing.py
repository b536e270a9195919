"""Updates of recommendation models: created from a retrained module, published to a running server, folded in."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import nn

from plait.errors import PlaitError, told
from plait_disagg.graph.errors import GraphError
from plait_disagg.package.manifest import Manifest, PackageError
from plait_disagg.refresh.errors import RefreshError
from plait_disagg.refresh.fold import fold_updates
from plait_disagg.refresh.make import make_update
from plait_disagg.refresh.update import UpdateManifest, write_update

_TIMEOUT_S = 900.0
"""Longer than the server's own max wait for its workers."""


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
    try:
        answer = httpx2.post(at, json=body, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise PlaitError(f"{url!r} is not http://HOST:PORT: {error}") from error
    except httpx2.HTTPError as error:
        raise PlaitError(f"{url}: {error}") from error
    data: Any = None
    with suppress(ValueError):  # what stands before the server may answer with a page
        data = answer.json()
    said = data if isinstance(data, dict) else {}
    if answer.status_code == 200 and "version" in said:
        return str(said["version"])
    why = said.get("error")
    raise PlaitError(why if isinstance(why, str) else f"{url} answered {answer.status_code}")
