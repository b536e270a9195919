"""`plait deploy render`: print a plait.yaml as a manifest for another runtime."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


class RenderTarget(StrEnum):
    """The manifest formats that can be rendered."""

    SERVE = "serve"
    KUBERAY = "kuberay"


@app.callback()
def deploy() -> None:
    """Render deployment manifests."""


@app.command()
def render(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml; without one the defaults")] = None,
    target: Annotated[
        RenderTarget, typer.Option(help="serve: a Ray Serve config file; kuberay: all manifests for KubeRay 1.7")
    ] = RenderTarget.SERVE,
    image: Annotated[str | None, typer.Option(help="kuberay: the image with plait, as name@sha256:...")] = None,
    allow_tag: Annotated[bool, typer.Option("--allow-tag", help="kuberay: take an image without a digest")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value")] = None,
) -> None:
    """Print YAML: for `serve deploy FILE` on a Ray cluster, or for `kubectl apply -f FILE`."""
    import json

    from plait.config import load_config
    from plait.offline.manifests import kuberay_manifests, serve_application
    from plait_deploy.serve import render_serve

    options = [f"deploy.image={json.dumps(image)}"] if image is not None else []
    options += ["deploy.allow_tag=true"] if allow_tag else []
    loaded = load_config(config, overrides=[*(settings or []), *options])
    if target is RenderTarget.KUBERAY:
        print(kuberay_manifests(loaded), end="")
        return
    print(render_serve(serve_application(loaded), host=loaded.server.host, port=loaded.server.port), end="")
