"""How many requests each tenant may send per second.

Limits are of a tenant, not of a key: all its keys share them. Each ingress replica counts requests on its own, so with
two of them a tenant may send twice as many per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from starlette.types import Scope

from plait_serving.http.edge.auth import tenant_in
from plait_serving.http.edge.errors import ApiError
from plait_serving.http.edge.repeating import PACED_PATHS
from plait_serving.sections import TenantLimits

_ROUNDING_S = 1e-9


class TokenBucket:
    """Takes `rate` requests per second, and up to a second's worth at once (at least one)."""

    def __init__(self, rate: float) -> None:
        self._each_s, self._ahead_s = 1.0 / rate, max(1.0, rate) / rate
        self._ends_s = -math.inf

    def take(self, now_s: float) -> float:
        """Take one request; return 0, or the seconds until one can be taken."""
        ends_s = max(now_s, self._ends_s) + self._each_s
        if (wait_s := ends_s - now_s - self._ahead_s) > _ROUNDING_S:
            return wait_s
        self._ends_s = ends_s
        return 0.0


class RateLimits:
    """Refuses a tenant's requests beyond its `requests_per_s` (429)."""

    def __init__(
        self, limits: Mapping[str, TenantLimits], monotonic_s: Callable[[], float], refused: Callable[[str, str], None]
    ) -> None:
        """`refused` is told of each request for images that is refused: its tenant, and the code of the answer."""
        self._monotonic_s = monotonic_s
        self._refused = refused
        self._buckets = {
            name: TokenBucket(one.requests_per_s) for name, one in limits.items() if one.requests_per_s is not None
        }

    def __call__(self, scope: Scope) -> None:
        """Raise a 429 `ApiError` for a request that is one too many."""
        tenant = tenant_in(scope)
        bucket = self._buckets.get(tenant)
        if bucket is not None and (wait_s := bucket.take(self._monotonic_s())) > 0.0:
            code, message = "rate_limited", f"tenant {tenant!r} sends too many requests per second"
            if scope["path"] in PACED_PATHS:
                self._refused(tenant, code)
            raise ApiError(429, message, code=code, headers={"retry-after": str(math.ceil(wait_s))})
