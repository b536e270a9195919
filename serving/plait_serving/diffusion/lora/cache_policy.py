"""Which LoRA files are in host memory: the pure policy of the cache. No threads, no clock, no files.

It holds entries within a byte budget. Sets are admitted whole (all the room they need is reserved at once, so two
sets cannot wait for each other) and in order; a set that is already in memory may overtake waiting ones, but none is
overtaken more than `MAX_OVERTAKEN` times. Entries in use are never evicted; the others are evicted in order of last
use, those whose file has changed first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Generic, TypeVar

MAX_OVERTAKEN = 8

T = TypeVar("T", bound=Hashable)
"""The key of a waiting set."""


class EntryState(Enum):
    """The state of an entry."""

    ABSENT = auto()
    LOADING = auto()
    READY = auto()


class EntryEvent(Enum):
    """What happens to an entry."""

    WANTED = auto()
    LOADED = auto()
    FAILED = auto()
    EVICTED = auto()


NEXT: Mapping[tuple[EntryState, EntryEvent], EntryState] = MappingProxyType(
    {
        (EntryState.ABSENT, EntryEvent.WANTED): EntryState.LOADING,
        (EntryState.LOADING, EntryEvent.WANTED): EntryState.LOADING,
        (EntryState.READY, EntryEvent.WANTED): EntryState.READY,
        (EntryState.LOADING, EntryEvent.LOADED): EntryState.READY,
        (EntryState.LOADING, EntryEvent.FAILED): EntryState.ABSENT,
        (EntryState.READY, EntryEvent.EVICTED): EntryState.ABSENT,
    }
)
"""The allowed transitions; everything else raises ValueError and changes nothing."""


@dataclass(frozen=True, slots=True)
class Key:
    """One version of the content of one name."""

    name: str
    stamp: str


@dataclass(slots=True)
class _CacheEntry:
    state: EntryState
    nbytes: int
    users: int = 0
    last_use: int = 0
    outdated: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """The result of admitting a set: keys to load now, keys that were evicted."""

    to_load: tuple[Key, ...]
    evicted: tuple[Key, ...]


@dataclass(slots=True)
class _Waiter:
    wanted: Mapping[Key, int]
    overtaken: int = 0


class CachePolicy(Generic[T]):
    """The policy that the module docstring describes. `wanted` maps keys to the bytes that they will take."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._entries: dict[Key, _CacheEntry] = {}
        self._waiters: dict[T, _Waiter] = {}
        self._uses = 0

    @property
    def reserved_bytes(self) -> int:
        """The bytes of everything that is loaded or loading."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def waiting(self) -> tuple[T, ...]:
        """The tickets of sets that have not been admitted yet, in order."""
        return tuple(self._waiters)

    def state(self, key: Key) -> EntryState:
        """Return the state of an entry."""
        entry = self._entries.get(key)
        return entry.state if entry else EntryState.ABSENT

    def users(self, key: Key) -> int:
        """Return the number of admitted sets that hold an entry."""
        entry = self._entries.get(key)
        return entry.users if entry else 0

    def fits_ever(self, wanted: Mapping[Key, int]) -> bool:
        """Return whether a set fits an empty cache."""
        return sum(wanted.values()) <= self.budget_bytes

    def admit(self, ticket: T, wanted: Mapping[Key, int]) -> Admission | None:
        """Admit a set, or let it wait under `ticket` and return None (see `admit_waiting`)."""
        overtakes = all(waiter.overtaken < MAX_OVERTAKEN for waiter in self._waiters.values())
        is_here = all(key in self._entries for key in wanted)
        if not self._waiters or (is_here and overtakes):
            admission = self._try(wanted)
            if admission is not None:
                for waiter in self._waiters.values():
                    waiter.overtaken += 1
                return admission
        self._waiters[ticket] = _Waiter(wanted)
        return None

    def admit_waiting(self) -> list[tuple[T, Admission]]:
        """Admit waiting sets, in order, as far as there is room. Call this after anything was released or freed."""
        admitted = []
        for ticket, waiter in list(self._waiters.items()):
            admission = self._try(waiter.wanted)
            if admission is None:
                break
            del self._waiters[ticket]
            admitted.append((ticket, admission))
        return admitted

    def wanted(self, ticket: T) -> Mapping[Key, int]:
        """Return what a waiting set needs."""
        return self._waiters[ticket].wanted

    def forget(self, ticket: T) -> None:
        """Withdraw a waiting set. Unknown tickets are ignored."""
        self._waiters.pop(ticket, None)

    def loaded(self, key: Key, nbytes: int) -> tuple[Key, ...]:
        """Record that a load ended; `nbytes` is its actual size, at most what was reserved. Return the evicted keys."""
        if nbytes > self._entries[key].nbytes:
            raise ValueError(f"{key} takes {nbytes} bytes, {self._entries[key].nbytes} were reserved")
        self._step(key, EntryEvent.LOADED).nbytes = nbytes
        return self._make_room(0, keep=()) or ()

    def failed(self, key: Key) -> None:
        """Record that a load failed; nothing of it is kept. Sets that waited for it must release their other keys, not
        this one."""
        self._step(key, EntryEvent.FAILED)
        del self._entries[key]

    def release(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        """Release an admitted set's entries. Return the evicted keys: outdated entries, and those over the budget."""
        for key in keys:
            entry = self._entries[key]
            if entry.users < 1:
                raise ValueError(f"{key} was released more often than it was taken")
            entry.users -= 1
        return self._make_room(0, keep=()) or ()

    def resize(self, budget_bytes: int) -> tuple[Key, ...]:
        """Set a new budget; idle entries are evicted until it is met. Entries in use stay and may exceed it until
        released."""
        self.budget_bytes = budget_bytes
        return self._make_room(0, keep=()) or ()

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _try(self, wanted: Mapping[Key, int]) -> Admission | None:
        missing = tuple(key for key in wanted if key not in self._entries)
        self._outdate(wanted)
        evicted = self._make_room(sum(wanted[key] for key in missing), keep=wanted)
        if evicted is None:
            return None
        for key in wanted:
            state = NEXT[self.state(key), EntryEvent.WANTED]
            entry = self._entries.setdefault(key, _CacheEntry(state=state, nbytes=wanted[key]))
            self._uses += 1
            entry.users += 1
            entry.last_use = self._uses
        return Admission(to_load=missing, evicted=evicted)

    def _outdate(self, wanted: Mapping[Key, int]) -> None:
        """Mark other contents of the wanted names as outdated: whoever asks for a different content has seen the
        newest."""
        stamps = {key.name: key.stamp for key in wanted}
        for key, entry in self._entries.items():
            entry.outdated = entry.outdated or stamps.get(key.name, key.stamp) != key.stamp
        for key in wanted:
            if key in self._entries:
                self._entries[key].outdated = False

    def _make_room(self, more_bytes: int, keep: Iterable[Key]) -> tuple[Key, ...] | None:
        """Evict idle entries until `more_bytes` fit; return None, with nothing evicted, if they cannot."""
        excess = self.reserved_bytes + more_bytes - self.budget_bytes
        kept = frozenset(keep)
        idle = [(key, entry) for key, entry in self._idle() if key not in kept]
        leaving: list[Key] = []
        for key, entry in sorted(idle, key=lambda item: (not item[1].outdated, item[1].last_use)):
            if excess <= 0 and not entry.outdated:
                break
            leaving.append(key)
            excess -= entry.nbytes
        if excess > 0 and more_bytes:
            return None
        return self._evict(leaving)

    def _idle(self) -> list[tuple[Key, _CacheEntry]]:
        return [(k, e) for k, e in self._entries.items() if e.state is EntryState.READY and not e.users]

    def _evict(self, keys: Iterable[Key]) -> tuple[Key, ...]:
        leaving = tuple(keys)
        for key in leaving:
            self._step(key, EntryEvent.EVICTED)
            del self._entries[key]
        return leaving

    def _step(self, key: Key, event: EntryEvent) -> _CacheEntry:
        state = NEXT.get((self.state(key), event))
        if state is None:
            raise ValueError(f"{key} is {self.state(key).name}; it cannot be {event.name}")
        entry = self._entries[key]
        entry.state = state
        return entry
