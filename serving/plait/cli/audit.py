"""`plait audit`: where a compiled model differed from torch, with both answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def audit() -> None:
    """Read what audits kept: a server computes sampled answers of its compiled models again with torch."""


@app.command()
def show(
    folder: Annotated[Path | None, typer.Option(help="what audits kept; in the user's cache if left out")] = None,
    out: Annotated[Path | None, typer.Option(help="write a page with the pairs of answers to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """List the answers that differed. Exit with code 1 if there are any."""
    import json
    from dataclasses import asdict

    from plait.errors import PlaitError, write

    if folder is not None and not folder.is_dir():
        raise PlaitError(f"{folder}: there is no such folder")
    from plait.offline.audit import drifts, page
    from plait_serving.diffusion.families.preparation import audit_folder
    from plait_serving.diffusion.settings import default_prepared_folder

    found = drifts(folder or audit_folder(default_prepared_folder()))
    if out is not None:
        write(out, page(found))
    if as_json:
        print(json.dumps([asdict(drift) for drift in found], indent=1))
    else:
        for drift in found:
            print(f"{drift.date}  {drift.program:<24} {drift.share_of_tolerance:>8} x tolerance  {drift.file}")
        if not found:
            print("no audited answer has differed")
    raise typer.Exit(1 if found else 0)
