"""`plait demo`: a short tour of plait."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="folder for the images")] = Path("out/demo")) -> None:
    """Start a server, make images (plain, ControlNet, LoRA, both, two at once), rank films, run a load test, stop the
    server, and tune a clone."""
    from plait.demo.run import run
    from plait.errors import told

    with told(file=out):
        sheet = run(out, say=print)
    print(f"all of them: {sheet}")
