"""``plait demo``: see it work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("out/demo")) -> None:
    """Starts a server, makes pictures (plain, ControlNet, LoRA, both, two at once), ranks films, loads it, stops it,
    and tunes a clone."""
    from plait.demo.run import run

    sheet = run(out, say=print)
    print(f"all of them: {sheet}")
