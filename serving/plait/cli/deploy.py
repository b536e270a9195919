"""``plait deploy render``: the manifest of a plait.yaml for another way to run it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


class Target(StrEnum):
    """What can be rendered."""

    SERVE = "serve"


@app.callback()
def deploy() -> None:
    """Manifests. `render` prints one."""


@app.command()
def render(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml; without one the defaults")] = None,
    target: Annotated[Target, typer.Option(help="serve: a Ray Serve config file")] = Target.SERVE,  # noqa: ARG001
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value")] = None,
) -> None:
    """Prints the Serve YAML; `serve deploy FILE` runs it on the Ray that it is sent to."""
    from plait.config import load_config
    from plait_deploy.serve import ServeApplication, render_serve

    loaded = load_config(config, overrides=settings or [])
    images = loaded.images.model_dump(mode="json", exclude_defaults=True, exclude={"knobs"})
    server = loaded.server.model_dump(mode="json", exclude_defaults=True)
    application = ServeApplication(
        name="plait",
        import_path="plait.app:build",
        args={"server": server, "images": images},
        knobs={"engine": loaded.images.knobs.model_dump(mode="json")},
    )
    print(render_serve(application, host=loaded.server.host, port=loaded.server.port), end="")
