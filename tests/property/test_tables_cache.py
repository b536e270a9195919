"""The hot-row cache: whatever is asked, the receiver has the rows bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from plait_disagg.tables.cache import CacheCounters, CachedRows, CachePolicy, OutOfStep, ReceiverCache, SenderCache

ROWS, DIM = 40, 3


class Source:
    """Rows that can be refreshed, and what was fetched of them."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = torch.arange(rows * DIM, dtype=torch.float32).view(rows, DIM)
        self.fetched: list[int] = []

    def fetch(self, ids: torch.Tensor) -> torch.Tensor:
        self.fetched = ids.tolist()
        return self.rows[ids]


class Twin:
    """Which ids are kept, the slow way: one at a time in the order of first use."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.kept: OrderedDict[int, None] = OrderedDict()

    def fill(self, ids: Sequence[int]) -> list[int]:
        """As `use`, but nothing that is kept ever goes."""
        absent = [one for one in dict.fromkeys(ids) if one not in self.kept]
        self.kept.update(dict.fromkeys(absent[: self.slots - len(self.kept)]))
        return absent

    def use(self, ids: Sequence[int]) -> list[int]:
        """The ids that were not kept."""
        distinct = list(dict.fromkeys(ids))
        absent = [one for one in distinct if one not in self.kept]
        held = [one for one in distinct if one in self.kept]
        for one in held:
            self.kept.move_to_end(one)
        for one in absent[: self.slots - len(held)]:
            if len(self.kept) == self.slots:
                self.kept.popitem(last=False)
            self.kept[one] = None
        return absent


class CacheMachine(RuleBasedStateMachine):
    """Drives a pair through requests, refreshes and new senders."""

    @initialize(slots=st.integers(1, 12), policy=st.sampled_from(("lru", "static")))
    def start(self, slots: int, policy: CachePolicy) -> None:
        self.source = Source()
        self.receiver = ReceiverCache(slots=slots, dim=DIM)
        self.policy, self.slots = policy, slots
        self.begin()

    def begin(self) -> None:
        self.sender = SenderCache(rows=ROWS, dim=DIM, slots=self.slots, policy=self.policy)
        self.twin = Twin(self.slots)
        self.changed: set[int] = set()

    @rule(ids=st.lists(st.integers(0, ROWS - 1), max_size=25))
    def ask(self, ids: list[int]) -> None:
        asked = torch.tensor(ids, dtype=torch.int64)
        self.source.fetched = []
        message = self.sender.encode(asked, self.source.fetch)
        assert torch.equal(self.receiver.decode(message), self.source.rows[asked])
        kept = set(self.twin.kept)
        absent = self.twin.use(ids) if self.policy == "lru" else self.twin.fill(ids)
        refreshed = [one for one in dict.fromkeys(ids) if one in self.changed & kept]
        assert self.source.fetched == refreshed + absent, "each row once, and no row that the receiver has"
        self.changed -= set(ids)

    @rule(ids=st.lists(st.integers(0, ROWS - 1), max_size=5))
    def refresh(self, ids: list[int]) -> None:
        self.source.rows = self.source.rows.clone()
        self.source.rows[ids] += 1000
        self.sender.invalidate(torch.tensor(ids, dtype=torch.int64))
        self.changed |= set(ids) & set(self.twin.kept)

    @rule(bad=st.sampled_from((-1, ROWS, 2**62)))
    def ask_for_what_is_not_there(self, bad: int) -> None:
        with pytest.raises(ValueError, match="outside"):
            self.sender.encode(torch.tensor([0, bad]), self.source.fetch)

    @rule(ids=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5))
    def fail_to_fetch(self, ids: list[int]) -> None:
        """Nothing may have changed after it, which the asks that follow would notice."""
        if set(ids) <= set(self.twin.kept) - self.changed:
            return

        def fail(_: torch.Tensor) -> torch.Tensor:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            self.sender.encode(torch.tensor(ids), fail)

    @rule()
    def lose_a_message(self) -> None:
        self.sender.encode(torch.tensor([1, 2]), self.source.fetch)
        late = self.sender.encode(torch.tensor([3]), self.source.fetch)
        with pytest.raises(OutOfStep):
            self.receiver.decode(late)
        self.begin()
        self.ask([])

    @invariant()
    def counters_add_up(self) -> None:
        if hasattr(self, "sender"):
            counters = self.sender.counters
            assert min(counters.hits, counters.repeats, counters.evicted, counters.passed) >= 0
            assert counters.hits + counters.repeats <= counters.ids


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestCache = CacheMachine.TestCase


def zipf_ids(alpha: float, count: int, rows: int, seed: int = 0) -> torch.Tensor:
    """Ids drawn by Zipf's law; id 0 is the hottest."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -alpha
    cumulative = np.cumsum(weights / weights.sum())
    draws = np.random.default_rng(seed).random(count)
    return torch.from_numpy(np.minimum(cumulative.searchsorted(draws), rows - 1))


def served(policy: CachePolicy, alpha: float, slots: int, rows: int = 100_000) -> SenderCache:
    """A cache after 200 requests of 1,000 Zipf ids, which held the hottest before."""
    sender = SenderCache(rows=rows, dim=1, slots=slots, policy=policy)
    receiver = ReceiverCache(slots=slots, dim=1)
    values = torch.arange(rows, dtype=torch.float32).unsqueeze(1)
    receiver.decode(sender.encode(torch.arange(slots), values.__getitem__))
    sender.counters = CacheCounters()
    for ids in zipf_ids(alpha, 200_000, rows).split(1000):
        assert torch.equal(receiver.decode(sender.encode(ids, values.__getitem__)), values[ids])
    return sender


def hit_rate(sender: SenderCache) -> float:
    """Share of the ids that were in a slot already."""
    return sender.counters.hits / sender.counters.ids


@pytest.mark.parametrize("alpha", [0.9, 1.0, 1.2])
def test_static_hit_rate_is_the_share_of_the_hottest(alpha: float):
    """Keeping the hottest 10 % serves their share of Zipf accesses (200,000 draws: 0.5 % is 4 sigma or more)."""
    rows, slots = 100_000, 10_000
    weights = np.arange(1, rows + 1) ** -alpha
    share = weights[:slots].sum() / weights.sum()
    assert hit_rate(served("static", alpha, slots)) == pytest.approx(share, abs=0.005)


def test_lru_beats_nothing_and_not_the_best():
    """LRU serves less than the hottest rows' share and more than two thirds of it."""
    static, lru = (hit_rate(served(policy, 1.0, 10_000)) for policy in ("static", "lru"))
    assert static * 2 / 3 < lru < static


def test_lru_follows_a_change_of_taste():
    """When other ids become hot, LRU serves them after a while; static never does."""
    rates = {}
    for policy in ("static", "lru"):
        sender = SenderCache(rows=2000, dim=1, slots=100, policy=policy)
        values = torch.zeros(2000, 1)
        sender.encode(torch.arange(100), values.__getitem__)
        sender.counters = CacheCounters()
        for _ in range(20):
            sender.encode(torch.arange(1000, 1100), values.__getitem__)
        rates[policy] = hit_rate(sender)
    assert rates == {"static": 0.0, "lru": 0.95}


def test_a_repeated_id_is_sent_once_and_hits_cost_four_bytes():
    """1,000 times the same id is one row and 1,000 slot numbers; the next time no row at all."""
    sender = SenderCache(rows=10, dim=DIM, slots=2)
    source = Source(10)
    ids = torch.full((1000,), 7)
    first, second = sender.encode(ids, source.fetch), sender.encode(ids, source.fetch)
    sizes = [[one.slots.nbytes, one.new_slots.nbytes, one.rows.nbytes] for one in (first, second)]
    assert sizes == [[4000, 4, 4 * DIM], [4000, 0, 0]]
    assert (sender.counters.repeats, sender.counters.hits) == (999, 1000)


def test_same_requests_same_messages():
    """The messages are a function of the requests: two senders make the same bits."""

    def run() -> list[CachedRows]:
        sender = SenderCache(rows=1000, dim=1, slots=50)
        values = torch.arange(1000.0).unsqueeze(1)
        return [sender.encode(ids, values.__getitem__) for ids in zipf_ids(1.0, 5000, 1000).split(100)]

    for one, other in zip(run(), run(), strict=True):
        assert torch.equal(one.slots, other.slots)
        assert torch.equal(one.new_slots, other.new_slots)
        assert torch.equal(one.rows, other.rows)


GOOD = CachedRows(
    number=0,
    slots=torch.zeros(1, dtype=torch.int32),
    new_slots=torch.zeros(1, dtype=torch.int32),
    rows=torch.zeros(1, DIM),
)


@pytest.mark.parametrize(
    "fault",
    [
        {"slots": torch.tensor([2], dtype=torch.int32)},
        {"slots": torch.tensor([-1], dtype=torch.int32)},
        {"slots": torch.tensor([0])},
        {"slots": torch.zeros((1, 1), dtype=torch.int32)},
        {"new_slots": torch.tensor([2], dtype=torch.int32)},
        {"new_slots": torch.zeros(2, dtype=torch.int32)},
        {"rows": torch.zeros(1, DIM + 1)},
        {"rows": torch.zeros(1, DIM, dtype=torch.float16)},
    ],
)
def test_the_receiver_refuses_what_no_sender_makes(fault: dict[str, torch.Tensor]):
    """Slots out of range, missing rows, other widths and dtypes are refused; the receiver stays usable."""
    receiver = ReceiverCache(slots=2, dim=DIM)
    message = CachedRows(**{field: getattr(GOOD, field) for field in GOOD.__slots__} | fault)
    with pytest.raises(ValueError, match=r"slot|rows"):
        receiver.decode(message)
    assert receiver.decode(GOOD).shape == (1, DIM)


@pytest.mark.parametrize(("slots", "policy"), [(0, "lru"), (1, "mru")])
def test_an_impossible_cache_is_refused(slots: int, policy: CachePolicy):
    """No slots, or a policy that does not exist."""
    with pytest.raises(ValueError, match="at least one slot and policy"):
        SenderCache(rows=3, dim=1, slots=slots, policy=policy)
