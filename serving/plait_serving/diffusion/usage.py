"""What each tenant used: counted where the work is done, and only when it was."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields

__all__ = ["TenantUsage", "UsageLedger", "total_usage"]


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

    def plus(self, other: TenantUsage) -> TenantUsage:
        """Return the sum of both."""
        names = [field.name for field in fields(self)]
        return TenantUsage(**{name: getattr(self, name) + getattr(other, name) for name in names})


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
            return {name: usage.plus(TenantUsage()) for name, usage in self._tenants.items()}


def total_usage(parts: list[Mapping[str, TenantUsage]]) -> dict[str, TenantUsage]:
    """Return the sums over several engines."""
    total: dict[str, TenantUsage] = {}
    for part in parts:
        for name, usage in part.items():
            total[name] = total.get(name, TenantUsage()).plus(usage)
    return total
