"""`plait serve`: run the server on this machine, or on a Ray cluster that is already running."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.config import PlaitConfig

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
) -> None:
    """Start the server, print its address on stdout when it is ready, and run until Ctrl-C or SIGTERM."""
    from plait.config import dump_config, load_config

    if model is not None and model.startswith("."):
        model = str(Path(model).absolute())  # the person at the keyboard means their own folder, not the file's
    options = {"server.host": host, "server.port": port, "images.model": model, "ray.address": address}
    # JSON strings are YAML strings: a host like "::1" must not be read as anything else.
    overrides = [*(settings or []), *(f"{key}={_yaml(value)}" for key, value in options.items() if value is not None)]
    loaded = load_config(config, overrides=overrides)
    if show_config:
        print(dump_config(loaded), end="")
        return
    raise typer.Exit(_serve(loaded))


def _serve(config: PlaitConfig) -> int:
    from plait.offline.manifests import spare_cpus
    from plait.precision import with_dtype
    from plait.server import supervise

    if config.images is not None and config.ray.is_local:
        config = config.model_copy(update={"images": with_dtype(config.images)})
    return supervise.serve(
        config,
        compose=_compose,
        num_cpus=config.logical_cpus + spare_cpus(config),
        drained=config.drained,
        app_name="plait",
        environ=os.environ,
    )


def _compose(config: PlaitConfig) -> Any:
    from plait_serving.imports import importing

    with importing():
        from plait.app import application  # imports Ray, whose environment is set by now

    return application(config)


def _yaml(value: str | int) -> str:
    import json

    return json.dumps(value)
