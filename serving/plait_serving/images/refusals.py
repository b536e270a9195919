"""Answers a flood where it arrives: for a moment after the engine refused a tenant, so does the ingress.

An engine's refusal costs calls into its process, whose interpreter is busy with images. Whether a tenant's queue has
room does not depend on the request (`queue/bounds.py`), and it has none again for `retry_after_s`. When the moment is
over a few requests find out whether there is room, and more and more while none of them is refused: if all that come
in the meantime went along, each of them would wait for the refusal of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from plait_serving.diffusion.errors import Overloaded

__all__ = ["FIRST_TRIES", "HELD_S", "TRY_S", "RecentRefusals"]

HELD_S = 0.25
"""Room that is made within this time is found late by so much; the engine answers four floods a second and tenant."""

TRY_S = 0.05
"""About what the engine takes to refuse while it computes. After each such time without a refusal twice as many try."""

FIRST_TRIES = 4
_ENOUGH_TRIES = 1024
"""From here on nobody is held up: a process answers fewer requests in `TRY_S`."""


@dataclass(slots=True, kw_only=True)
class _Refused:
    """A tenant that was refused at `at_s`, and how many may try and have tried since `since_s`."""

    error: Overloaded
    at_s: float
    since_s: float
    tries: int = FIRST_TRIES
    tried: int = 0


class RecentRefusals:
    """The newest refusal of each tenant. For one event loop."""

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self._refused: dict[str, _Refused] = {}

    def check(self, tenant: str) -> None:
        """Raise `Overloaded` if the tenant was refused a moment ago, or enough others find out whether it still is."""
        refused = self._refused.get(tenant)
        if refused is None:
            return
        now_s = self._monotonic_s()
        if (periods := int((now_s - refused.since_s) / TRY_S)) > 0:
            refused.tries <<= min(periods, _ENOUGH_TRIES.bit_length())
            refused.since_s, refused.tried = now_s, 0
        if refused.tries >= _ENOUGH_TRIES:
            del self._refused[tenant]
        elif now_s >= refused.since_s and refused.tried < refused.tries:
            refused.tried += 1
        else:
            error, ago_s = refused.error, now_s - refused.at_s
            left_s = None if error.retry_after_s is None else max(0.0, error.retry_after_s - ago_s)
            raise Overloaded(error.message, param=error.param, retry_after_s=left_s)

    def note(self, tenant: str, error: BaseException) -> None:
        """Remember an error if it is a refusal by the engine."""
        if isinstance(error, Overloaded):
            now_s = self._monotonic_s()
            self._refused[tenant] = _Refused(error=error, at_s=now_s, since_s=now_s + HELD_S)
