"""How a service says whether it would answer now; the same words for every workload."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Health"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """If it is not ready, ``reason`` says what is missing. ``warmup_s``: how long the warm-up image took, if any."""

    ready: bool
    reason: str | None = None
    warmup_s: float | None = None
