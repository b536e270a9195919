"""`plait recommend`: rank items without a server and without Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.errors import PlaitError, told

if TYPE_CHECKING:
    from plait_disagg.refresh.live_package import LivePackage

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
        from plait_disagg.refresh.live_package import open_live

        answer = asyncio.run(_ask(open_live(folder, sparse=True, dense=True), body))
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


async def _ask(live: LivePackage, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the response of POST /v1/recommend. Raises `PlaitError` with the server's message."""
    import httpx2

    from plait_disagg.workers.ranker import CoreRanker
    from plait_disagg.workers.whole import WholeCore
    from plait_serving.http.app import create_app
    from plait_serving.http.context import HttpSettings
    from plait_serving.ranking.local import LocalRankingService, ServedRanker

    assert live.sparse is not None
    ranker = CoreRanker(WholeCore(live.card(), live.sparse, live.dense[live.dense_version]))
    models = {live.package.manifest.name: ServedRanker(ranker=ranker, items=live.package.items)}
    app = create_app(None, HttpSettings(), ranking=LocalRankingService(models))
    try:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://plait") as client:
            answer = await client.post("/v1/recommend", json=body)
    finally:
        await ranker.close(drain_s=0.0)
    data: dict[str, Any] = answer.json()
    if answer.status_code != 200:
        raise PlaitError(data["error"]["message"])
    return data
