"""Invariants of the cache's policy under any sequence of events, and its table."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait_serving.diffusion.lora.cache_policy import (
    MAX_OVERTAKEN,
    NEXT,
    Admission,
    CachePolicy,
    EntryEvent,
    EntryState,
    Key,
)

BUDGET = 10
NAMES = "abcdefg"
SIZES = {name: 1 + i for i, name in enumerate(NAMES)}


class ShelfMachine(RuleBasedStateMachine):
    """Drives a shelf as the cache does and remembers what must be true."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf: CachePolicy[int] = CachePolicy(BUDGET)
        self.stamps = dict.fromkeys(NAMES, 0)
        self.tickets = itertools.count()
        self.admitted: dict[int, tuple[Key, ...]] = {}
        self.waiting: dict[int, dict[Key, int]] = {}
        self.overtaken: dict[int, int] = {}
        self.present: dict[Key, EntryState] = {}

    def wanted(self, names: set[str]) -> dict[Key, int]:
        return {Key(name, str(self.stamps[name])): SIZES[name] for name in sorted(names)}

    def enter(self, ticket: int, wanted: dict[Key, int], admission: Admission) -> None:
        self.leave(admission.evicted)
        assert set(admission.to_load) == {key for key in wanted if key not in self.present}
        for key in admission.to_load:
            self.present[key] = EntryState.LOADING
        self.admitted[ticket] = tuple(wanted)

    def leave(self, evicted: tuple[Key, ...]) -> None:
        for key in evicted:
            assert self.present.pop(key) is EntryState.READY
            assert not any(key in keys for keys in self.admitted.values()), "evicted in use"

    def admit_waiting(self) -> None:
        order = list(self.waiting)
        got = self.shelf.admit_waiting()
        assert [ticket for ticket, _ in got] == order[: len(got)], "out of order"
        for ticket, admission in got:
            self.enter(ticket, self.waiting.pop(ticket), admission)

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1, max_size=4))
    def acquire(self, names: set[str]) -> None:
        wanted = self.wanted(names)
        if not self.shelf.fits_ever(wanted):
            return
        ticket = next(self.tickets)
        is_here = wanted.keys() <= self.present.keys()
        admission = self.shelf.admit(ticket, wanted)
        if admission is None:
            self.waiting[ticket] = wanted
            self.overtaken[ticket] = 0
        else:
            if self.waiting:
                assert is_here, "a set that needs room overtook"
            for other in self.waiting:
                self.overtaken[other] += 1
            self.enter(ticket, wanted, admission)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.admitted)))
        self.leave(self.shelf.release(self.admitted.pop(ticket)))
        self.admit_waiting()

    @precondition(lambda self: EntryState.LOADING in self.present.values())
    @rule(data=st.data(), works=st.booleans())
    def load_ends(self, data: st.DataObject, works: bool) -> None:
        loading = sorted(
            (k for k, s in self.present.items() if s is EntryState.LOADING), key=lambda k: (k.name, k.stamp)
        )
        key = data.draw(st.sampled_from(loading))
        if works:
            self.present[key] = EntryState.READY
            self.leave(self.shelf.loaded(key, SIZES[key.name]))
        else:
            self.shelf.failed(key)
            del self.present[key]
            for ticket in [ticket for ticket, keys in self.admitted.items() if key in keys]:
                others = tuple(other for other in self.admitted.pop(ticket) if other != key)
                self.leave(self.shelf.release(others))
        self.admit_waiting()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        self.shelf.forget(ticket)
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
            assert self.shelf.state(key) is self.present[key]

    @invariant()
    def _assert_everyone_in_use_is_present(self) -> None:
        for keys in self.admitted.values():
            assert set(keys) <= self.present.keys()

    @invariant()
    def _assert_nobody_is_overtaken_for_ever(self) -> None:
        assert all(self.overtaken[ticket] <= MAX_OVERTAKEN for ticket in self.waiting)

    @invariant()
    def _assert_who_waits_has_a_reason(self) -> None:
        """The first in line does not fit beside what is in use or loading."""
        assert list(self.waiting) == list(self.shelf.waiting)
        if self.waiting:
            wanted = next(iter(self.waiting.values()))
            busy = {
                k for k, s in self.present.items() if s is EntryState.LOADING or self.shelf.users(k)
            } - wanted.keys()
            need = sum(wanted.values()) + sum(SIZES[key.name] for key in busy)
            assert need > BUDGET


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=60, stateful_step_count=40)

A, B, C, D = (Key(name, "0") for name in "abcd")


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in EntryState for e in EntryEvent if (s, e) not in NEXT])
def test_what_the_table_does_not_allow_changes_nothing(state, event):
    """An illegal event raises (KeyError for an entry that is not there) and leaves the shelf as it was."""
    shelf: CachePolicy[int] = CachePolicy(5)
    if state is not EntryState.ABSENT:
        shelf.admit(1, {A: 1})
    if state is EntryState.READY:
        shelf.loaded(A, 1)
    provoke = {
        EntryEvent.LOADED: lambda: shelf.loaded(A, 1),
        EntryEvent.FAILED: lambda: shelf.failed(A),
        EntryEvent.EVICTED: lambda: shelf._evict([A]),
    }[event]
    with pytest.raises((ValueError, KeyError)):
        provoke()
    assert shelf.state(A) is state
    assert shelf.reserved_bytes == (0 if state is EntryState.ABSENT else 1)


def ready(shelf: CachePolicy[int], ticket: int, *keys: Key) -> None:
    """Admits a set of size 1 each and ends its loads."""
    admission = shelf.admit(ticket, dict.fromkeys(keys, 1))
    assert admission is not None
    for key in admission.to_load:
        shelf.loaded(key, 1)


def test_releasing_more_than_was_taken_raises():
    """A counting mistake is found where it happens."""
    shelf: CachePolicy[int] = CachePolicy(5)
    ready(shelf, 1, A)
    shelf.release([A])
    with pytest.raises(ValueError, match="more often"):
        shelf.release([A])
    with pytest.raises(KeyError):
        shelf.release([B])


def test_more_bytes_than_reserved_raise():
    """A file that turned out larger than announced does not slip past the budget."""
    shelf: CachePolicy[int] = CachePolicy(5)
    shelf.admit(1, {A: 2})
    with pytest.raises(ValueError, match="2 were reserved"):
        shelf.loaded(A, 3)
    assert shelf.state(A) is EntryState.LOADING


def test_sets_in_memory_overtake_a_bounded_number_of_times():
    """While one waits for room, sets that need none pass it, but not for ever."""
    shelf: CachePolicy[int] = CachePolicy(2)
    ready(shelf, 0, A)
    assert shelf.admit(1, {B: 1, C: 1}) is None
    passed = [shelf.admit(2 + i, {A: 1}) is not None for i in range(MAX_OVERTAKEN + 3)]
    assert passed == [True] * MAX_OVERTAKEN + [False] * 3


def test_a_set_that_needs_room_does_not_overtake():
    """A small set behind a large one waits, or the large one would starve."""
    shelf: CachePolicy[int] = CachePolicy(2)
    ready(shelf, 0, A)
    assert shelf.admit(1, {B: 1, C: 1}) is None
    assert shelf.admit(2, {D: 1}) is None
    shelf.release([A])
    assert [ticket for ticket, _ in shelf.admit_waiting()] == [1]


def test_outdated_entries_leave_first():
    """An idle entry whose file has changed is of no use; it leaves before older ones that are."""
    shelf: CachePolicy[int] = CachePolicy(10)
    ready(shelf, 0, B)
    ready(shelf, 1, A)
    newer = Key("a", "1")
    shelf.release([A])
    shelf.release([B])
    admission = shelf.admit(2, {newer: 1})
    assert admission == Admission(to_load=(newer,), evicted=(A,))
    assert shelf.state(B) is EntryState.READY
