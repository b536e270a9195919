"""How a service reports whether it would answer now; the same type for every workload."""

from __future__ import annotations

from dataclasses import dataclass

HEALTH_TIMEOUT_S = 1.5
"""A replica that takes longer than this to report that it is healthy counts as unhealthy: load balancers wait for a
second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """If not ready, `reason` names what is missing. `warmup_s`: how long the warm-up image took, if any."""

    ready: bool
    reason: str | None = None
    warmup_s: float | None = None
