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
    from plait_serving.diffusion.knobs import Placement

    loaded = load_config(config, overrides=settings or [])
    images = loaded.images
    local = images.knobs.controlnet_placement is Placement.LOCAL
    # Knobs belong to the deployments, where a change is a reconfigure; but this one also decides which there are.
    shape = {"knobs": {"controlnet_placement": Placement.LOCAL.value}} if local else {}
    args = {
        "server": loaded.server.model_dump(mode="json", exclude_defaults=True),
        "images": images.model_dump(mode="json", exclude_defaults=True, exclude={"knobs"}) | shape,
    }
    knobs = {"engine": images.knobs.model_dump(mode="json")}
    if not local:
        controlnets = images.resolved_controlnets()
        knobs |= {f"controlnet-{name}": {"threads": section.threads} for name, section in controlnets.items()}
    application = ServeApplication(name="plait", import_path="plait.app:build", args=args, knobs=knobs)
    print(render_serve(application, host=loaded.server.host, port=loaded.server.port), end="")
