"""How much of an engine's or a ControlNet service's capacity is used, by which its replicas grow and vanish. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_QUEUED_S = 10.0
"""The compute-seconds that wait at a replica when it counts as used up: what a user waits for an image on a CPU."""

_MAX = 2.0
"""A backlog shows how long the overload has lasted, not how many replicas are missing."""


def engine_pressure(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
    """Return the pressure, 0 idle to 1 used up and at most twice that: the compute thread's share of the time, or what
    waits, whichever is more: while a model is loaded nothing may compute. The mappings hold `compute_s`, which counts
    up, and `queued_s`."""
    busy = max(0.0, after["compute_s"] - before["compute_s"]) / seconds
    return min(_MAX, max(busy, after["queued_s"] / _QUEUED_S))


def busy_share(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
    """Return the pressure of a ControlNet service, 0 to 1: its compute thread's share of the time. The mappings hold
    `busy_s`, which counts up.

    What waits says nothing more: an engine asks one replica at a time and sends the next step when it has the answer.
    """
    return max(0.0, after["busy_s"] - before["busy_s"]) / seconds
