"""`plait bench`: side-by-side benchmarks against peers on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from plait.errors import PlaitError, told, write

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)

_NAMES = "images, loadtest, disagg, fabric, kernels, autoconfig, tuning, placement, zoo, models, faults"

_MISSED = 99
"""The exit code of a run that missed what is promised."""


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"which benchmark: {_NAMES}")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON document")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds, or seeds, and trials")] = False,
    out: Annotated[Path | None, typer.Option(help="write the document to this file too")] = None,
    record: Annotated[bool, typer.Option("--record", help="put the rows into the results file")] = False,
    results: Annotated[Path | None, typer.Option(help="the results file; the checkout's own if left out")] = None,
    models: Annotated[Path | None, typer.Option(help="images, models: the folder of the models")] = None,
    size: Annotated[
        str | None, typer.Option(help="images: the models, starter (if left out), sd15, sdxl or sd35m")
    ] = None,
    edge: Annotated[
        int | None,
        typer.Option(help="images: pixels of an image of real size, 256, 512 or 1024; the size's own if left out"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="images: float32, bfloat16, float16, or auto (if left out): each that the CPU has"),
    ] = None,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="images: where the systems run; cpu if left out")
    ] = None,
    at: Annotated[str, typer.Option(help="the commit that this tree is a copy of, where there is no git")] = "",
    workload: Annotated[list[str] | None, typer.Option(help="only this workload; may be repeated")] = None,
    system: Annotated[list[str] | None, typer.Option(help="only this system; may be repeated")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="how often everything is measured")] = None,
    data: Annotated[
        Path | None, typer.Option(envvar="PLAIT_BENCH_DATA", help="autoconfig, placement, models: published tables")
    ] = None,
) -> None:
    """Measure plait and its peers in turn. Data goes to stdout, progress to stderr."""
    try:
        from plait_bench.errors import BenchError
        from plait_bench.job import NAMES, measure, text_table
    except ModuleNotFoundError as error:
        raise PlaitError("benchmarks are not installed: run this in a clone of plait's repository") from error

    if name not in NAMES:
        print(f"plait bench: there is no benchmark {name!r}; there is: {', '.join(NAMES)}", file=sys.stderr)
        raise typer.Exit(2)
    options = {"models": models, "size": size, "edge": edge, "dtype": dtype, "device": device, "data": data}
    given = {key: value for key, value in options.items() if value is not None}
    with told(BenchError):
        document = measure(
            name, say=_say, rounds=rounds, quick=quick, workloads=workload or (), systems=system or (),
            record=record, results=results, copy_of=at, **given,
        )  # fmt: skip
    text = json.dumps(document, indent=1)
    if document["left_out"] and not document["rows"]:
        raise PlaitError("nothing was measured: " + "; ".join(document["left_out"].values()))
    print(text if as_json else text_table(document))
    if out is not None:
        write(out, f"{text}\n")
    if document["missed"]:
        raise typer.Exit(_MISSED)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
