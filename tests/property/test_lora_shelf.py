"""Invariants of the cache's policy under any sequence of events."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait_serving.diffusion.lora.cache_policy import MAX_OVERTAKEN, CachePolicy, Key
from plait_serving.diffusion.values import Tenant

BUDGET = 10
NAMES = "abcdefg"
SIZES = {name: 1 + i for i, name in enumerate(NAMES)}
TENANTS = {name: Tenant(name=name, weight=weight) for name, weight in (("one", 1.0), ("two", 1.0), ("three", 2.0))}


class ShelfMachine(RuleBasedStateMachine):
    """Drives a shelf as the cache does and remembers what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = CachePolicy(BUDGET)
        self.stamps = dict.fromkeys(NAMES, 0)
        self.tickets = itertools.count()
        self.admitted: dict[int, tuple[Key, ...]] = {}
        self.waiting: dict[int, dict[Key, int]] = {}
        self.tenants: dict[int, str] = {}
        self.overtaken: dict[int, int] = {}
        self.present: dict[Key, bool] = {}  # whether it is loaded
        self.now_s = 0.0

    def wanted(self, names: set[str]) -> dict[Key, int]:
        return {Key(name, str(self.stamps[name])): SIZES[name] for name in sorted(names)}

    def held_bytes(self, tenant: str, *more: Key) -> int:
        keys = {key for ticket, held in self.admitted.items() if self.tenants[ticket] == tenant for key in held}
        return sum(SIZES[key.name] for key in keys.union(more))

    def share(self, tenant: str) -> float:
        present = {self.tenants[ticket] for ticket in (*self.admitted, *self.waiting)} | {tenant}
        return BUDGET * TENANTS[tenant].weight / sum(TENANTS[name].weight for name in present)

    def enter(self, ticket: int, wanted: dict[Key, int], to_load: tuple[Key, ...]) -> None:
        assert set(to_load) == {key for key in wanted if key not in self.present}
        for key in to_load:
            self.present[key] = False
        self.admitted[ticket] = tuple(wanted)

    def see_evicted(self) -> None:
        for key in [key for key, is_loaded in self.present.items() if is_loaded and not self.shelf.is_loaded(key)]:
            del self.present[key]
            assert not any(key in keys for keys in self.admitted.values()), "evicted in use"

    def admit_waiting(self) -> None:
        admitted = self.shelf.admit_waiting()
        self.see_evicted()
        for ticket, to_load in admitted:
            tenant = self.tenants[ticket]
            older = [other for other in self.waiting if self.tenants[other] == tenant]
            older = older[: older.index(ticket)]
            if older:
                assert self.waiting[ticket].keys() <= self.present.keys(), "a set that needs room overtook"
            for other in older:
                self.overtaken[other] += 1
            others_wait = {self.tenants[other] for other in self.waiting} - {tenant}
            alone = tenant not in {self.tenants[other] for other in self.admitted}
            most = max(self.share(tenant), self.held_bytes(tenant))  # a set of what it holds already takes nothing
            self.enter(ticket, self.waiting.pop(ticket), to_load)
            assert not others_wait or alone or self.held_bytes(tenant) <= most, "more than its share while others wait"

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), tenant=st.sampled_from(sorted(TENANTS)))
    def acquire(self, names: set[str], tenant: str) -> None:
        wanted = self.wanted(names)
        if not self.shelf.fits_ever(wanted):
            return
        ticket = next(self.tickets)
        self.waiting[ticket], self.tenants[ticket], self.overtaken[ticket] = wanted, tenant, 0
        self.shelf.enter(ticket, wanted, TENANTS[tenant])
        self.admit_waiting()

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.admitted)))
        del self.admitted[ticket]
        self.shelf.release(ticket)
        self.admit_waiting()

    @precondition(lambda self: self.shelf.asked_back)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ticket, again = data.draw(st.sampled_from(sorted(self.shelf.asked_back))), next(self.tickets)
        self.waiting = {again: {key: SIZES[key.name] for key in self.admitted.pop(ticket)}, **self.waiting}
        self.tenants[again], self.overtaken[again] = self.tenants[ticket], self.overtaken[ticket]
        self.shelf.give_back(ticket, again)
        self.admit_waiting()

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.shelf.pass_time(self.now_s)
        self.admit_waiting()

    @precondition(lambda self: not all(self.present.values()))
    @rule(data=st.data(), works=st.booleans())
    def load_ends(self, data: st.DataObject, works: bool) -> None:
        loading = sorted((k for k, is_loaded in self.present.items() if not is_loaded), key=lambda k: (k.name, k.stamp))
        key = data.draw(st.sampled_from(loading))
        if works:
            self.present[key] = True
            self.shelf.loaded(key, SIZES[key.name])
        else:
            needed = self.shelf.failed(key)
            del self.present[key]
            assert set(needed) == {ticket for ticket, keys in self.admitted.items() if key in keys}
            for ticket in needed:
                del self.admitted[ticket]
        self.admit_waiting()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        self.shelf.withdraw(ticket)
        del self.waiting[ticket]
        self.admit_waiting()

    @rule(name=st.sampled_from(NAMES))
    def file_changes(self, name: str) -> None:
        self.stamps[name] += 1

    @invariant()
    def _assert_budget(self) -> None:
        assert self.shelf.reserved_bytes == sum(SIZES[key.name] for key in self.present)
        assert self.shelf.reserved_bytes <= BUDGET

    @invariant()
    def _assert_users(self) -> None:
        for key in self.present:
            assert self.shelf.users(key) == sum(key in keys for keys in self.admitted.values())
            assert self.shelf.is_loaded(key) is self.present[key]

    @invariant()
    def _assert_nobody_is_overtaken_for_ever(self) -> None:
        assert all(self.overtaken[ticket] <= MAX_OVERTAKEN for ticket in self.waiting)

    @invariant()
    def _assert_who_waits_has_a_reason(self) -> None:
        """A tenant's first in line does not fit beside what is in use or loading, or into its share."""
        assert list(self.waiting) == list(self.shelf.waiting)
        for tenant in {self.tenants[ticket] for ticket in self.waiting}:
            wanted = next(self.waiting[ticket] for ticket in self.waiting if self.tenants[ticket] == tenant)
            others_wait = any(self.tenants[ticket] != tenant for ticket in self.waiting)
            if others_wait and self.held_bytes(tenant, *wanted) > self.share(tenant):
                continue
            busy = {k for k, is_loaded in self.present.items() if not is_loaded or self.shelf.users(k)} - wanted.keys()
            need = sum(wanted.values()) + sum(SIZES[key.name] for key in busy)
            assert need > BUDGET or self.shelf.asked_back

    @invariant()
    def _assert_who_is_asked_is_another_than_who_waits(self) -> None:
        for ticket in self.shelf.asked_back:
            assert ticket in self.admitted
            assert any(self.tenants[other] != self.tenants[ticket] for other in self.waiting)


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=60, stateful_step_count=40)

A, B, C = (Key(name, "0") for name in "abc")


def admit(shelf: CachePolicy, ticket: int, wanted: dict[Key, int]) -> tuple[Key, ...] | None:
    """Enters a set of one tenant; returns what is to be loaded for it, if there is room."""
    shelf.enter(ticket, wanted, Tenant())
    return dict(shelf.admit_waiting()).get(ticket)


def ready(shelf: CachePolicy, ticket: int, *keys: Key) -> None:
    """Admits a set of size 1 each and ends its loads."""
    to_load = admit(shelf, ticket, dict.fromkeys(keys, 1))
    assert to_load is not None
    for key in to_load:
        shelf.loaded(key, 1)


def test_more_bytes_than_reserved_raise():
    """A file that turned out larger than announced does not slip past the budget."""
    shelf = CachePolicy(5)
    admit(shelf, 1, {A: 2})
    with pytest.raises(ValueError, match="2 were reserved"):
        shelf.loaded(A, 3)
    assert not shelf.is_loaded(A)


def test_sets_in_memory_overtake_a_bounded_number_of_times():
    """While one waits for room, sets that need none pass it, but not for ever."""
    shelf = CachePolicy(2)
    ready(shelf, 0, A)
    assert admit(shelf, 1, {B: 1, C: 1}) is None
    passed = [admit(shelf, 2 + i, {A: 1}) is not None for i in range(MAX_OVERTAKEN + 3)]
    assert passed == [True] * MAX_OVERTAKEN + [False] * 3


def test_outdated_entries_leave_first():
    """An idle entry whose file has changed is of no use; it leaves before older ones that are."""
    shelf = CachePolicy(10)
    ready(shelf, 0, B)
    ready(shelf, 1, A)
    newer = Key("a", "1")
    shelf.release(1)
    shelf.release(0)
    assert admit(shelf, 2, {newer: 1}) == (newer,)
    assert (shelf.is_loaded(A), shelf.is_loaded(B)) == (False, True)
