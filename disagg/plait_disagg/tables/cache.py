"""Hot rows near the dense side, managed by the sender.

When raw rows cross (a sequence model reads them one by one), the same hot rows cross again and again. The dense side
keeps a matrix of slots; the sparse side keeps the directory (which id is in which slot) and sends slot numbers, plus
the rows of slots that are new. So there is no extra round trip, a hit costs 4 bytes, and the receiver knows nothing
of ids or policies::

    sender:   message = cache.encode(ids, fetch)     slots (n,), new_slots (m,), rows (m + p, D)
    receiver: rows = cache.decode(*message)          (n, D), bit for bit fetch(ids)

The first m rows go into their slots. The other p rows only pass through: they are addressed as slots S, S + 1, ...
and dropped. Rows pass through when the policy does not keep them, or when one message has more distinct ids than
there are slots.

Policies: `static` keeps for good what is requested first, while there is room; `lru` keeps what was requested last.
Recency counts in messages; within one message the order is that of first use. One pair serves one ordered channel,
until a message is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

CachePolicy = Literal["static", "lru"]

Fetch = Callable[[torch.Tensor], torch.Tensor]
"""Returns the rows of distinct ids: (k,) int64 to (k, D)."""

Ids = NDArray[np.int64]
Number = TypeVar("Number", np.int32, np.int64)


@dataclass(slots=True, kw_only=True)
class CacheCounters:
    """Counters of caches.

    `ids` requested, repeats included; `hits` among them that were in a slot before their message; `stored` and
    `passed`: rows sent; `evicted`: slots taken from another id.
    """

    ids: int = 0
    hits: int = 0
    stored: int = 0
    passed: int = 0
    evicted: int = 0


class SenderCache:
    """The directory, on the side that has the rows: for one receiver, and until a message was not sent or is missed.

    Ids are `0 .. rows - 1`; needs 4 bytes for each id that was ever kept.
    """

    def __init__(
        self, *, rows: int, dim: int, slots: int, policy: CachePolicy = "lru", counters: CacheCounters | None = None
    ) -> None:
        """`counters`: those of several caches."""
        self._rows, self._dim, self._slots, self._policy = rows, dim, slots, policy
        self._counters = counters or CacheCounters()
        # Zeros are not touched until used, so that a large id space costs memory only where it is hot.
        self._slot_of = np.zeros(self._rows, dtype=np.int32)  # slot + 1, or 0
        self._id_in = np.full(self._slots, -1, dtype=np.int64)
        self._is_stale = np.zeros(self._slots, dtype=bool)
        self._recency = _Recency(self._slots)
        self._used = 0

    def encode(self, ids: torch.Tensor, fetch: Fetch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the message for `ids` (n,) int64: slots (n,) and new slots (m,), int32, and rows (m + p, D) float32.
        `fetch` is called at most once, with the ids whose rows must be sent.

        Raises ValueError for an id out of range; then, or if `fetch` raises, nothing has changed.
        """
        wanted_ids = ids.numpy()
        self._check(wanted_ids)
        slots = self._slot_of[wanted_ids] - 1
        is_hit = slots >= 0
        is_hit[is_hit] = ~self._is_stale[slots[is_hit]]
        stale, absent = self._to_send(wanted_ids, slots, is_hit)
        held = _distinct(slots[slots >= 0]) if self._policy == "lru" else slots[:0]
        kept = absent[: self._room(held)]
        sent = np.concatenate([stale, absent])
        rows = self._fetched(sent, fetch)

        self._recency.touch(held)
        new_slots = self._store(kept, self._take_slots(kept.size))
        self._recency.touch(new_slots)
        refreshed = self._slot_of[stale] - 1
        self._is_stale[refreshed] = False
        slots = self._slot_of[wanted_ids] - 1
        slots[slots < 0] = self._slots + _positions(absent[kept.size :], wanted_ids[slots < 0])
        counters = self._counters
        counters.ids += wanted_ids.size
        counters.hits += int(is_hit.sum())
        counters.stored += stale.size + kept.size
        counters.passed += absent.size - kept.size
        return torch.from_numpy(slots), torch.from_numpy(np.concatenate([refreshed, new_slots])), rows

    def invalidate(self, ids: torch.Tensor) -> None:
        """Mark the rows of these ids as changed: each is sent again, into its slot, when it is next requested."""
        changed = ids.numpy()
        self._check(changed)
        slots = self._slot_of[changed] - 1
        self._is_stale[slots[slots >= 0]] = True

    def _fetched(self, ids: Ids, fetch: Fetch) -> torch.Tensor:
        if not ids.size:
            return torch.empty((0, self._dim))
        rows = fetch(torch.from_numpy(ids))
        if rows.shape != (ids.size, self._dim) or rows.dtype != torch.float32:
            raise ValueError(f"fetch gave {tuple(rows.shape)} {rows.dtype} for {ids.size} rows of {self._dim} float32")
        return rows

    def _check(self, ids: Ids) -> None:
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= self._rows):
            raise ValueError(f"an id is outside 0..{self._rows - 1}")

    def _to_send(self, wanted_ids: Ids, slots: NDArray[np.int32], is_hit: NDArray[np.bool_]) -> tuple[Ids, Ids]:
        """Return the distinct ids to send, in the order of first use: those whose slot is stale, those that have no
        slot."""
        if is_hit.all():
            return wanted_ids[:0], wanted_ids[:0]
        return _distinct(wanted_ids[~is_hit & (slots >= 0)]), _distinct(wanted_ids[slots < 0])

    def _room(self, held: NDArray[np.int32]) -> int:
        """Return how many new ids fit into slots that this message does not use (`lru`) or into unused slots."""
        return self._slots - (held.size if self._policy == "lru" else self._used)

    def _take_slots(self, count: int) -> NDArray[np.int32]:
        """Return slots for new ids: unused ones, then the least recently used."""
        fresh = min(count, self._slots - self._used)
        slots = np.arange(self._used, self._used + fresh, dtype=np.int32)
        self._used += fresh
        if fresh == count:
            return slots
        taken = self._recency.oldest(count - fresh)
        self._slot_of[self._id_in[taken]] = 0
        self._counters.evicted += taken.size
        return np.concatenate([slots, taken])

    def _store(self, ids: Ids, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        self._slot_of[ids] = slots + 1
        self._id_in[slots] = ids
        self._is_stale[slots] = False
        return slots


class ReceiverCache:
    """The slots, on the side that reads rows."""

    def __init__(self, *, slots: int, dim: int) -> None:
        self._slots = slots
        self._rows = torch.zeros((slots, dim))

    def decode(self, slots: torch.Tensor, new_slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows (n, D) of the ids that the message was made for. Raises ValueError for other numbers of rows
        and slots than a sender makes; dtypes and dimensions are as `encode` says."""
        stored = new_slots.numel()
        passing = rows.shape[0] - stored
        if passing < 0:
            raise ValueError(f"{rows.shape[0]} rows for {stored} new slots")
        for some, limit in ((slots, self._slots + passing), (new_slots, self._slots)):
            if some.numel() and (int(some.min()) < 0 or int(some.max()) >= limit):
                raise ValueError(f"a slot is outside 0..{limit - 1}")
        if self._rows.shape[0] < self._slots + passing:
            # Room for rows that pass, behind the slots, so that one gather finds both.
            grown = self._rows.new_zeros((self._slots + 2 * passing, self._rows.shape[1]))
            grown[: self._slots] = self._rows[: self._slots]
            self._rows = grown
        self._rows.index_copy_(0, new_slots.to(torch.int64), rows[:stored])
        self._rows[self._slots : self._slots + passing] = rows[stored:]
        return self._rows.index_select(0, slots)


class _Recency:
    """Exact least-recently-used order of slots, at a constant cost per use.

    A log of uses, oldest first; an entry counts only while it is its slot's latest. Taking the oldest reads the log
    from its start; it is rewritten when it has grown to several times the slots.
    """

    def __init__(self, slots: int) -> None:
        self._latest = np.full(slots, -1, dtype=np.int64)  # where in the log the slot's latest use is
        self._log = np.empty(max(1024, 4 * slots), dtype=np.int32)  # what is live and one more message fit
        self._start = self._end = 0

    def touch(self, slots: NDArray[np.int32]) -> None:
        """Record that these distinct slots were used now, in this order."""
        if self._end + slots.size > self._log.size:
            self._compact()
        self._log[self._end : self._end + slots.size] = slots
        self._latest[slots] = np.arange(self._end, self._end + slots.size)
        self._end += slots.size

    def oldest(self, count: int) -> NDArray[np.int32]:
        """Remove and return the `count` slots used longest ago. There must be that many."""
        found: list[NDArray[np.int32]] = []
        while count:
            stop = min(self._end, self._start + max(64, 2 * count))
            assert stop > self._start
            entries = self._log[self._start : stop]
            positions = np.flatnonzero(self._latest[entries] == np.arange(self._start, stop))[:count]
            found.append(entries[positions].copy())
            self._start = self._start + int(positions[-1]) + 1 if positions.size == count else stop
            count -= positions.size
        taken = np.concatenate(found)
        self._latest[taken] = -1
        return taken

    def _compact(self) -> None:
        entries = self._log[self._start : self._end]
        live = entries[self._latest[entries] == np.arange(self._start, self._end)]
        self._log[: live.size] = live
        self._latest[live] = np.arange(live.size)
        self._start, self._end = 0, live.size


def _distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Return each value once, in the order of first use."""
    _, first = np.unique(values, return_index=True)
    once: NDArray[Number] = values[np.sort(first)]
    return once


def _positions(values: Ids, wanted: Ids) -> NDArray[np.int32]:
    """Return the positions in `values` (distinct) of each of `wanted`; all are there."""
    order = np.argsort(values)
    return order[np.searchsorted(values, wanted, sorter=order)].astype(np.int32)
