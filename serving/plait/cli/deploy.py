"""`plait deploy`: a plait.yaml as a manifest for another runtime (`render`); its replicas on a cluster (`place`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def deploy() -> None:
    """Render deployment manifests; plan where replicas go."""


@app.command()
def render(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml; without one the defaults")] = None,
    target: Annotated[
        Literal["serve", "kuberay"],
        typer.Option(help="serve: a Ray Serve config file; kuberay: all manifests for KubeRay 1.7"),
    ] = "serve",
    *,
    image: Annotated[str | None, typer.Option(help="kuberay: the image with plait, as name@sha256:...")] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="serve: place replicas on the nodes that this file describes (plait help deploy place)"),
    ] = None,
    allow_tag: Annotated[bool, typer.Option("--allow-tag", help="kuberay: take an image without a digest")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value")] = None,
) -> None:
    """Print YAML: for `serve deploy FILE` on a Ray cluster, or for `kubectl apply -f FILE`."""
    from plait.config import load_config
    from plait.errors import PlaitError
    from plait.offline.deploying import kuberay_manifests, placed_application, serve_application
    from plait_deploy.serve import render_serve

    given = {"deploy.image": image, "deploy.allow_tag": allow_tag or None}
    options = {key: value for key, value in given.items() if value is not None}
    if target == "serve" and options:
        raise PlaitError("--image and --allow-tag go with --target kuberay: Ray's nodes have plait already")
    loaded = load_config(config, overrides=settings or [], settings=options)
    if not loaded.server.port:
        raise PlaitError("server.port: 0 is any free port, and whoever sends requests has to know which; name one")
    if target == "kuberay":
        if cluster is not None:
            raise PlaitError("--cluster goes with --target serve: pods of one group cannot be told apart by labels")
        print(kuberay_manifests(loaded), end="")
        return
    application = serve_application(loaded) if cluster is None else placed_application(loaded, cluster)
    print(render_serve(application, host=loaded.server.host, port=loaded.server.port), end="")


@app.command()
def place(
    config: Annotated[Path | None, typer.Argument(help="plait.yaml; without one the defaults")] = None,
    *,
    cluster: Annotated[Path | None, typer.Option(help="a file that describes the nodes, as above")] = None,
    live: Annotated[
        str | None,
        typer.Option(help="instead: the nodes of the Ray at this address (auto: this machine's), as if empty"),
    ] = None,
    policy: Annotated[str, typer.Option(help="plait, fgd, first-fit, best-fit, ray-pack, ray-spread, ...")] = "plait",
    per_node: Annotated[
        int, typer.Option(min=0, help="at most so many replicas of a deployment on a node; 0: any")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
    svg: Annotated[Path | None, typer.Option(help="draw the plan into this file")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="path=value")] = None,
) -> None:
    """Plan which node and GPU each replica goes to, and what is stranded before and after; 1 if one has no place.

    A file of nodes: `nodes: [{name: a, count: 2, cpus: 64, memory_gib: 512, gpus: 8, gpu_model: L40S}]`.
    """
    from plait.cli.models import table
    from plait.config import load_config
    from plait.errors import PlaitError, write
    from plait.offline import deploying
    from plait_deploy.placement.drawing import draw

    if (cluster is None) == (live is None):
        raise PlaitError("name the cluster: either --cluster FILE or --live ADDRESS")
    loaded = load_config(config, overrides=settings or [])
    nodes = deploying.running(live or "auto") if cluster is None else deploying.described(cluster)
    placed = deploying.place(loaded, nodes, policy=policy, per_node=per_node)
    if svg is not None:
        what = "The starter" if config is None else config.name
        title = f"{what} on {live if cluster is None else cluster.name}"
        write(svg, draw(placed.state, placed.plan, title=title))
    if as_json:
        print(json.dumps(deploying.document_of(placed), indent=1))
    else:
        print(table(deploying.rows_of(placed)), table(deploying.uses_of(placed)), sep="\n\n")
    if missing := len(placed.plan.unplaced):
        print(f"plait deploy: the cluster is too full for {missing} of the replicas", file=sys.stderr)
        raise typer.Exit(1)
