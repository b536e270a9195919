"""Merging a LoRA set, taking it as an input alone or beside others: what the policy chooses with the costs that it
learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.policy import BatchLimits, Candidate, Costs, GroupKey, choose
from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.values import LoraRef, LoraSet

MERGED = GroupKey((64, 64), RowKind(64 * 64), (LoraRef(name="a"),))
ROW_WISE = replace(MERGED, loras=(), row_wise=True)
STEPS = 20


@dataclass
class Server:
    """Runs requests of so many sets, each request its own unless there are fewer; `merged` and `row_wise` are the true
    seconds of calls. `needs_merge` False: an executor takes the sets as inputs."""

    merged: Callable[[int], float]
    row_wise: Callable[[int], float]
    switch_s: float
    needs_merge: bool = True
    requests_of_a_set: int = 1
    limits: BatchLimits = field(default_factory=lambda: BatchLimits(largest_batch=16, overtake_limit=64))
    costs: StepCosts = field(default_factory=StepCosts)
    now_s: float = 0.0
    calls: list[tuple[bool, int]] = field(default_factory=list)
    _live: LoraSet = ()

    def serve(self, sets: int, *, deadline_s: float | None = None) -> float:
        """Return the seconds until all are done."""
        start_s = self.now_s
        left = dict.fromkeys(range(sets), STEPS)
        running: tuple[int, ...] = ()
        while left:
            ways = (False, True)
            units = [self._candidate(order, steps, way, deadline_s) for way in ways for order, steps in left.items()]
            known = Costs(step_s=self.costs.step_s, switch_s=self._switch_s)
            batch = choose(units, costs=known, limits=self.limits, now_s=self.now_s, running=running)
            running = self._run(batch)
            for order in running:
                left[order] -= 1
                if not left[order]:
                    del left[order]
        return self.now_s - start_s

    def _switch_s(self, key: GroupKey) -> float:
        return 0.0 if key.loras == self._live else self.switch_s

    def _candidate(self, order: int, steps: int, row_wise: bool, deadline_s: float | None) -> Candidate:
        one = (LoraRef(name=f"set {order // self.requests_of_a_set}"),)
        own = replace(MERGED, loras=one) if self.needs_merge else replace(MERGED, loras=(), shared=one)
        key = ROW_WISE if row_wise else own
        return Candidate(order=order, key=key, rows=1, steps_left=steps, deadline_s=deadline_s)

    def _run(self, batch: tuple[Candidate, ...]) -> tuple[int, ...]:
        assert len({unit.order for unit in batch}) == len(batch)
        key = batch[0].key
        assert {unit.key for unit in batch} == {key}
        if key.loras != self._live:
            self.now_s += self.switch_s
            self._live = key.loras
        taken_s = (self.row_wise if key.row_wise else self.merged)(len(batch))
        self.now_s += taken_s
        self.costs.record(key, len(batch), taken_s)
        self.calls.append((key.row_wise, len(batch)))
        return tuple(unit.order for unit in batch)


def serve_twice(sets: int, **costs: object) -> tuple[Server, float]:
    """A server that has learned, and what the second time took it."""
    server = Server(**costs)  # type: ignore[arg-type]
    server.serve(sets)
    server.calls.clear()
    return server, server.serve(sets)


def test_many_sets_whose_rows_are_cheap_together_are_inputs():
    """A row more costs a fifth: sixteen sets end in a fraction of what merging each takes."""
    server, taken_s = serve_twice(
        16, merged=lambda rows: 0.8 + 0.2 * rows, row_wise=lambda rows: 1.2 * (0.8 + 0.2 * rows), switch_s=0.1
    )
    assert taken_s <= 1.1 * STEPS * 1.2 * (0.8 + 0.2 * 16)
    assert (True, 16) in server.calls


def test_sets_whose_rows_cost_as_much_together_are_merged():
    """Nothing to gain by a batch, a fifth to lose by inputs, little by a merge."""
    server, taken_s = serve_twice(4, merged=float, row_wise=lambda rows: 1.2 * rows, switch_s=0.1)
    assert taken_s <= 1.05 * 4 * (STEPS + 0.1)
    assert not any(row_wise for row_wise, _ in server.calls)


def test_a_merge_that_costs_more_than_it_saves_is_not_made():
    """The same with merges as dear as ten steps: inputs, although their calls are longer."""
    server, taken_s = serve_twice(4, merged=float, row_wise=lambda rows: 1.2 * rows, switch_s=10.0)
    assert taken_s <= 1.05 * 4 * STEPS * 1.2
    assert all(row_wise for row_wise, _ in server.calls)


def test_sets_as_inputs_share_calls_only_with_their_own_where_others_make_them_longer():
    """Four sets of four requests, rows of several sets take twice as long: a call for each set, one set after the
    other, and no request waits for more than those before it."""
    server, taken_s = serve_twice(
        16, merged=lambda rows: 2.0 + rows, row_wise=lambda rows: 2.0 * (2.0 + rows), switch_s=0.0,
        needs_merge=False, requests_of_a_set=4,
    )  # fmt: skip
    assert taken_s <= 1.05 * 4 * STEPS * (2.0 + 4)
    assert server.calls == [(False, 4)] * 4 * STEPS


def test_sets_as_inputs_share_calls_with_others_where_that_is_nearly_free():
    """As at real sizes: six per cent for rows of several sets, and a call gains by rows."""
    server, taken_s = serve_twice(
        16, merged=lambda rows: 2.0 + rows, row_wise=lambda rows: 1.06 * (2.0 + rows), switch_s=0.0, needs_merge=False
    )
    assert taken_s <= 1.1 * STEPS * 1.06 * (2.0 + 16)
    assert (True, 16) in server.calls


@pytest.mark.parametrize("urgent", [False, True])
def test_whoever_must_go_goes_the_faster_way(urgent):
    """A unit with a deadline, or one that was overtaken too often: its call is chosen by the same costs."""
    limits = BatchLimits(largest_batch=16, overtake_limit=8 if urgent else 0, urgent_factor=100.0)
    server = Server(float, lambda rows: 1.2 + 0.1 * rows, 50.0, limits=limits)
    server.serve(4)
    server.calls.clear()
    server.serve(4, deadline_s=server.now_s + 1e4 if urgent else None)
    assert server.calls == [(True, 4)] * STEPS


def test_a_way_that_is_not_known_is_hoped_to_be_somewhat_faster():
    """So it is tried, until three calls say what it takes; merging is tried first."""
    costs = StepCosts()
    assert costs.step_s(ROW_WISE, 2) > costs.step_s(MERGED, 2) == pytest.approx(0.1)
    for _ in range(3):
        costs.record(MERGED, 1, 1.0)
    assert costs.step_s(ROW_WISE, 1) == pytest.approx(0.8)
    assert costs.shortest_s(ROW_WISE, 1) == 1.0
    for _ in range(3):
        assert costs.step_s(ROW_WISE, 1) == pytest.approx(0.8)
        costs.record(ROW_WISE, 1, 1.3)
    assert costs.step_s(ROW_WISE, 1) == 1.3
    assert costs.step_s(MERGED, 1) == 1.0
