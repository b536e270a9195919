"""Whose turn it is on the compute thread: weighted fair sharing of its seconds between tenants.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with a step as the packet and its measured seconds as the
length. Each tenant has a virtual time v: the compute-seconds that it used, divided by its weight. The tenant with the
least v goes first. One that comes back after a pause is lifted to the least v of those that are there: time that
nobody asked for is not saved up.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from plait_serving.diffusion.values import Tenant


class TenantShares:
    """The virtual times of the tenants. Thread-safe: decodes are charged by their own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._virtual_s: dict[str, float] = {}
        self._present: frozenset[str] = frozenset()
        self._floor_s = 0.0
        self._last: str | None = None

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Record that a tenant used `seconds` of compute."""
        with self._lock:
            self._virtual_s[tenant.name] = self._virtual_s.get(tenant.name, self._floor_s) + seconds / tenant.weight

    def turn(self, waiting: Sequence[Tenant], *, slack_s: float = 0.0) -> str:
        """Return the name of the tenant to run next. `waiting`: the tenants that have something to run, at least one,
        in the order of their oldest request. Of several that are equally far behind, one that did not run last goes
        first: who arrives is put level with who runs, and would otherwise wait for another step.

        The tenant that ran last goes on while it is at most `slack_s` ahead: what a change of tenants costs is spread
        over so much work.
        """
        with self._lock:
            self._arrive([tenant.name for tenant in waiting])
            behind = min(waiting, key=lambda tenant: (self._virtual_s[tenant.name], tenant.name == self._last))
            last = next((tenant for tenant in waiting if tenant.name == self._last), behind)
            ahead_s = (self._virtual_s[last.name] - self._virtual_s[behind.name]) * last.weight
            self._last = last.name if ahead_s < slack_s else behind.name
            return self._last

    def _arrive(self, names: Sequence[str]) -> None:
        """Lift the tenants that were not there to the least of those that were, and forget who is behind all."""
        stayed = [self._virtual_s[name] for name in names if name in self._present]
        floor_s = max(self._floor_s, min(stayed, default=self._floor_s))
        for name in names:
            if name not in self._present:
                self._virtual_s[name] = max(self._virtual_s.get(name, floor_s), floor_s)
        self._present = frozenset(names)
        self._floor_s = floor_s
        self._virtual_s = {n: v for n, v in self._virtual_s.items() if n in self._present or v > floor_s}
