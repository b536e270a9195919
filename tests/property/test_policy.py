"""Invariants of the group policy, by simulation over random arrivals."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.engine import fake_samplers, size_of
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.policy import (
    JOIN_SHARE,
    BatchLimits,
    Candidate,
    Costs,
    GroupKey,
    choose,
    overtaken_by,
)
from plait_serving.diffusion.queue.shares import TenantShares
from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.units import ImageJob, SpentSeconds, cut_into_units, heads
from plait_serving.diffusion.values import ImageRequest, LoraRef, Scheduler, Tenant

KEYS = [GroupKey((64, 64), RowKind(64 * 64), (LoraRef(name=name),) if name else ()) for name in ("", "a", "b", "c")]
COSTS = Costs(step_s=lambda key, rows: 0.01 + 0.002 * rows, switch_s=lambda key: 0.03 if key.loras else 0.0)

cost_tables = st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8)
"""Seconds of calls with 1 to 8 rows, in no order: a larger call may be the faster one."""

units = st.tuples(
    st.integers(0, 30), st.sampled_from(KEYS), st.integers(1, 6), st.integers(1, 12), st.none() | st.floats(0.0, 2.0)
)
"""Arrival, key, rows, steps, deadline."""


def simulate(arrivals, limits, table):
    """Runs the policy step by step; yields (batch, candidates before the step) until everything is done.

    With a table the policy learns its costs from the steps that run.
    """
    learned = StepCosts()
    costs = COSTS if table is None else replace(COSTS, step_s=learned.step_s)
    running: tuple[int, ...] = ()
    pending = [
        (arrival, Candidate(order=order, key=key, rows=rows, steps_left=steps, deadline_s=deadline))
        for order, (arrival, key, rows, steps, deadline) in enumerate(sorted(arrivals, key=lambda a: a[0]))
    ]
    active: dict[int, Candidate] = {}
    tick = 0
    while pending or active:
        while pending and pending[0][0] <= tick:
            unit = pending.pop(0)[1]
            active[unit.order] = unit
        candidates = list(active.values())
        batch = choose(candidates, costs=costs, limits=limits, now_s=tick * 0.02, running=running)
        yield batch, candidates
        running = tuple(unit.order for unit in batch)
        if batch and table is not None:
            rows = sum(unit.rows for unit in batch)
            learned.record(batch[0].key, rows, table[rows - 1])
        for order in overtaken_by(batch, candidates):
            active[order] = replace(active[order], overtaken=active[order].overtaken + 1)
        for unit in batch:
            if unit.steps_left == 1:
                del active[unit.order]
            else:
                active[unit.order] = replace(active[unit.order], steps_left=unit.steps_left - 1)
        tick += 1
        assert tick < 10_000, "the policy does not finish its work"


@settings(max_examples=150)
@given(st.lists(units, min_size=1, max_size=14), st.integers(0, 8), st.integers(1, 8), st.none() | cost_tables)
def test_batches_fit_and_nobody_is_overtaken_more_often_than_the_limit(arrivals, overtake_limit, largest_batch, table):
    """Every step runs at least one unit; its batch shares one key and fits unless it is one unit alone. A request never
    sees more than ``overtake_limit`` steps of later ones go first; with limit 0 the oldest takes part in every step."""
    limits = BatchLimits(largest_batch=largest_batch, overtake_limit=overtake_limit)
    for batch, candidates in simulate(arrivals, limits, table):
        assert bool(batch) == bool(candidates)
        assert len({unit.key for unit in batch}) <= 1
        assert len({unit.order for unit in batch}) == len(batch)
        assert sum(unit.rows for unit in batch) <= largest_batch or len(batch) == 1
        assert all(unit.overtaken <= overtake_limit for unit in candidates)
        assert overtake_limit or not batch or min(unit.order for unit in candidates) == batch[0].order


@given(cost_tables, st.integers(1, 8), st.frozensets(st.integers(0, 7)))
def test_no_batch_lowers_rows_per_second(table, count, running):
    """However costs grow, a batch of single images does, but for the share, what all of them in one call would do, and
    what one alone would do, whatever runs."""
    waiting = [Candidate(order=order, key=KEYS[0], rows=1, steps_left=20) for order in range(count)]
    costs = Costs(step_s=lambda key, rows: table[rows - 1], switch_s=lambda key: 0.0)
    limits = BatchLimits(largest_batch=8, overtake_limit=100)
    rows = len(choose(waiting, costs=costs, limits=limits, now_s=0.0, running=running))
    speed = (1.0 + JOIN_SHARE) * rows / table[rows - 1] * (1.0 + 1e-9)
    assert speed >= count / table[count - 1]
    assert speed >= 1 / table[0]


def test_an_urgent_deadline_goes_first_and_a_lost_one_does_not():
    """A deadline that can still be met beats fuller groups; one that is lost does not."""
    limits = BatchLimits(largest_batch=8, overtake_limit=100)
    crowd = [Candidate(order=order, key=KEYS[0], rows=1, steps_left=20) for order in range(4)]
    for deadline_s, goes_first in ((0.2, True), (0.01, False)):
        late = Candidate(order=9, key=KEYS[1], rows=1, steps_left=10, deadline_s=deadline_s)
        batch = choose([*crowd, late], costs=COSTS, limits=limits, now_s=0.0)
        assert (batch[-1].order == 9) == goes_first


tenant_units = st.tuples(st.sampled_from("abc"), st.sampled_from(KEYS), st.integers(1, 4), st.integers(1, 8))


@settings(max_examples=100)
@given(st.lists(tenant_units, min_size=1, max_size=12), st.integers(0, 4), st.integers(1, 8), st.booleans())
def test_tenants_that_wait_get_equal_time(found, overtake_limit, largest_batch, rows_are_free):
    """While all of them have work, no tenant's seconds are ahead of another's by more than a long step or two; every
    unit is done; and whose turn it is takes part. Where rows are free, the others join, and time is no measure."""
    limits = BatchLimits(largest_batch=largest_batch, overtake_limit=overtake_limit)
    costs = Costs(step_s=lambda key, rows: 0.05 if rows_are_free else 0.01 * rows, switch_s=lambda key: 0.0)
    active = {
        order: Candidate(order=order, key=key, rows=rows, steps_left=steps, tenant=tenant)
        for order, (tenant, key, rows, steps) in enumerate(found)
    }
    names = {unit.tenant for unit in active.values()}
    shares, used = TenantShares(), dict.fromkeys(names, 0.0)
    longest_s = max(costs.step_s(unit.key, max(unit.rows, largest_batch)) for unit in active.values())
    running: tuple[int, ...] = ()
    for _ in range(1000):
        if not active:
            break
        candidates = list(active.values())
        waiting = [Tenant(name=name) for name in dict.fromkeys(unit.tenant for unit in candidates)]
        turn = shares.turn(waiting).tenant
        batch = choose(candidates, costs=costs, limits=limits, now_s=0.0, running=running, turn=turn)
        running = tuple(unit.order for unit in batch)
        assert turn in {unit.tenant for unit in batch}
        assert len({unit.key for unit in batch}) == 1
        rows = sum(unit.rows for unit in batch)
        seconds = costs.step_s(batch[0].key, rows)
        for unit in batch:
            shares.charge(Tenant(name=unit.tenant), seconds * unit.rows / rows)
            used[unit.tenant] += seconds * unit.rows / rows
            active[unit.order] = replace(unit, steps_left=unit.steps_left - 1)
            if unit.steps_left == 1:
                del active[unit.order]
        if not rows_are_free and {unit.tenant for unit in active.values()} == names:
            assert max(used.values()) - min(used.values()) <= len(names) * longest_s
    assert not active


waiting_jobs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b"]),
        st.sampled_from([16, 32]),
        st.integers(1, 5),
        st.sampled_from([0, 0, 0, 1, 3]),
        st.sampled_from([False, False, False, True]),
        st.sampled_from([None, None, None, 1.0, 50.0]),
    ),
    min_size=1,
    max_size=40,
)
"""Tenant, edge, images, how often overtaken, whether it has begun, deadline."""


@settings(max_examples=200)
@given(waiting_jobs, st.integers(1, 6), cost_tables, st.booleans())
def test_what_waits_far_behind_does_not_matter(found, largest_batch, table, is_shared):
    """The units that `heads` leaves out do not change the batch, whosever turn it is."""
    jobs = [_job(order, *fields, largest_batch) for order, fields in enumerate(found)]
    limits = BatchLimits(largest_batch=largest_batch, overtake_limit=3, is_shared=is_shared)
    costs = Costs(step_s=lambda key, rows: table[min(rows, len(table)) - 1], switch_s=lambda key: 0.0)
    ready, behind = heads(jobs, largest_batch=largest_batch, overtake_limit=3)
    every = [unit for job in jobs for unit in job.units]
    assert {unit.order for unit in every} == {unit.order for unit in (*ready, *behind)}
    running = [unit.order for unit in every if unit.step]
    for turn in {job.request.tenant.name for job in jobs}:
        chosen = [
            choose([one.candidate(()) for one in of], costs=costs, limits=limits, now_s=0.0, running=running, turn=turn)
            for of in (ready, every)
        ]
        assert chosen[0] == chosen[1]


def _job(order, tenant, edge, n, overtaken, has_begun, deadline_s, largest_batch) -> ImageJob:
    asked = ImageRequest(
        request_id="r", prompt="x", width=edge, height=edge, steps=4, guidance_scale=3.0, seed=1, n=n,
        scheduler=Scheduler.DDIM, tenant=Tenant(name=tenant),
    )  # fmt: skip
    spent = SpentSeconds(accepted_at_s=0.0)
    size = size_of(asked)
    job = ImageJob(request=asked, size=size, sink=lambda event: None, spent=spent, loras=None, deadline_at_s=deadline_s)
    job.units = cut_into_units(job, largest_batch, itertools.count(10 * order))
    for unit in job.units:
        unit.overtaken = overtaken
        if has_begun:
            unit.step, unit.sampler = 1, fake_samplers(asked, [1] * unit.rows, (1, 2, 2))
    return job
