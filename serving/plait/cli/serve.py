"""`plait serve`: run the server on this machine, or on a Ray cluster that is already running."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.config import PlaitConfig, ServedConfig

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def serve(  # noqa: PLR0917  # typer declares options as parameters
    config: Annotated[
        Path | None, typer.Argument(help="plait.yaml; without one the defaults serve the starter model")
    ] = None,
    host: Annotated[str | None, typer.Option(help="interface to listen on (default 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="port (default 8000); 0 takes a free one", min=0, max=65535)] = None,
    model: Annotated[str | None, typer.Option(help="emoji, a diffusers folder, or a hub id")] = None,
    address: Annotated[str | None, typer.Option(help="attach to this Ray instead of starting one")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="path=value, for example images.knobs.largest_batch=8")
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="print the configuration in force and stop")
    ] = False,
    show_deployments: Annotated[
        bool,
        typer.Option("--show-deployments", help="print what would be deployed, and what a change of each key does"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --show-deployments: one JSON list")] = False,
) -> None:
    """Start the server, print its address on stdout when it is ready, and run until Ctrl-C or SIGTERM."""
    if as_json and not show_deployments:
        raise typer.BadParameter("goes with --show-deployments", param_hint="--json")
    from plait.config import dump_config, load_config

    if model is not None and (model.startswith(".") or ("/" in model and Path(model).exists())):
        model = str(Path(model).absolute())  # the person at the keyboard means their own folder, not the file's
    options = {"server.host": host, "server.port": port, "images.model": model, "ray.address": address}
    own = {key: value for key, value in options.items() if value is not None}
    loaded = load_config(config, overrides=settings or [], settings=own)
    if show_config:
        print(dump_config(loaded), end="")
        return
    if show_deployments:
        print(_deployments(loaded, as_json=as_json))
        return
    if loaded.ray.is_local:  # else folders are those of other machines
        check_folders(loaded, source=str(config or "the configuration"))
    raise typer.Exit(_serve(loaded))


def check_folders(config: ServedConfig, *, source: str) -> None:
    """Look into the folders that a configuration names, before anything is loaded, and print what will be left out.
    Raises `ConfigError` for what nothing could be served with."""
    from plait.doctor import models
    from plait.doctor.findings import CheckStatus
    from plait.errors import ConfigError

    found = list(models.check_folders(config))
    if problems := [f"{it.detail}; {it.advice}" for it in found if it.verdict is CheckStatus.FAIL]:
        raise ConfigError(source, problems)
    for it in found:
        if it.verdict is CheckStatus.WARN:
            print(f"plait: WARNING: {it.detail}; {it.advice}", file=sys.stderr)


def _serve(config: PlaitConfig) -> int:
    from plait.deployments import check_cpus, deployments, logical_cpus, spare_cpus
    from plait.precision import with_dtype
    from plait.server import supervise

    check_cpus(config)
    if config.images is not None and config.ray.is_local:
        config = config.model_copy(update={"images": with_dtype(config.images)})
    return supervise.serve(
        config,
        compose=deployments,
        num_cpus=logical_cpus(config) + spare_cpus(deployments(config)),
    )


def _deployments(config: PlaitConfig, *, as_json: bool) -> str:
    from plait.cli.models import table
    from plait.deployments import deployments, document_of
    from plait.errors import PlaitError
    from plait.gpu_shares import placement_line, this_machine, with_gpus
    from plait.offline.deploying import running
    from plait.precision import has_gpu

    if config.ray.is_local:
        cluster = this_machine(config.ray.num_gpus if has_gpu() or config.ray.num_gpus else 0)
    else:
        cluster = running(config.ray.address)
    try:
        config, refusal = with_gpus(config, cluster), None
    except PlaitError as error:  # on this machine; a file may be for another
        refusal = f"it would not start: {error}"
    deployed = deployments(config)
    rows = document_of(deployed)
    if as_json:
        return json.dumps(rows, indent=1)
    lines = [("name", "class", "replicas", "CPUs each", "GPUs each")]
    blocks = []
    for row in rows:
        least, most = row["replicas"].values()
        count = str(most) if least == most else f"{least} to {most}"
        lines.append((row["name"], row["class"], count, f"{row['num_cpus']:g}", f"{row['num_gpus']:g}"))
        blocks.append(f"\n{row['name']}: what a change of each key does")
        for does in ("restart", "scale", "reconfigure"):
            keys = [_key(key, row["knobs"]) for key, it in row["changes"].items() if it == does]
            blocks.append(fill(f"  {does:<11}  {', '.join(keys)}", 100, subsequent_indent=" " * 15))
    return "\n".join((table(lines), refusal or placement_line(deployed, cluster), *blocks))


def _key(key: str, knobs: Mapping[str, Any]) -> str:
    value = knobs.get(key)
    return key if key not in knobs or isinstance(value, dict) else f"{key}={value}"
