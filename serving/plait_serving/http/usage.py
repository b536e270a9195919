"""`GET /v1/usage`: what each tenant used, read off the metrics: there is one account of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from prometheus_client.parser import text_string_to_metric_families

from plait_serving.diffusion.errors import EngineStopped
from plait_serving.http.context import ContextDep
from plait_serving.http.edge.auth import Principal, Role, principal
from plait_serving.http.metrics import NO_IMAGES, TENANT_PREFIX, exposition

__all__ = ["router", "usage_of"]

router = APIRouter(prefix="/v1", tags=["operations"])


@router.get("/usage", summary="What your tenant used")
async def usage(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> dict[str, Any]:
    """Return the sums of the caller's tenant, for an admin of all tenants, since the replicas that count started.

    A replica that is started again counts from 0, like all its metrics: for bills, keep them in Prometheus.
    """
    text = await exposition(context)
    if NO_IMAGES in text:
        raise EngineStopped("the engine, which keeps the account, does not answer", retry_after_s=1.0)
    found = usage_of(text)
    seen = found if who.role is Role.ADMIN else {who.tenant: found.get(who.tenant, {})}
    return {"object": "list", "data": [{"object": "usage", "tenant": name, **seen[name]} for name in sorted(seen)]}


def usage_of(metrics: str) -> dict[str, dict[str, float]]:
    """Return the account in Prometheus' text format, by tenant and by name without prefix and suffix."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name.startswith(TENANT_PREFIX) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(TENANT_PREFIX).removesuffix("_total")
                sums = found[sample.labels["tenant"]]
                value = sums.get(name, 0.0) + sample.value
                sums[name] = value if name.endswith("seconds") else int(value)
    return dict(found)
