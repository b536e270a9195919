"""How a service reports whether it would answer now; the same type for every workload."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """If not ready, `reason` names what is missing. `warmup_s`: how long the warm-up image took, if any."""

    ready: bool
    reason: str | None = None
    warmup_s: float | None = None
