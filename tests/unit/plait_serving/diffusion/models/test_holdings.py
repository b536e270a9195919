"""What resident models hold, by a process whose memory the test sets."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models.holdings import Holdings

MB = 1_000_000
KEPT_FREE = 500 * MB


@dataclass
class Process:
    """What it holds, what of that was freed and is kept, and what is left to all."""

    held: int = 300 * MB
    kept: int = 0
    left: int = 1 << 50

    def give_back(self) -> None:
        self.held, self.kept = self.held - self.kept, 0

    def holdings(self, budget: int) -> Holdings:
        reader = MemoryReader(held_bytes=lambda: self.held, left_bytes=lambda: self.left, give_back=self.give_back)
        return Holdings(reader, budget_bytes=budget)


def of(*weights: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(nbytes=each * MB) for each in weights]


def test_models_hold_what_the_process_grew_by_and_at_least_their_weights():
    """What it held before there was one is no model's; what is beyond the weights is shared out, and expected of the
    next one. The budget is the whole process's."""
    process = Process()
    holdings = process.holdings(4000 * MB)
    process.held += 1000 * MB
    assert holdings.all_bytes(of(20, 60)) == 80 * MB  # nobody has looked
    holdings.look()
    assert holdings.all_bytes(of(20, 60)) == 1000 * MB
    assert holdings.beyond_bytes(of(20, 60)) == 460 * MB
    assert holdings.all_bytes(of(700, 700)) == 1400 * MB
    assert holdings.beyond_bytes(of(700, 700)) == 0
    assert holdings.budget_bytes(of(20, 60)) == holdings.budget_bytes(of(700, 700)) == 3700 * MB


def test_what_is_freed_counts_until_it_is_given_back():
    """The allocator may keep it."""
    process = Process()
    holdings = process.holdings(4000 * MB)
    process.held += 1000 * MB
    process.kept = 900 * MB
    holdings.look()
    assert holdings.all_bytes(of(20)) == 1000 * MB
    holdings.give_back()
    assert holdings.all_bytes(of(20)) == 100 * MB


def test_models_may_hold_less_where_the_host_is_short_of_memory():
    """Half a gigabyte stays free of what can be allocated, whoever took the rest."""
    process = Process(left=KEPT_FREE + 300 * MB)
    holdings = process.holdings(4000 * MB)
    process.held += 2000 * MB
    holdings.look()
    assert holdings.budget_bytes(of(20)) == 2300 * MB
    assert holdings.budget_bytes(of(3000)) == 3300 * MB  # it is in memory: nobody has to make room for that
    process.left = KEPT_FREE - 300 * MB
    holdings.look()
    assert holdings.budget_bytes(of(20)) == 1700 * MB
    process.held, process.left = 300 * MB, 0
    holdings.look()
    assert holdings.budget_bytes(of(20)) == 0
