"""The hot-row cache: whatever is asked, the receiver has the rows bit for bit."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from plait_disagg.tables.cache import CachePolicy, ReceiverCache, SenderCache

ROWS, DIM = 40, 3


class Source:
    """Rows that can be refreshed, and what was fetched of them."""

    def __init__(self) -> None:
        self.rows = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
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
        assert torch.equal(self.receiver.decode(*message), self.source.rows[asked])
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
        """A new sender may go on with the receiver of before."""
        self.sender.encode(torch.tensor([1, 2]), self.source.fetch)
        self.begin()
        self.ask([])


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestCache = CacheMachine.TestCase


def test_what_was_used_last_is_kept_however_long_it_goes_on():
    """More uses than the order of uses has room for: it is rewritten, and stays what it is."""
    sender, twin, source, draw = SenderCache(rows=ROWS, dim=DIM, slots=12), Twin(12), Source(), random.Random(0)
    for _ in range(400):
        ids, source.fetched = [draw.randrange(ROWS) for _ in range(8)], []
        sender.encode(torch.tensor(ids), source.fetch)
        assert source.fetched == twin.use(ids)
