"""Answers a flood where it arrives: for a moment after a tenant was refused, so is all that it asks for.

An engine's refusal costs calls into its process, whose interpreter is busy with images. Whether a tenant's queue has
room does not depend on the request (`request_registry`), and it has none again for `retry_after_s`. When the moment is
over a few requests find out whether there is room, and more and more while none of them is refused for as long as
refusals took: if all that come in the meantime went along, each of them would wait for the refusal of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

HELD_S = 0.25
"""Room that is made within this time is found late by so much; the engine answers four floods a second and tenant."""

TRY_S, _MAX_TRY_S = 0.05, 2.0
"""About what the engine takes to refuse while it computes; twice what the last refusal took, up to a bound. After each
such time without a refusal twice as many try."""

FIRST_TRIES = 4
_ENOUGH_TRIES = 1024
"""From here on nobody is held up: a process answers fewer requests in `TRY_S`."""

_MAX_NAMES = 4096
"""Refusals that are remembered. Tenants are few; names that nobody has checked may be many."""


@dataclass(slots=True, kw_only=True)
class Refused(Generic[T]):
    """Somebody who was refused at `at_s`, and how many may try and have tried since `since_s`, for `try_s`. `held`: how
    many received it since they were counted."""

    refusal: T
    at_s: float
    since_s: float
    try_s: float
    tries: int = FIRST_TRIES
    tried: int = 0
    held: int = 0


class RecentRefusals(Generic[T]):
    """The newest refusal of each name. For one event loop."""

    def __init__(self, monotonic_s: Callable[[], float], *, max_names: int = _MAX_NAMES) -> None:
        self._monotonic_s = monotonic_s
        self._max_names = max_names
        self._refused: dict[str, Refused[T]] = {}

    def standing(self, name: str) -> Refused[T] | None:
        """Return the refusal if it was a moment ago, or enough others find out whether it still stands; None: ask."""
        refused = self._refused.get(name)
        if refused is None or refused.tries >= _ENOUGH_TRIES:
            return None
        now_s = self._monotonic_s()
        if (periods := int((now_s - refused.since_s) / refused.try_s)) > 0:
            refused.tries <<= min(periods, _ENOUGH_TRIES.bit_length())
            refused.since_s, refused.tried = now_s, 0
            if refused.tries >= _ENOUGH_TRIES:
                return None
        if now_s >= refused.since_s and refused.tried < refused.tries:
            refused.tried += 1
            return None
        refused.held += 1
        return refused

    def held(self, name: str) -> Refused[T] | None:
        """Return the refusal if it was a moment ago, for those that were let through before it."""
        refused = self._refused.get(name)
        if refused is None or self._monotonic_s() >= refused.since_s:
            return None
        refused.held += 1
        return refused

    def note(self, name: str, refusal: T, *, took_s: float = 0.0) -> None:
        """Remember that somebody was refused, and how long that took."""
        now_s = self._monotonic_s()
        before = self._refused.get(name)
        if before is None and len(self._refused) >= self._max_names:
            self._refused = {who: it for who, it in self._refused.items() if now_s < it.since_s + HELD_S}
            if len(self._refused) >= self._max_names:
                return
        held = 0 if before is None else before.held
        try_s = min(max(TRY_S, 2.0 * took_s), _MAX_TRY_S)
        self._refused[name] = Refused(refusal=refusal, at_s=now_s, since_s=now_s + HELD_S, try_s=try_s, held=held)

    def take_held(self, name: str) -> int:
        """Return how many received a refusal since this was asked last."""
        refused = self._refused.get(name)
        if refused is None:
            return 0
        held, refused.held = refused.held, 0
        if refused.tries >= _ENOUGH_TRIES:
            del self._refused[name]
        return held
