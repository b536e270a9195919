"""The policy with the costs it learns, against a fake clock and a cost function: how many go together, beside the
naive twin, which always takes the whole group as far as it fits; and which way LoRA sets act."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from statistics import mean

import pytest

from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.policy import BatchLimits, Candidate, Costs, GroupKey, choose, overtaken_by
from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.values import LoraRef, LoraSet

KEY = GroupKey((256, 256), RowKind(256 * 256), ())
LIMITS = BatchLimits(largest_batch=16, overtake_limit=64)
STEPS = 20


def linear(rows: int) -> float:
    """What SD1.5 costs on two cores: a second a row, and nothing to gain."""
    return float(rows)


def friendly(rows: int) -> float:
    """What a GPU costs: sixteen rows are four times as fast together."""
    return 0.8 + 0.2 * rows


def worse_from_four(rows: int) -> float:
    """Four rows are the best that fits the cache; beyond, every row costs twice as much."""
    return 0.5 + 0.5 * min(rows, 4) + 2.0 * max(0, rows - 4)


@dataclass
class Server:
    """Runs requests of one group to their end. It is the engine's loop without threads, and keeps what it learned."""

    cost: Callable[[int], float]
    naive: bool = False
    limits: BatchLimits = LIMITS
    costs: StepCosts = field(default_factory=StepCosts)
    now_s: float = 0.0
    batches: list[int] = field(default_factory=list)
    _next_order: int = 0
    _running: tuple[int, ...] = ()

    def serve(
        self, requests: int, *, every_s: float = 0.0, rows: int = 1, deadline_s: float | None = None
    ) -> list[float]:
        """Return the seconds from arrival to end of so many requests that arrive one every `every_s`."""
        start_s = self.now_s
        first = self._next_order
        self._next_order += requests
        arrives_s = {first + i: start_s + i * every_s for i in range(requests)}
        waiting = [
            Candidate(order=order, key=KEY, rows=rows, steps_left=STEPS, deadline_s=deadline_s) for order in arrives_s
        ]
        ended_s: dict[int, float] = {}
        while waiting:
            self.now_s = max(self.now_s, min(arrives_s[unit.order] for unit in waiting))
            here = [unit for unit in waiting if arrives_s[unit.order] <= self.now_s]
            chosen = self._choose(here)
            self._step(chosen)
            batch = {unit.order for unit in chosen}
            overtaken = overtaken_by([unit for unit in here if unit.order in batch], here)
            after = []
            for unit in waiting:
                left = unit.steps_left - (unit.order in batch)
                if left:
                    after.append(replace(unit, steps_left=left, overtaken=unit.overtaken + (unit.order in overtaken)))
                else:
                    ended_s[unit.order] = self.now_s
            waiting = after
        return [ended_s[order] - arrives_s[order] for order in arrives_s]

    def _choose(self, here: Sequence[Candidate]) -> Sequence[Candidate]:
        if self.naive:
            return here[: self.limits.largest_batch]
        costs = Costs(step_s=self.costs.step_s, switch_s=self._switch_s)
        units = self._ways(here)
        chosen = choose(units, costs=costs, limits=self.limits, now_s=self.now_s, running=self._running)
        self._running = tuple(unit.order for unit in chosen)
        return chosen

    def _ways(self, here: Sequence[Candidate]) -> Sequence[Candidate]:
        return here

    def _switch_s(self, key: GroupKey) -> float:
        return 0.0

    def _seconds(self, key: GroupKey, rows: int) -> float:
        return self.cost(rows)

    def _step(self, batch: Sequence[Candidate]) -> None:
        key, rows = batch[0].key, sum(unit.rows for unit in batch)
        seconds = self._seconds(key, rows)
        self.now_s += seconds
        self.batches.append(rows)
        self.costs.record(key, rows, seconds)


def taught(cost: Callable[[int], float], **more: bool) -> Server:
    """A server that has seen one round of sixteen requests."""
    server = Server(cost, **more)
    server.serve(16)
    server.batches.clear()
    return server


def test_where_batches_gain_nothing_requests_run_one_after_another():
    """Four at once: latency is on average 0.63 of that of one batch, images per second are equal, from the start."""
    server, twin = taught(linear), taught(linear, naive=True)
    started_s, latencies, twins = server.now_s, server.serve(4), twin.serve(4)
    assert set(server.batches) == {1}
    assert latencies == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    assert mean(latencies) / mean(twins) == pytest.approx(0.625)
    assert server.now_s - started_s == pytest.approx(max(twins), rel=0.02)
    fresh = Server(linear).serve(4)
    assert mean(fresh) / mean(twins) < 0.7
    assert max(fresh) == pytest.approx(max(twins), rel=0.02)


def test_where_batches_gain_the_largest_is_found_after_few_steps_and_kept():
    """Sizes are tried in doublings, three times each; then it is the twin's batch to the end."""
    server = Server(friendly)
    server.serve(16)
    tried = server.batches[: server.batches.index(16)]
    assert tried == sorted(tried)
    assert len(tried) <= 8 * 3
    server.batches.clear()
    latencies = server.serve(16)
    assert set(server.batches) == {16}
    assert latencies == pytest.approx(Server(friendly, naive=True).serve(16))


def test_latecomers_join_where_that_gains_and_wait_where_it_does_not():
    """One more request every third step: it joins at the next step on a GPU, and waits its turn on a busy CPU."""
    gpu, cpu = taught(friendly), taught(linear)
    gpu.serve(8, every_s=3.0)
    assert gpu.batches[:9] == [1, 1, 1, 2, 2, 2, 3, 3, 4]
    assert cpu.serve(8, every_s=3.0) == [STEPS * (i + 1) - 3.0 * i for i in range(8)]


def test_a_batch_that_lowers_rows_per_second_is_left_at_once_and_not_made_again():
    """Beyond four rows a row costs more: eight are tried, sixteen never, and then no call has more than four."""
    server = Server(worse_from_four)
    server.serve(16)
    assert max(server.batches) == 8
    assert server.batches.count(8) == 3
    server.batches.clear()
    for _ in range(5):
        server.serve(16)
    assert max(server.batches) == 4
    assert server.batches.count(4) > 0.9 * len(server.batches)


def test_noise_does_not_make_it_flap():
    """Three per cent of noise and a step in fifty that is disturbed: the size of the batch hardly ever changes."""
    rng = random.Random(0)

    def noisy(cost: Callable[[int], float]) -> Callable[[int], float]:
        return lambda rows: cost(rows) * rng.gauss(1.0, 0.03) * (3.0 if rng.random() < 0.02 else 1.0)

    for cost, size, latency in ((linear, 1, 0.6), (friendly, 16, 1.05)):
        server, twin = taught(noisy(cost)), taught(noisy(cost), naive=True)
        ours, theirs = mean(serve_rounds(server)), mean(serve_rounds(twin))
        assert server.batches.count(size) * size > 0.75 * sum(server.batches)
        changes = sum(a != b for a, b in pairwise(server.batches))
        assert changes < 0.015 * len(server.batches)
        assert ours < latency * theirs


def serve_rounds(server: Server) -> list[float]:
    """The latencies of twenty times sixteen requests."""
    return [latency for _ in range(20) for latency in server.serve(16)]


def test_a_slow_first_call_poisons_nothing():
    """Every size compiles on its first call, a hundred times as slow: the best is found all the same."""
    seen = set()

    def compiling(rows: int) -> float:
        first = rows not in seen
        seen.add(rows)
        return friendly(rows) * (100.0 if first else 1.0)

    server = Server(compiling)
    server.serve(16)
    server.batches.clear()
    server.serve(16)
    assert set(server.batches) == {16}
    assert server.costs.step_s(KEY, 1) == pytest.approx(friendly(1))


def test_it_notices_that_the_host_changed():
    """What did not pay is tried again after a thousand steps, for about a hundredth of the time, and then used."""
    server = taught(linear)
    for _ in range(10):
        server.serve(16)
    assert 0 < sum(rows > 1 for rows in server.batches) < 0.015 * len(server.batches)
    server.cost = friendly
    for _ in range(4):
        server.serve(16)
    server.batches.clear()
    server.serve(16)
    assert set(server.batches) == {16}


def test_it_notices_at_once_that_steps_became_faster():
    """Modules compiled in the background do what torch did, in half the time, and batches pay now: used within a
    request."""
    server = taught(lambda rows: 4.0 * rows)
    server.cost = friendly
    server.serve(16)
    server.batches.clear()
    server.serve(16)
    assert set(server.batches) == {16}


def test_a_decode_beside_some_steps_changes_nothing():
    """A decode makes half of the steps half as fast, ten in a row: what was learned stays."""
    server = taught(linear)
    calls = count()
    server.cost = lambda rows: linear(rows) * (2.0 if next(calls) % STEPS < 10 else 1.0)
    for _ in range(2):
        server.serve(16)
    assert set(server.batches) == {1}


def test_a_request_of_several_images_is_a_measurement_too():
    """Only requests of four images came so far: one alone is tried before it has to wait for company."""
    server = Server(friendly)
    server.serve(1, rows=4)
    assert server.costs.step_s(KEY, 4) == pytest.approx(friendly(4))
    server.batches.clear()
    server.serve(4)
    assert server.batches[:4] == [1, 1, 1, 4]


# ---- LoRA sets: merged, inputs of calls alone, or beside others ------------------------------------------------------

ROW_WISE = replace(KEY, row_wise=True)


@dataclass
class SetServer(Server):
    """Runs requests of so many sets, each request its own unless there are fewer; `cost` and `row_wise` are the seconds
    of calls that have one set and several. `needs_merge` False: an executor takes the sets as inputs."""

    row_wise: Callable[[int], float] = float
    switch_s: float = 0.0
    needs_merge: bool = True
    requests_of_a_set: int = 1
    calls: list[tuple[bool, int]] = field(default_factory=list)
    _live: LoraSet = ()

    def _ways(self, here: Sequence[Candidate]) -> Sequence[Candidate]:
        return [*map(self._own, here), *(replace(unit, key=ROW_WISE) for unit in here)]

    def _own(self, unit: Candidate) -> Candidate:
        one = (LoraRef(name=f"set {unit.order // self.requests_of_a_set}"),)
        return replace(unit, key=replace(KEY, loras=one) if self.needs_merge else replace(KEY, shared=one))

    def _switch_s(self, key: GroupKey) -> float:
        return 0.0 if key.loras == self._live else self.switch_s

    def _seconds(self, key: GroupKey, rows: int) -> float:
        return (self.row_wise if key.row_wise else self.cost)(rows)

    def _step(self, batch: Sequence[Candidate]) -> None:
        key = batch[0].key
        assert len({unit.order for unit in batch}) == len(batch)
        assert {unit.key for unit in batch} == {key}
        self.now_s += self._switch_s(key)
        self._live = key.loras
        self.calls.append((key.row_wise, len(batch)))
        super()._step(batch)


def serve_twice(sets: int, **costs: object) -> tuple[SetServer, float]:
    """A server that has learned, and what the second time took it."""
    server = SetServer(**costs)  # type: ignore[arg-type]
    server.serve(sets)
    server.calls.clear()
    return server, max(server.serve(sets))


def test_many_sets_whose_rows_are_cheap_together_are_inputs():
    """A row more costs a fifth: sixteen sets end in a fraction of what merging each takes."""
    server, taken_s = serve_twice(
        16, cost=lambda rows: 0.8 + 0.2 * rows, row_wise=lambda rows: 1.2 * (0.8 + 0.2 * rows), switch_s=0.1
    )
    assert taken_s <= 1.1 * STEPS * 1.2 * (0.8 + 0.2 * 16)
    assert (True, 16) in server.calls


def test_sets_whose_rows_cost_as_much_together_are_merged():
    """Nothing to gain by a batch, a fifth to lose by inputs, little by a merge."""
    server, taken_s = serve_twice(4, cost=float, row_wise=lambda rows: 1.2 * rows, switch_s=0.1)
    assert taken_s <= 1.05 * 4 * (STEPS + 0.1)
    assert not any(row_wise for row_wise, _ in server.calls)


def test_a_merge_that_costs_more_than_it_saves_is_not_made():
    """The same with merges as dear as ten steps: inputs, although their calls are longer."""
    server, taken_s = serve_twice(4, cost=float, row_wise=lambda rows: 1.2 * rows, switch_s=10.0)
    assert taken_s <= 1.05 * 4 * STEPS * 1.2
    assert all(row_wise for row_wise, _ in server.calls)


def test_sets_as_inputs_share_calls_only_with_their_own_where_others_make_them_longer():
    """Four sets of four requests, rows of several sets take twice as long: a call for each set, one set after the
    other, and no request waits for more than those before it."""
    server, taken_s = serve_twice(
        16, cost=lambda rows: 2.0 + rows, row_wise=lambda rows: 2.0 * (2.0 + rows), switch_s=0.0,
        needs_merge=False, requests_of_a_set=4,
    )  # fmt: skip
    assert taken_s <= 1.05 * 4 * STEPS * (2.0 + 4)
    assert server.calls == [(False, 4)] * 4 * STEPS


def test_sets_as_inputs_share_calls_with_others_where_that_is_nearly_free():
    """As at real sizes: six per cent for rows of several sets, and a call gains by rows."""
    server, taken_s = serve_twice(
        16, cost=lambda rows: 2.0 + rows, row_wise=lambda rows: 1.06 * (2.0 + rows), switch_s=0.0, needs_merge=False
    )
    assert taken_s <= 1.1 * STEPS * 1.06 * (2.0 + 16)
    assert (True, 16) in server.calls


@pytest.mark.parametrize("urgent", [False, True])
def test_whoever_must_go_goes_the_faster_way(urgent):
    """A unit with a deadline, or one that was overtaken too often: its call is chosen by the same costs."""
    limits = BatchLimits(largest_batch=16, overtake_limit=8 if urgent else 0, urgent_factor=100.0)
    server = SetServer(float, row_wise=lambda rows: 1.2 + 0.1 * rows, switch_s=50.0, limits=limits)
    server.serve(4)
    server.calls.clear()
    server.serve(4, deadline_s=server.now_s + 1e4 if urgent else None)
    assert server.calls == [(True, 4)] * STEPS
