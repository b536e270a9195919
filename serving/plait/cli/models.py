"""`plait models`: list what a configuration offers, verify its quality, make models and updates of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli.packaging import cut_model, explain_model, package_model
from plait.cli.random_models import random_model
from plait.cli.refreshing import fold_model, make_update, refresh_model

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)

# Enough to see that nothing is broken, within a minute on two cores.
QUICK_CONCEPTS = 20

Config = Annotated[Path | None, typer.Option(help="plait.yaml; without one the starter models")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def models() -> None:
    """Base models, ControlNets, LoRAs and recommendation models."""


@app.command("list")
def list_models(config: Config = None, as_json: AsJson = False) -> None:
    """List the names that requests may use, read from the folders without loading any model."""
    from plait.config import load_config
    from plait.offline.inventory import inventory
    from plait_serving.diffusion.sources.names import shown

    loaded = load_config(config)
    entries = [asdict(entry) for entry in inventory(loaded.images, loaded.ranking_models)]
    if as_json:
        print(json.dumps(entries, indent=1))
    else:
        columns = ("name", "kind", "family", "format", "folder")
        rows = [{**entry, "folder": shown(entry["folder"])} for entry in entries]
        print(table([columns, *[[row[column] for column in columns] for row in rows]]))


@app.command("verify")
def verify_models(
    part: Annotated[
        list[str] | None, typer.Option(help="only this: recognition, edges, colors, noto, sketch, pixel; repeatable")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="a folder laid out as the starter's; its own if left out")] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_CONCEPTS} concepts: a look, no verdict")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure the starter models with the server's own engine. Exit with code 99 if a figure misses its threshold."""
    from plait.offline.images import open_local
    from plait.offline.verification import check_files, measure, parse_parts, section_of
    from plait_serving.starter.manifest import WEIGHTS

    folder = folder or WEIGHTS
    try:
        parts = parse_parts(part)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--part") from error
    check_files(folder)
    limit = QUICK_CONCEPTS if quick else None
    print(f"loading {folder} ...", file=sys.stderr, flush=True)
    with open_local(section_of(folder)) as service:
        report = measure(service, folder, parts=parts, limit=limit, say=_say)
    print(json.dumps(report, indent=1) if as_json else figures_table(report["figures"]))
    if not report["passed"]:
        raise typer.Exit(99)


@app.command("merge")
def merge_loras(
    base: Annotated[str, typer.Argument(help="a model of the configuration, a diffusers folder, or owner/name@commit")],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="an empty or new folder")],
    lora: Annotated[
        list[str],
        typer.Option(metavar="NAME[:SCALE]", help="of the configuration, or a .safetensors file; may be repeated"),
    ],
    config: Config = None,
) -> None:
    """Write a base model with LoRAs in its weights: for who always wants them, at no cost in any step.

    The folder has the dtype of the model's files, and everything that the LoRAs leave alone as it is.
    """
    from plait.config import load_config
    from plait.errors import PlaitError
    from plait.offline.images import OrderError, parse_lora
    from plait_serving.diffusion.sources.staging import require_new_folder

    images = load_config(config).images
    if images is None:
        raise PlaitError("the configuration says images: null; there is nothing to merge into")
    require_new_folder(out)
    try:
        wanted = [(name, 1.0 if scale is None else scale) for name, scale in map(parse_lora, lora)]
    except OrderError as error:
        print(f"plait models merge: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    scales = dict(wanted)
    if len(scales) < len(wanted):
        raise typer.BadParameter("names a LoRA twice", param_hint="--lora")
    print("loading the model classes ...", file=sys.stderr, flush=True)
    from plait.offline.merging import merge

    for part in merge(images, base, scales, out):
        print(
            f"{part.component}: {part.changed} of {part.weights} weights changed, rounded to {part.dtype} "
            f"(at most {part.tolerance:.1e} of each)",
            file=sys.stderr,
        )
    print(f"serve it: images: {{model: {out.absolute()}}} in plait.yaml", file=sys.stderr)
    print(out)


app.command("random")(random_model)
app.command("package")(package_model)
app.command("explain")(explain_model)
app.command("cut")(cut_model)
app.command("update")(make_update)
app.command("refresh")(refresh_model)
app.command("fold")(fold_model)


def _say(made: int, asked: int) -> None:
    """Print a progress line that overwrites itself; if stderr is not a terminal, print one for every 50th image."""
    if sys.stderr.isatty():
        print(f"\r{made}/{asked} images", end="", file=sys.stderr, flush=True)
    elif made % 50 == 0:
        print(f"{made}/{asked} images", file=sys.stderr, flush=True)


def figures_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per figure: its value, its threshold, and whether it passes."""
    rows = [
        (
            figure["name"],
            f"{figure['value']:.3f}",
            f"{figure['bound']} {figure['threshold']:g}",
            str(figure["count"]),
            "ok" if figure["passed"] else "MISSED",
        )
        for figure in figures
    ]
    return table([("figure", "value", "wanted", "images", ""), *rows])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
