"""What each tenant used: counted where the work is done, and only when it was."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(slots=True, kw_only=True)
class TenantUsage:
    """Sums since the engine started. `compute_s` includes the work of requests that failed or were cancelled; `images`
    and `pixels` were delivered; `steps` are those that images took part in."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    images: int = 0
    pixels: int = 0
    steps: int = 0
    compute_s: float = 0.0


class UsageLedger:
    """The usage of all tenants. Thread-safe. Tenants come from the configuration, so there are few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantUsage] = {}

    def add(self, tenant: str, **more: float) -> None:
        """Add to a tenant's sums, by name. Nobody pays for a tenant without a name: plait's own warm-up."""
        if not tenant:
            return
        with self._lock:
            usage = self._tenants.setdefault(tenant, TenantUsage())
            for name, value in more.items():
                setattr(usage, name, getattr(usage, name) + value)

    def snapshot(self) -> dict[str, TenantUsage]:
        """Return a copy, by tenant."""
        with self._lock:
            return {name: replace(usage) for name, usage in self._tenants.items()}
