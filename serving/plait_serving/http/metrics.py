"""``GET /metrics`` in Prometheus' text format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from plait_serving.http.context import ContextDep

_NO_METRIC = re.compile(r"[^a-zA-Z0-9_]")

router = APIRouter(tags=["operations"])


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(context: ContextDep) -> Response:
    """The HTTP side's metrics followed by the rankers' and the image service's own."""
    parts = [context.metrics.text().decode(), *_rankers(context.recommenders.metrics())]
    if context.images is not None:
        parts.append(await context.images.metrics_text())
    return Response("".join(parts), headers={"content-type": CONTENT_TYPE_LATEST})


def _rankers(models: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """One untyped metric ``plait_ranker_NAME`` for each thing that the rankers count; its samples stand together."""
    for name in sorted({name for counts in models.values() for name in counts}):
        metric = f"plait_ranker_{_NO_METRIC.sub('_', name)}"
        yield f"# TYPE {metric} untyped\n"
        for model, counts in models.items():
            if name in counts:
                yield f"{metric}{{model={json.dumps(model)}}} {float(counts[name])!r}\n"
