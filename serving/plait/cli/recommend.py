"""`plait recommend`: rank items without a server and without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.errors import told

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def recommend(
    folder: Annotated[
        Path | None, typer.Argument(help="a packaged model (`plait models package` makes one); the starter if left out")
    ] = None,
    *,
    user: Annotated[str, typer.Option(help='every user-side input as JSON: {"customer": 3, "age": 0.4}')],
    candidates: Annotated[str, typer.Option(help="all, or item ids: 4,8,15; or JSON")] = "all",
    top_k: Annotated[int, typer.Option(min=1, help="only the best so many")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="print the server's answer")] = False,
) -> None:
    """Rank candidates for a user with a packaged model in this process; print the best first, with their scores."""
    body = {"user": _json(user, "--user"), "candidates": _candidates(candidates), "top_k": top_k}
    from plait.cli.models import table
    from plait_disagg.package.manifest import PackageError, read_manifest
    from plait_serving.ranking.config import STARTER_RANKING_FOLDER

    folder = folder or STARTER_RANKING_FOLDER
    with told(PackageError):
        read_manifest(folder)  # before torch is loaded
    from plait.offline.ranking import recommend as ask

    answer = ask(folder, body)
    if as_json:
        print(json.dumps(answer, indent=1))
        return
    rows = [("item", "score", "name")]
    for it in answer["items"]:
        score = "nan" if it["score"] is None else f"{it['score']:.6g}"
        rows.append((str(it.get("id", it.get("index"))), score, it.get("name") or ""))
    print(table(rows))


def _candidates(text: str) -> Any:
    if text == "all":
        return text
    return _json(text if text.lstrip().startswith("[") else f"[{text}]", "--candidates")


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _json(text: str, option: str) -> Any:
    with told(ValueError, RecursionError, to=lambda said: typer.BadParameter(f"not JSON: {said}", param_hint=option)):
        return json.loads(text, parse_constant=_no_constant)
