"""Fair shares of compute between tenants, how much may wait, and what work is expected to take. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from fakes.engine import size_of
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.forecast import WorkForecast
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.queue.shares import TenantShares
from plait_serving.diffusion.request_registry import wait_s
from plait_serving.diffusion.values import Edit, Tenant
from support.engine import request

A, B, HEAVY = Tenant(name="a"), Tenant(name="b"), Tenant(name="heavy", weight=3.0)


def run(shares, waiting, seconds, *, turns, slack_s=0.0, credit_s=0.0):
    """The names of the tenants whose turn it was; `seconds` of each turn."""
    names = []
    tenants = {tenant.name: tenant for tenant in waiting}
    for _ in range(turns):
        name = shares.turn(waiting, slack_s=slack_s, credit_s=credit_s).tenant
        shares.charge(tenants[name], seconds[name])
        names.append(name)
    return names


def test_shares_follow_the_weights():
    """Three times the weight is three times the time."""
    names = run(TenantShares(), [A, HEAVY], {"a": 1.0, "heavy": 1.0}, turns=80)
    assert names.count("heavy") == pytest.approx(60, abs=1)


def test_who_comes_back_has_saved_up_nothing():
    """A tenant that was away for an hour shares from now on, and does not take the next hour."""
    shares = TenantShares()
    run(shares, [A, B], {"a": 1.0, "b": 1.0}, turns=10)
    run(shares, [A], {"a": 1.0}, turns=3600)
    names = run(shares, [A, B], {"a": 1.0, "b": 1.0}, turns=20)
    assert names.count("b") == pytest.approx(10, abs=1)


def test_the_first_request_of_who_arrives_runs_before_it_shares():
    """Four seconds ahead of the others, then second by second; its credit is told while it lasts."""
    shares = TenantShares()
    run(shares, [A], {"a": 1.0}, turns=1000)
    assert shares.turn([A, B], credit_s=4.0).credit_s == 4.0
    names = run(shares, [A, B], {"a": 1.0, "b": 1.0}, turns=8, credit_s=4.0)
    assert "".join(names) == "bbbbabab"
    assert shares.turn([A, B]).credit_s == 0.0


def test_a_credit_is_not_got_by_coming_and_going():
    """Whoever leaves after each request gets its half of the time, and the credit once."""
    shares = TenantShares()
    run(shares, [A], {"a": 1.0}, turns=10)
    names = []
    for _ in range(50):
        names += run(shares, [A, B], {"a": 1.0, "b": 1.0}, turns=4, credit_s=4.0)
        names += run(shares, [A], {"a": 1.0}, turns=1)
    assert names.count("b") <= len(names) / 2 + 4


def test_who_arrives_later_goes_before_who_has_credit_left():
    """A third one does not wait for the whole request of the second."""
    shares = TenantShares()
    run(shares, [A], {"a": 1.0}, turns=10)
    run(shares, [A, B], {"a": 1.0, "b": 1.0}, turns=1, credit_s=8.0)
    assert run(shares, [A, B, HEAVY], {"a": 1.0, "b": 1.0, "heavy": 1.0}, turns=2, credit_s=2.0) == ["heavy"] * 2


def test_one_tenant_alone_does_not_share():
    """Neither with itself nor with plait's own warm-up."""
    shares = TenantShares()
    run(shares, [Tenant(name="")], {"": 1.0}, turns=1)
    run(shares, [A], {"a": 1.0}, turns=2)
    assert not shares.is_shared
    run(shares, [B], {"b": 1.0}, turns=1)
    assert shares.is_shared


def test_a_tenant_goes_on_while_a_change_costs_more():
    """With a slack of four seconds each tenant has its turns in runs of four or five, and still its half."""
    names = run(TenantShares(), [A, B], {"a": 1.0, "b": 1.0}, turns=80, slack_s=4.0)
    changes = sum(1 for one, other in itertools.pairwise(names) if one != other)
    assert 8 <= changes <= 22
    assert names.count("b") == pytest.approx(40, abs=5)


def test_nobody_is_remembered_for_ever():
    """A tenant that is behind those that are there would be lifted anyway."""
    shares = TenantShares()
    for i in range(1000):
        one = Tenant(name=f"t{i}")
        run(shares, [one], {one.name: 1.0}, turns=3)
    assert len(shares._virtual_s) <= 3


def work(tenant, left_s, *, runs=False):
    return SimpleNamespace(request=SimpleNamespace(tenant=tenant), left_s=left_s, runs=runs)


def queued(*works):
    return [work(*one) for one in works]


def test_the_queue_is_bounded_by_number_too():
    """A place is free when the first of three ends: in a third of their work."""
    bounds = EngineKnobs(queue_limit=3, queue_seconds=1000.0)
    assert wait_s(A, queued(*[(A, 4.0)] * 2), bounds) is None
    assert wait_s(A, queued(*[(A, 4.0)] * 3), bounds) == pytest.approx(4.0)
    assert wait_s(A, queued(*[(A, 0.0)] * 3), bounds) == 0.0  # nothing is known yet


def test_what_runs_together_ends_together():
    """Three of a batch with four seconds left each end in twelve; with one that is further, it ends first."""
    bounds = EngineKnobs(queue_limit=3, queue_seconds=1000.0)
    batch = [work(A, 4.0, runs=True)] * 3
    assert wait_s(A, batch, bounds) == pytest.approx(12.0)
    further = [work(A, 1.0, runs=True), *batch[1:]]
    assert wait_s(A, further, bounds) == pytest.approx(3.0)
    waiting = work(A, 2.0)  # it begins as the first ends, and ends before the others
    assert wait_s(A, [*further, waiting], bounds) == pytest.approx(3.0 + 3 * 2.0)


def test_a_flood_leaves_room_for_others():
    """One tenant fills the queue; the next one has half of it, and the first none until it is below its own half. Its
    work is done at half the rate."""
    bounds = EngineKnobs(queue_limit=100, queue_seconds=10.0)
    flood = [(A, 1.0)] * 10
    assert wait_s(A, queued(*flood), bounds) is not None
    assert wait_s(B, queued(*flood), bounds) is None
    both = queued(*flood, (B, 1.0))
    assert wait_s(B, both, bounds) is None
    assert wait_s(A, both, bounds) == pytest.approx((10 - 5) / 0.5)
    assert wait_s(B, queued(*flood, *[(B, 1.0)] * 5), bounds) == 0.0


def test_a_tenants_own_bound_holds_alone():
    """`queued_s` is less than the queue takes."""
    small = Tenant(name="a", queued_s=2.0)
    assert wait_s(small, queued((small, 2.5)), EngineKnobs(queue_limit=100, queue_seconds=10.0)) == pytest.approx(0.5)


asked = partial(request, width=64, height=64, steps=10)


def sized(request, *, chunks):
    return request, replace(size_of(request), chunks=chunks)


SIZE = size_of(asked())


def test_work_is_forecast_from_what_was_charged():
    """Steps, encoding and decoding; the median, so that one slow step in three does not count."""
    forecast = WorkForecast(StepCosts())
    assert forecast.work_s(*sized(asked(), chunks=2)) == 0.0
    for seconds in (0.5, 0.4, 9.0):
        forecast.charged_step(SIZE, seconds)
    forecast.encodes.add(1, 0.1)
    forecast.decodes.add(64 * 64, 0.3)
    assert forecast.work_s(*sized(asked(n=2), chunks=4)) == pytest.approx(2 * 10 * 0.5 + 4 * 0.1 + 2 * 0.3)


def test_an_edit_is_forecast_by_the_steps_that_run_and_its_image():
    """Half the steps, and one run of the VAE's encoder, scaled by pixels where this size was never seen."""
    forecast = WorkForecast(StepCosts())
    edit = Edit(image=np.zeros((64, 64, 3), np.uint8), strength=0.5)
    forecast.charged_step(SIZE, 0.5)
    forecast.sources.add(64 * 64, 0.25)
    assert forecast.work_s(*sized(asked(n=2), chunks=1)) == pytest.approx(2 * 10 * 0.5)
    assert forecast.work_s(*sized(asked(n=2, edit=edit), chunks=1)) == pytest.approx(2 * 5 * 0.5 + 0.25)
    assert forecast.work_s(*sized(asked(width=32, height=32, edit=edit), chunks=1)) == pytest.approx(
        5 * 0.5 / 4 + 0.25 / 4
    )


def test_what_was_never_measured_is_scaled_from_the_nearest():
    """A quarter of the pixels, no guidance: an eighth of the work. Up by the square root: four times the pixels without
    guidance are twice the work, and four times as long to decode."""
    forecast = WorkForecast(StepCosts())
    forecast.charged_step(SIZE, 0.5)
    forecast.decodes.add(64 * 64, 0.3)
    smaller = asked(width=32, height=32, guidance_scale=1.0)
    assert forecast.work_s(*sized(smaller, chunks=1)) == pytest.approx(10 * 0.5 / 8 + 0.3 / 4)
    larger = asked(width=128, height=128, guidance_scale=1.0)
    assert forecast.work_s(*sized(larger, chunks=1)) == pytest.approx(10 * 0.5 * 2**0.5 + 2 * 0.3)


def test_a_deadline_is_judged_by_the_time_alone():
    """Company shares a step; one request still waits for the whole step. Unknown until steps were measured."""
    costs = StepCosts()
    forecast = WorkForecast(costs)
    forecast.charged_step(SIZE, 0.1)
    assert forecast.alone_s(*sized(asked(), chunks=1)) == 0.0
    for _ in range(3):
        costs.record(GroupKey(SIZE.shape, SIZE.row, ()), 1, 0.4)
    forecast.decodes.add(64 * 64, 0.3)
    assert forecast.alone_s(*sized(asked(), chunks=1)) == pytest.approx(10 * 0.4 + 0.3)
