"""`GET /v1/usage`: what each tenant used, by the account of all replicas that there were."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from plait_serving.diffusion.errors import EngineStopped
from plait_serving.http.context import ContextDep
from plait_serving.http.edge.auth import Principal, Role, principal
from plait_serving.http.metrics import gather
from plait_serving.replica_metrics import IMAGE_COUNTS

router = APIRouter(prefix="/v1", tags=["operations"])


@router.get("/usage", summary="What your tenant used")
async def usage(context: ContextDep, who: Annotated[Principal, Depends(principal)]) -> dict[str, Any]:
    """Return the sums of the caller's tenant, for an admin of all tenants, since the server started.

    What a replica that dies had counted in its last seconds is lost, and all of it with the last ingress: for bills,
    keep the metrics in Prometheus.
    """
    is_up = (await gather(context)).is_up.get("images", True)
    found = context.account.by_tenant()
    if not is_up and not context.account.knows(IMAGE_COUNTS):
        raise EngineStopped("the engine, which keeps the account, does not answer", retry_after_s=1.0)
    seen = found if who.role is Role.ADMIN else {who.tenant: found.get(who.tenant, {})}
    return {"object": "list", "data": [{"object": "usage", "tenant": name, **seen[name]} for name in sorted(seen)]}
