"""`plait doctor`: check whether plait will run on this machine."""

from __future__ import annotations

import os
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def doctor(
    port: Annotated[int, typer.Option(min=0, max=65535, help="the port that the server would take")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """Check versions, memory, cores, home, port and the starter files. Exit with code 1 if something will not work."""
    import json
    from dataclasses import asdict

    from plait.doctor import CheckStatus, examine
    from plait_serving.images.config import STARTER_FOLDER

    findings = examine(os.environ, host="127.0.0.1", port=port, starter=STARTER_FOLDER)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.verdict:<4}  {finding.name:<9} {finding.detail}")
    raise typer.Exit(1 if any(finding.verdict is CheckStatus.FAIL for finding in findings) else 0)
