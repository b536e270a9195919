"""How much may wait in an engine, and how long one that does not fit must wait. Pure.

The queue is bounded by predicted compute-seconds (`forecast`), and by a count, which bounds memory. Each tenant has a
share of both by its weight among the tenants that have requests now, so a flood of one leaves room for the others. A
request is taken if what its tenant has there is below the bound: one request always fits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.units import ImageJob
from plait_serving.diffusion.values import Tenant


def wait_s(tenant: Tenant, queue: Sequence[ImageJob], knobs: EngineKnobs) -> float | None:
    """Return the seconds until the queue, all requests that have not ended, oldest first, has room for one more of a
    tenant; None: it has room now.

    The compute thread works off a compute-second in a second, and a tenant's own at the rate of its share.
    """
    weights = {one.request.tenant.name: one.request.tenant.weight for one in queue} | {tenant.name: tenant.weight}
    share = tenant.weight / sum(weights.values())
    own = [one for one in queue if one.request.tenant.name == tenant.name]
    seconds = knobs.queue_seconds * share
    if tenant.queued_s is not None:
        seconds = min(seconds, tenant.queued_s)
    excess_s = sum(one.left_s for one in own) - seconds
    surplus = len(own) - int(max(1.0, knobs.queue_limit * share)) + 1
    waits = [excess_s] if own and excess_s >= 0.0 else []
    if surplus > 0:
        waits.append(_until_ended_s(own, surplus))
    return max(waits) / share if waits else None


def _until_ended_s(queue: Sequence[ImageJob], count: int) -> float:
    """Return the seconds until so many have ended: those that run share the steps, and as one of them ends the next one
    joins. What began together ends together, long after the mean."""
    waiting = deque(one.left_s for one in queue if not one.runs)
    ends_s = [one.left_s for one in queue if one.runs] or [waiting.popleft()]
    heapify(ends_s)
    now_s = each_s = 0.0  # the seconds from now on, and those that each of them had
    for _ in range(count):
        end_s = heappop(ends_s)
        now_s += (end_s - each_s) * (len(ends_s) + 1)
        each_s = end_s
        if waiting:
            heappush(ends_s, each_s + waiting.popleft())
    return now_s
