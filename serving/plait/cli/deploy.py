"""`plait deploy`: a plait.yaml as a manifest for another runtime (`render`); its replicas on a cluster (`place`)."""

from __future__ import annotations

import json
import sys
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
    """Render deployment manifests; plan where replicas go."""


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


@app.command()
def place(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml; without one the defaults")] = None,
    *,
    cluster: Annotated[Path, typer.Option(help="a file that describes the nodes (deploy/README.md)")],
    policy: Annotated[str, typer.Option(help="plait, fgd, first-fit, best-fit, ray-pack, ray-spread, ...")] = "plait",
    per_node: Annotated[
        int, typer.Option(min=0, help="at most so many replicas of a deployment on a node; 0: any")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
    svg: Annotated[Path | None, typer.Option(help="draw the plan into this file")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value")] = None,
) -> None:
    """Plan which node and GPU each replica goes to, and what is stranded before and after; 1 if one has no place."""
    from plait.cli.models import table
    from plait.config import load_config
    from plait.errors import PlaitError
    from plait.offline import placing
    from plait_deploy.placement.drawing import draw

    placed = placing.place(load_config(config, overrides=settings or []), cluster, policy=policy, per_node=per_node)
    if svg is not None:
        try:
            svg.write_text(draw(placed.state, placed.plan, title=_title(config, cluster)), encoding="utf-8")
        except OSError as error:
            raise PlaitError(f"{svg} cannot be written: {error.strerror or error}") from error
    if as_json:
        print(json.dumps(placing.document_of(placed), indent=1))
    else:
        print(table(placing.rows_of(placed)), table(placing.uses_of(placed)), sep="\n\n")
    if missing := len(placed.plan.unplaced):
        print(f"plait deploy: the cluster is too full for {missing} of the replicas", file=sys.stderr)
        raise typer.Exit(1)


def _title(config: Path | None, cluster: Path) -> str:
    return f"{'The starter' if config is None else config.name} on {cluster.name}"


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
