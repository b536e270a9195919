"""Which base model is loaded next, and which ones make room for it: a pure function.

Each model takes memory while it is resident, and all that are resident share the compute thread. Loading runs beside
it; what a switch costs is that those which make room cannot step meanwhile, and must be loaded again if they have work
left. So:

- A model that is asked for and for which there is room, or room where nobody works, is loaded at once. Of those
  without work the one goes that is worth least: what comes back late, loads fast and is large.
- Otherwise those make room whose oldest request arrived last, and only for a model whose own oldest arrived before
  theirs. Requests that arrived later than it and run before it *overtake* it. They may do so for `PATIENCE` times the
  seconds that the switch takes to load models, there and back: so loading takes a bounded share of the time, and the
  wait for it is bounded, too.
- A request that would miss its deadline waits no longer than it must.

One model is loaded at a time: two that read one disk at once both arrive when the second would.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PATIENCE = 2.0
"""A compromise: less loads more often than it computes, more makes rare models wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    """A model and what is asked of it now. `nbytes`: what it holds, or is expected to; `load_s`: what loading it takes;
    `oldest_s`: when the oldest of its requests arrived, None: it has none; `overtaken_s`: the seconds that later
    arrivals than that one computed; `used_s`: when it was last used; `is_short`: a deadline of its requests is missed
    unless it is loaded now."""

    name: str
    nbytes: int
    load_s: float
    is_resident: bool
    oldest_s: float | None = None
    overtaken_s: float = 0.0
    used_s: float = 0.0
    is_short: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A model to load once those of `leave` have made room."""

    load: str
    leave: tuple[str, ...]


def next_switch(models: Sequence[ModelDemand], *, budget_bytes: int, now_s: float) -> Switch | None:
    """Return what to load next, or None. Nothing is loading now."""
    residents = [model for model in models if model.is_resident]
    wanted = [model for model in models if not model.is_resident and model.oldest_s is not None]
    for model in sorted(wanted, key=lambda model: (not model.is_short, model.oldest_s or 0.0)):
        leave = _that_leave(model, residents, budget_bytes, now_s)
        if leave is None:
            continue
        busy = [other for other in leave if other.oldest_s is not None]
        if not busy or _is_due(model, busy):
            return Switch(load=model.name, leave=tuple(other.name for other in leave))
    return None


def surplus(models: Sequence[ModelDemand], *, in_use: Collection[str], budget_bytes: int, now_s: float) -> str | None:
    """Return which of the resident models that are not in use makes room, as all together hold more than they may; None
    if they do not, or nobody can. The only one stays: loading it for each request would not make it hold less."""
    residents = [model for model in models if model.is_resident]
    if len(residents) == 1 or sum(model.nbytes for model in residents) <= budget_bytes:
        return None
    idle = [model for model in residents if model.name not in in_use]
    return min(idle, key=lambda model: _worth(model, now_s)).name if idle else None


def _that_leave(
    model: ModelDemand, residents: Sequence[ModelDemand], budget_bytes: int, now_s: float
) -> list[ModelDemand] | None:
    """Return those that make room for a model, none if there is room; None if it is too large for the budget."""
    left_bytes = budget_bytes - model.nbytes - sum(other.nbytes for other in residents)
    leave: list[ModelDemand] = []
    for other in sorted(residents, key=lambda other: _worth(other, now_s)):
        if left_bytes >= 0:
            break
        leave.append(other)
        left_bytes += other.nbytes
    if left_bytes < 0:
        return None
    for other in reversed(leave):  # the last ones may have made room for all
        if left_bytes >= other.nbytes:
            leave.remove(other)
            left_bytes -= other.nbytes
    return leave


def _worth(model: ModelDemand, now_s: float) -> tuple[bool, float, float]:
    """Return what orders residents, those that make room first: without work by what a byte of it saves, others by the
    arrival of their oldest request."""
    if model.oldest_s is not None:
        return True, -model.oldest_s, 0.0
    idle_s = max(now_s - model.used_s, 1e-3)
    return False, model.load_s / (idle_s * max(model.nbytes, 1)), model.used_s


def _is_due(model: ModelDemand, busy: Sequence[ModelDemand]) -> bool:
    """Return whether those that have work make room now."""
    assert model.oldest_s is not None
    if model.is_short:
        return not any(other.is_short for other in busy)
    if any(other.oldest_s is not None and other.oldest_s <= model.oldest_s for other in busy):
        return False
    switch_s = model.load_s + sum(other.load_s for other in busy)
    return model.overtaken_s >= PATIENCE * switch_s
