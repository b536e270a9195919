"""`plait recommend`: a packaged model in this process, called as its server would call it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.errors import PlaitError, told
from plait_disagg.package.manifest import PackageError
from plait_disagg.refresh.live_package import LivePackage, open_live
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeCore
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService, ServedRanker


@told(PackageError)
def recommend(folder: Path, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the response of POST /v1/recommend for the model in `folder`. Raises `PlaitError` with the server's
    message."""
    return asyncio.run(_ask(open_live(folder, sparse=True, dense=True), body))


async def _ask(live: LivePackage, body: Mapping[str, Any]) -> Mapping[str, Any]:
    import httpx2

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
