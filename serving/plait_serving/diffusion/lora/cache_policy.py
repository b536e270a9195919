"""Which LoRA files are in host memory: the pure policy of the cache. No threads, no clock, no files.

It holds entries within a byte budget. Sets are admitted whole: all the room they need is reserved at once, so two
sets cannot wait for each other. Entries in use are never evicted; the others are evicted in order of last use, those
whose file has changed first.

A tenant's sets are admitted in order; one that is already in memory may overtake waiting ones, but none is overtaken
more than `MAX_OVERTAKEN` times. Between tenants:

- Each has a share of the budget, by its weight among those that hold sets or wait. Alone, one may use all of it. While
  another waits, it is given no more than its share; and for a set that fits into its tenant's share, those that hold
  more are asked for sets, the newest first (`asked_back`).
- Sets that are larger than their tenants' shares take turns with each other, by the rule that holds for compute
  (`queue/shares`): what is shared is seconds, times the part of the budget that is held.
- So that none waits for ever for sets that fit, they have a part of the time (`_PATIENCE`) from these: in it they are
  not asked for, and all others are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from plait_serving.diffusion.queue.shares import TenantShares
from plait_serving.diffusion.values import Tenant

MAX_OVERTAKEN = 8

_PATIENCE = 4.0
"""A set larger than its tenant's share waits so many times as long as its turn lasts, while others keep it out."""


@dataclass(frozen=True, slots=True)
class Key:
    """One version of the content of one name."""

    name: str
    stamp: str


@dataclass(slots=True)
class _CacheEntry:
    nbytes: int
    is_loaded: bool = False
    users: int = 0
    last_use: int = 0
    outdated: bool = False


@dataclass(slots=True)
class Claim:
    """A set that is admitted or waits."""

    tenant: Tenant
    wanted: Mapping[Key, int]
    overtaken: int = 0


class CachePolicy:
    """The policy that the module docstring describes. `wanted` maps keys to the bytes that they will take; a set has a
    number, its ticket.

    Call `pass_time` before anything else happens at a later moment, and `admit_waiting` after it. `turn_s`: how long a
    turn is."""

    def __init__(self, budget_bytes: int, turn_s: float = 1.0) -> None:
        self.budget_bytes = budget_bytes
        self.turn_s = turn_s
        self.asked_back: frozenset[int] = frozenset()
        """The admitted sets that others wait for, as of the last `admit_waiting`."""
        self._entries: dict[Key, _CacheEntry] = {}
        self._held: dict[int, Claim] = {}
        self._waiters: dict[int, Claim] = {}
        self._shares = TenantShares()
        self._owed_s = 0.0
        """What sets larger than their share waited for others, less `_PATIENCE` times what they held."""
        self._owed_per_s = 0.0
        self._are_owed = False
        self._now_s = 0.0
        self._uses = 0

    @property
    def reserved_bytes(self) -> int:
        """The bytes of everything that is loaded or loading."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def waiting(self) -> tuple[int, ...]:
        """The tickets of sets that have not been admitted yet, in order."""
        return tuple(self._waiters)

    def is_loaded(self, key: Key) -> bool:
        """Return whether an entry is in memory, not on its way."""
        entry = self._entries.get(key)
        return entry is not None and entry.is_loaded

    def users(self, key: Key) -> int:
        """Return the number of admitted sets that hold an entry."""
        entry = self._entries.get(key)
        return entry.users if entry else 0

    def fits_ever(self, wanted: Mapping[Key, int]) -> bool:
        """Return whether a set fits an empty cache."""
        return sum(wanted.values()) <= self.budget_bytes

    def pass_time(self, now_s: float) -> None:
        """Charge tenants for what they held until now."""
        tenants, seconds = self._tenants(), now_s - self._now_s
        for name, held in self._by_tenant().items():
            part = _bytes(held) / max(1, self.budget_bytes)
            self._shares.charge(tenants[name], part * seconds)
        max_s = _PATIENCE * self.turn_s
        owed_s = self._owed_s + self._owed_per_s * min(seconds, self.turn_s)  # a long step is a turn
        self._owed_s = max(-max_s, min(owed_s, max_s)) if self._owed_per_s else 0.0
        self._are_owed = self._owed_s > 1e-9 if self._are_owed else self._owed_s >= max_s - 1e-9
        self._now_s = now_s

    def enter(self, ticket: int, wanted: Mapping[Key, int], tenant: Tenant) -> None:
        """Let a set wait behind its tenant's others, under `ticket`."""
        self._outdate(wanted)
        self._waiters[ticket] = Claim(tenant, wanted)

    def admit_waiting(self) -> list[tuple[int, tuple[Key, ...]]]:
        """Admit waiting sets as far as there is room for them; return each with what is to be loaded for it."""
        admitted = []
        while (found := self._next()) is not None:
            admitted.append(found)
        return admitted

    def claim(self, ticket: int) -> Claim:
        """Return a set that waits or is admitted."""
        return self._waiters[ticket] if ticket in self._waiters else self._held[ticket]

    def is_ready(self, ticket: int) -> bool:
        """Return whether a set is admitted, and all of it in memory."""
        return ticket in self._held and all(map(self.is_loaded, self._held[ticket].wanted))

    def withdraw(self, ticket: int) -> None:
        """Forget a set that waits, or release it."""
        if self._waiters.pop(ticket, None) is None:
            self.release(ticket)

    def loaded(self, key: Key, nbytes: int) -> None:
        """Record that a load ended; `nbytes` is its actual size, at most what was reserved."""
        entry = self._entries[key]
        if nbytes > entry.nbytes:
            raise ValueError(f"{key} takes {nbytes} bytes, {entry.nbytes} were reserved")
        entry.nbytes, entry.is_loaded = nbytes, True
        self._make_room(0)

    def failed(self, key: Key) -> tuple[int, ...]:
        """Record that a load failed; nothing of it is kept. Return the sets that needed it, which are released."""
        del self._entries[key]
        needed = tuple(ticket for ticket, claim in self._held.items() if key in claim.wanted)
        for ticket in needed:
            self.release(ticket)
        return needed

    def release(self, ticket: int) -> None:
        """Release an admitted set. Outdated entries are evicted, and those over the budget."""
        for key in self._held.pop(ticket).wanted:
            if key in self._entries:  # its load may have failed
                self._entries[key].users -= 1
        self._make_room(0)

    def give_back(self, ticket: int, again: int) -> None:
        """Release a set that waits again, under the ticket `again`, before its tenant's others."""
        claim = self._held[ticket]
        self.release(ticket)
        self._waiters = {again: claim, **self._waiters}

    def resize(self, budget_bytes: int) -> None:
        """Set a new budget; idle entries are evicted until it is met. Entries in use stay and may exceed it until
        released."""
        self.budget_bytes = budget_bytes
        self._make_room(0)

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[int, tuple[Key, ...]] | None:
        """Admit one set, or say which must be given back for one."""
        self.asked_back = frozenset()
        line, held = self._line(), self._by_tenant()
        after = {ticket: _bytes(held.get(claim.tenant.name, {}), claim.wanted) for ticket, claim in line.items()}
        small = {ticket for ticket, claim in line.items() if after[ticket] <= self._share(claim)}
        large = {ticket for ticket, claim in line.items() if ticket not in small and claim.tenant.name not in held}
        holds = [claim for claim in self._held.values() if _bytes(claim.wanted) > self._share(claim)]
        self._owed_per_s = -_PATIENCE if holds else float(bool(large))
        tenants = {claim.tenant.name: claim.tenant for claim in (*(line[ticket] for ticket in large), *holds)}
        turn = self._shares.turn(list(tenants.values()), slack_s=self.turn_s).tenant if tenants else ""
        is_next = {ticket for ticket in large if line[ticket].tenant.name == turn}
        first, second = (is_next, small) if self._are_owed else (small, is_next)
        for ticket in sorted(line, key=lambda ticket: (ticket not in first, ticket not in second)):
            claim = line[ticket]
            others_wait = any(other.tenant.name != claim.tenant.name for other in line.values())
            adds = after[ticket] > _bytes(held.get(claim.tenant.name, {}))
            if others_wait and adds and ticket not in small | is_next:
                continue
            to_load = self._try(claim.wanted)
            if to_load is not None:
                self._hold(ticket)
                return ticket, to_load
            if ticket in small:
                self.asked_back = self._to_ask(claim, spared=holds if self._are_owed else ())
            elif ticket in is_next:
                self.asked_back = self._to_ask(claim, also_small=self._are_owed)
            if self.asked_back:
                return None  # the room that is made is for this one
        return None

    def _line(self) -> dict[int, Claim]:
        """Return the sets that may be next: each tenant's oldest, and those in memory that may still overtake it."""
        line: dict[int, Claim] = {}
        overtaken: dict[str, int] = {}
        for ticket, claim in self._waiters.items():
            passed = overtaken.get(claim.tenant.name)
            if passed is None or (passed < MAX_OVERTAKEN and all(key in self._entries for key in claim.wanted)):
                line[ticket] = claim
            overtaken[claim.tenant.name] = max(passed or 0, claim.overtaken)
        return line

    def _to_ask(self, claim: Claim, *, spared: Collection[Claim] = (), also_small: bool = False) -> frozenset[int]:
        """Return the sets to ask for so that one fits, those of tenants with more than their share first; none if that
        is not enough."""
        asked: list[int] = []
        of = {claim.tenant.name, *(other.tenant.name for other in spared)}
        others = {ticket: one for ticket, one in reversed(self._held.items()) if one.tenant.name not in of}
        for of_all in (False, True)[: 1 + also_small]:
            for ticket, held in others.items():
                if ticket in asked or not self.fits_ever(held.wanted):
                    continue
                if of_all or _bytes(self._by_tenant(asked)[held.tenant.name]) > self._share(held):
                    asked.append(ticket)
                    if self._fits_without(asked, claim):
                        return frozenset(asked)
        return frozenset()

    def _fits_without(self, asked: Collection[int], claim: Claim) -> bool:
        stay = self._by_tenant(asked).values()
        abandoned = {k: e.nbytes for k, e in self._entries.items() if not (e.is_loaded or e.users)}
        return _bytes(*stay, abandoned, claim.wanted) <= self.budget_bytes

    def _tenants(self) -> dict[str, Tenant]:
        return {claim.tenant.name: claim.tenant for claim in (*self._held.values(), *self._waiters.values())}

    def _by_tenant(self, without: Collection[int] = ()) -> dict[str, dict[Key, int]]:
        """Return what tenants hold; what several of their sets share counts once."""
        held: dict[str, dict[Key, int]] = {}
        for ticket, claim in self._held.items():
            if ticket not in without:
                held.setdefault(claim.tenant.name, {}).update(claim.wanted)
        return held

    def _share(self, claim: Claim) -> float:
        """Return the bytes that are the share of a set's tenant."""
        return self.budget_bytes * claim.tenant.weight / sum(tenant.weight for tenant in self._tenants().values())

    def _hold(self, ticket: int) -> None:
        """Take a set out of the line."""
        for other, claim in self._waiters.items():
            if other == ticket:
                break
            claim.overtaken += claim.tenant.name == self._waiters[ticket].tenant.name
        self._held[ticket] = self._waiters.pop(ticket)

    def _try(self, wanted: Mapping[Key, int]) -> tuple[Key, ...] | None:
        """Enter what a set needs, if there is room; return what is to be loaded for it."""
        missing = tuple(key for key in wanted if key not in self._entries)
        if not self._make_room(sum(wanted[key] for key in missing), keep=wanted):
            return None
        for key in wanted:
            entry = self._entries.setdefault(key, _CacheEntry(wanted[key]))
            self._uses += 1
            entry.users += 1
            entry.last_use = self._uses
        return missing

    def _outdate(self, wanted: Mapping[Key, int]) -> None:
        """Mark other contents of the wanted names as outdated: whoever asks for a different content has seen the
        newest."""
        stamps = {key.name: key.stamp for key in wanted}
        for key, entry in self._entries.items():
            entry.outdated = entry.outdated or stamps.get(key.name, key.stamp) != key.stamp
        for key in wanted:
            if key in self._entries:
                self._entries[key].outdated = False

    def _make_room(self, more_bytes: int, keep: Collection[Key] = ()) -> bool:
        """Evict idle entries until `more_bytes` fit; return False, with nothing evicted, if they cannot."""
        excess = self.reserved_bytes + more_bytes - self.budget_bytes
        idle = [(k, e) for k, e in self._entries.items() if e.is_loaded and not e.users and k not in keep]
        leaving: list[Key] = []
        for key, entry in sorted(idle, key=lambda item: (not item[1].outdated, item[1].last_use)):
            if excess <= 0 and not entry.outdated:
                break
            leaving.append(key)
            excess -= entry.nbytes
        if excess > 0 and more_bytes:
            return False
        for key in leaving:
            del self._entries[key]
        return True


def _bytes(*wanted: Mapping[Key, int]) -> int:
    """Return the bytes of what is in any of these."""
    return sum({key: nbytes for one in wanted for key, nbytes in one.items()}.values())
