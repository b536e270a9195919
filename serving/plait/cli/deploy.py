"""`plait deploy render`: print a plait.yaml as a manifest for another runtime."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.config import PlaitConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


class RenderTarget(StrEnum):
    """The manifest formats that can be rendered."""

    SERVE = "serve"


@app.callback()
def deploy() -> None:
    """Render deployment manifests."""


@app.command()
def render(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml; without one the defaults")] = None,
    target: Annotated[RenderTarget, typer.Option(help="serve: a Ray Serve config file")] = RenderTarget.SERVE,  # noqa: ARG001
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value")] = None,
) -> None:
    """Print the Serve YAML; run it on a Ray cluster with `serve deploy FILE`."""
    from plait.config import load_config
    from plait_deploy.serve import ServeApplication, render_serve

    loaded = load_config(config, overrides=settings or [])
    args = {"server": loaded.server.model_dump(mode="json", exclude_defaults=True), **_shapes(loaded)}
    application = ServeApplication(name="plait", import_path="plait.app:build", args=args, knobs=loaded.knobs())
    print(render_serve(application, host=loaded.server.host, port=loaded.server.port), end="")


def _shapes(config: PlaitConfig) -> dict[str, Any]:
    """Return the sections without their knobs, which belong to the deployments, where a change is a reconfigure.

    The knob `controlnet_placement` stays if it is local, since it also decides which deployments exist.
    """
    from plait_serving.diffusion.knobs import Placement

    images, recommend = config.images, config.recommend
    shapes: dict[str, Any] = {"images": None, "recommend": None}
    if images is not None:
        shapes["images"] = images.model_dump(mode="json", exclude_defaults=True, exclude={"knobs"})
        if images.knobs.controlnet_placement is Placement.LOCAL:  # this knob also decides which deployments there are
            shapes["images"]["knobs"] = {"controlnet_placement": Placement.LOCAL.value}
    if recommend is not None:
        parts = {part: {"knobs"} for part in ("cn", "hn", "whole")}
        shapes["recommend"] = recommend.model_dump(
            mode="json", exclude_defaults=True, exclude={"models": {"__all__": parts}}
        )
    return shapes
