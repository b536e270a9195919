"""Whose turn it is. `TenantShares`: on the compute thread, by weighted fair sharing of its seconds between tenants.
`TurnQueue`: elsewhere, where each tenant's next item comes in turn.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with a step as the packet and its measured seconds as the
length. Each tenant has a virtual time v: the compute-seconds that it used, divided by its weight. The tenant with the
least v goes first. One that comes back after a pause is lifted to the least v of those that are there, less the
`credit_s` of one request: its first request runs before it shares, and more time than that, which nobody asked for, is
not saved up. Over any time a tenant gets at most its share and the credit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from plait_serving.diffusion.values import Tenant

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Whose turn it is; `credit_s`: the compute-seconds that it may still use before it shares, as who has just come
    back."""

    tenant: str
    credit_s: float


class TenantShares:
    """The virtual times of the tenants. Thread-safe: decodes are charged by their own thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._virtual_s: dict[str, float] = {}
        self._shares_from_s: dict[str, float] = {}
        """The virtual time at which the credit of a tenant that came back is used up."""
        self._present: frozenset[str] = frozenset()
        self._floor_s = 0.0
        self._longest_credit_s = 0.0
        self._last: str | None = None
        self._first: str | None = None
        self.is_shared = False
        """Whether more than one tenant has come so far; plait itself, which warms up, does not count."""

    def charge(self, tenant: Tenant, seconds: float) -> None:
        """Record that a tenant used `seconds` of compute."""
        with self._lock:
            self._virtual_s[tenant.name] = self._virtual_s.get(tenant.name, self._floor_s) + seconds / tenant.weight

    def turn(self, waiting: Sequence[Tenant], *, slack_s: float = 0.0, credit_s: float = 0.0) -> Turn:
        """Return who runs next. `waiting`: the tenants that have something to run, at least one, in the order of their
        oldest request. Of several that are equally far behind, one that did not run last goes first: who arrives is put
        level with who runs, and would otherwise wait for another step.

        The tenant that ran last goes on while it is at most `slack_s` ahead: what a change of tenants costs is spread
        over so much work. `credit_s`: what tenants that were not there may use before they share.
        """
        with self._lock:
            self._arrive(waiting, credit_s)
            behind = min(waiting, key=lambda tenant: (self._virtual_s[tenant.name], tenant.name == self._last))
            last = next((tenant for tenant in waiting if tenant.name == self._last), behind)
            ahead_s = (self._virtual_s[last.name] - self._virtual_s[behind.name]) * last.weight
            chosen = last if ahead_s < slack_s else behind
            self._last = chosen.name
            left_s = self._shares_from_s.get(chosen.name, 0.0) - self._virtual_s[chosen.name]
            return Turn(tenant=chosen.name, credit_s=max(0.0, left_s * chosen.weight))

    def _arrive(self, waiting: Sequence[Tenant], credit_s: float) -> None:
        """Lift the tenants that were not there to the least of those that were, less the credit, and forget who is so
        far behind that it would be lifted anyway."""
        names = {tenant.name for tenant in waiting}
        stayed = [self._virtual_s[name] for name in names & self._present]
        shares_from_s = min(stayed, default=self._floor_s)
        for tenant in waiting:
            if tenant.name not in self._present:
                from_s = shares_from_s - (credit_s / tenant.weight if stayed else 0.0)
                self._virtual_s[tenant.name] = max(self._virtual_s.get(tenant.name, from_s), from_s)
                self._shares_from_s[tenant.name] = shares_from_s
                self._longest_credit_s = max(self._longest_credit_s, credit_s / tenant.weight)
            if tenant.counts:
                self._first = self._first or tenant.name
                self.is_shared |= tenant.name != self._first
        self._present = frozenset(names)
        self._floor_s = max(self._floor_s, shares_from_s)
        forgotten_s = self._floor_s - self._longest_credit_s
        self._virtual_s = {n: v for n, v in self._virtual_s.items() if n in self._present or v > forgotten_s}
        self._shares_from_s = {n: v for n, v in self._shares_from_s.items() if n in self._virtual_s}


class TurnQueue(Generic[T]):
    """Tenants take turns: one item of each, the items of one tenant in their order. Thread-safe.

    An item waits for at most one of each other tenant, beside those of its own before it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[T]] = {}

    def put(self, tenant: str, item: T) -> None:
        """Add an item of a tenant, by name."""
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append(item)

    def take(self) -> tuple[str, T] | None:
        """Remove the next item and return it with its tenant; None if there is none. Its tenant then goes last."""
        with self._lock:
            tenant = next(iter(self._waiting), None)
            if tenant is None:
                return None
            items = self._waiting.pop(tenant)
            item = items.popleft()
            if items:
                self._waiting[tenant] = items
            return tenant, item
