"""`plait models update`, `refresh` and `fold`: new weights for a recommendation model while it serves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

Package = Annotated[Path, typer.Argument(help="the packaged model's folder")]
Out = Annotated[Path, typer.Option("-o", "--out", help="the folder to make; it must not exist yet")]


def make_update(
    package: Package,
    target: Annotated[
        str, typer.Argument(help="module:function or file.py:function; as for `package`, with the new weights")
    ],
    *,
    out: Out,
    version: Annotated[str, typer.Option(help="the new version")],
) -> None:
    """Write an update: the rows and weights in which a retrained model differs from the newest version."""
    from plait.offline.packaging import make
    from plait.offline.refreshing import update

    print(f"making {target} ...", file=sys.stderr, flush=True)
    manifest = update(make(target).module, package, out, version=version)
    print(f"from version {manifest.base}: rows of {len(manifest.rows)} tables, {len(manifest.constants)} weights",
          file=sys.stderr)  # fmt: skip
    print(out)


def refresh_model(
    model: Annotated[str, typer.Argument(help="what requests call the model")],
    update: Annotated[Path, typer.Argument(help="the update's folder, where the server's machine sees it too")],
    *,
    url: Annotated[str, typer.Option(help="the running server")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="PLAIT_API_KEY", help="a key with the role admin")] = None,
) -> None:
    """Publish an update to a running server. No request is lost, and none sees a mix of two versions.

    A bad update is refused, and the old version stays. Publishing the same update again is not an error.
    """
    from plait.offline.refreshing import publish_over_http

    version = publish_over_http(url, model, update, api_key=api_key)
    print(f"{model} is at version {version}")


def fold_model(package: Package, *, out: Out) -> None:
    """Write a package with its updates folded in; many small updates make every worker start slower."""
    from plait.offline.refreshing import fold

    manifest = fold(package, out)
    print(f"version {manifest.version}", file=sys.stderr)
    print(out)
