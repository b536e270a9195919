"""Answers a flood where it arrives: for a moment after the engine refused a tenant, so does the ingress.

An engine's refusal costs a call into its process, whose interpreter is busy with images. Whether a tenant's queue has
room does not depend on the request (`queue/bounds.py`), and it has none again for `retry_after_s`.
"""

from __future__ import annotations

from collections.abc import Callable

from plait_serving.diffusion.errors import Overloaded

__all__ = ["HELD_S", "RecentRefusals"]

HELD_S = 0.25
"""Room that is made within this time is found late by so much; the engine answers four floods a second and tenant."""


class RecentRefusals:
    """The newest refusal of each tenant. For one event loop."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._refused: dict[str, tuple[float, Overloaded]] = {}

    def check(self, tenant: str) -> None:
        """Raise `Overloaded` if the tenant was refused a moment ago."""
        if tenant not in self._refused:
            return
        at_s, error = self._refused[tenant]
        ago_s = self._monotonic_s() - at_s
        if ago_s >= HELD_S:
            del self._refused[tenant]
            return
        left_s = None if error.retry_after_s is None else error.retry_after_s - ago_s
        raise Overloaded(error.message, param=error.param, retry_after_s=left_s)

    def note(self, tenant: str, error: BaseException) -> None:
        """Remember an error if it is a refusal by the engine."""
        if isinstance(error, Overloaded):
            self._refused[tenant] = (self._monotonic_s(), error)
