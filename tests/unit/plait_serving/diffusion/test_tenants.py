"""The engine's queue between tenants, and prompts that would hold it up, over fakes."""

from __future__ import annotations

import threading

import pytest

from plait_serving.diffusion.errors import DeadlineMissed, Overloaded, RequestError
from plait_serving.diffusion.queue.policy import BatchLimits, Candidate, Costs, GroupKey, choose, overtaken_by
from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.values import LoraRef, Tenant
from support.engine import WAIT_S, Gate, rig

__all__ = ["rig"]

PLAIN = GroupKey((16, 16), RowKind(16 * 16), ())
LIMITS = BatchLimits(largest_batch=8, overtake_limit=2)
FLOOD, OTHER = Tenant(name="flood"), Tenant(name="other")


def unit(order, tenant, key=PLAIN, **more):
    return Candidate(order=order, key=key, rows=1, steps_left=4, tenant=tenant, **more)


def costs(step_s):
    return Costs(step_s=lambda key, rows: step_s(rows), switch_s=lambda key: 0.0)


def test_guests_join_where_rows_are_free():
    """The tenant whose turn it is takes the others along."""
    flood = [unit(i, "flood") for i in range(5)]
    batch = choose([*flood, unit(9, "other")], costs=costs(lambda rows: 1.0), limits=LIMITS, now_s=0.0, turn="other")
    assert [one.order for one in batch] == [0, 1, 2, 3, 4, 9]


def test_guests_do_not_slow_their_host_by_more_than_its_next_turn_is_away():
    """Eight rows take 2.75 times as long as one; with two tenants twice is the limit."""
    flood = [unit(i, "flood") for i in range(12)]
    step = costs(lambda rows: 0.75 + 0.25 * rows)
    batch = choose([*flood, unit(99, "other")], costs=step, limits=LIMITS, now_s=0.0, turn="other")
    assert len(batch) == 5
    assert batch[-1].order == 99


def test_who_has_just_come_takes_few_guests():
    """With credit for the next step as well, its guests lengthen a call by a quarter at most."""
    flood = [unit(i, "flood") for i in range(12)]
    step = costs(lambda rows: 0.9 + 0.1 * rows)
    chosen = [
        choose([*flood, unit(99, "other")], costs=step, limits=LIMITS, now_s=0.0, turn="other", credit_s=credit_s)
        for credit_s in (0.5, 5.0)
    ]
    assert [len(batch) for batch in chosen] == [8, 3]


def test_a_call_that_others_may_have_to_wait_for_is_short():
    """Where several tenants come: no longer than three quarters of one request alone, whatever else would fit."""
    flood = [unit(i, "flood", steps=4) for i in range(12)]
    step = costs(lambda rows: 0.5 + 0.5 * rows)
    limits = BatchLimits(largest_batch=8, overtake_limit=2, is_shared=True)
    assert len(choose(flood, costs=step, limits=limits, now_s=0.0)) == 5
    long = [unit(i, "flood", steps=20) for i in range(12)]
    assert len(choose(long, costs=step, limits=limits, now_s=0.0)) == 8
    single = [unit(i, "flood", steps=1) for i in range(12)]
    nearly_free = costs(lambda rows: 1.0 + 0.05 * rows)
    assert len(choose(single, costs=nearly_free, limits=limits, now_s=0.0)) == 6


def test_guests_stay_out_where_rows_cost_as_much_as_calls():
    """On a busy CPU the tenants take turns."""
    batch = choose([unit(0, "flood"), unit(1, "other")], costs=costs(float), limits=LIMITS, now_s=0.0, turn="other")
    assert [one.order for one in batch] == [1]


def test_only_the_tenant_whose_turn_it_is_can_be_overtaken():
    """A flood that waits for its turn is not owed steps for it."""
    other_key = GroupKey((32, 32), RowKind(32 * 32), ())
    units = [unit(0, "flood", overtaken=99), unit(1, "other", other_key), unit(2, "other")]
    batch = choose(units, costs=costs(float), limits=LIMITS, now_s=0.0, turn="other")
    assert {one.tenant for one in batch} == {"other"}
    assert 0 not in overtaken_by(batch, units, "other")
    assert overtaken_by(units[2:], units, "other") == {1}


def test_nothing_is_learned_from_the_warm_up(rig):
    """It pays for what is done once, at a fraction of a real size: a fresh server would refuse by it what it can do."""
    gate, now_s = Gate(), [0.0]
    built = rig(gate=gate, clock=lambda: now_s[0], queue_seconds=1)
    warm_up = built.ask("warm-up", steps=1, tenant=Tenant(name=""), width=8, height=8)
    gate.wait_step()
    now_s[0] += 0.1
    gate.passes.release()
    warm_up.result()
    watches = [built.ask(f"r{i}", steps=50, width=512, height=512) for i in range(8)]
    gate.release_all()
    for watch in watches:
        watch.result()


def test_a_flood_is_refused_and_another_tenant_is_not(rig):
    """The flood fills the queue; the other has its own half. What both used is counted."""
    gate = Gate()
    built = rig(gate=gate, queue_limit=4)
    watches = [built.ask(f"f{i}", tenant=FLOOD) for i in range(4)]
    with pytest.raises(Overloaded, match="4 requests"):
        built.ask("f4", tenant=FLOOD)
    watches += [built.ask(f"o{i}", tenant=OTHER) for i in range(2)]
    with pytest.raises(Overloaded, match="2 requests"):
        built.ask("o2", tenant=OTHER)
    gate.release_all()
    for watch in watches:
        watch.result()
    usage = built.engine.usage()
    assert {name: (used.finished, used.rejected, used.images) for name, used in usage.items()} == {
        "flood": (4, 1, 4),
        "other": (2, 1, 2),
    }
    assert usage["flood"].steps == 4 * 4
    assert usage["flood"].pixels == 4 * 16 * 16
    assert usage["flood"].compute_s > 0
    assert built.engine.statistics().queued_s == 0.0


def test_the_queue_is_bounded_by_predicted_compute(rig):
    """Once steps are known, a few long requests fill it: by their steps, not by their number."""
    gate, now_s = Gate(), [0.0]

    def step():
        now_s[0] += 0.01

    built = rig(gate=step, clock=lambda: now_s[0], queue_seconds=0.5)
    built.ask("known", steps=20).result()
    built.denoiser.gate = gate
    built.ask("long", steps=400)
    with pytest.raises(Overloaded) as refused:
        built.ask("short", steps=1)
    left_s = built.engine.statistics().queued_s
    assert left_s >= 400 * 0.01
    assert refused.value.retry_after_s == pytest.approx(left_s - 0.5, rel=0.1)
    gate.release_all()


def test_a_long_prompt_holds_up_nobody(rig):
    """Finding 2: between the calls of its text encoder others step, end and miss their deadlines."""
    now_s, calls, begun, go_on, quick_ended = [0.0], [], *(threading.Event() for _ in range(3))
    built = rig(clock=lambda: now_s[0])

    def slow(request):
        if request.prompt != "quick":
            begun.set()
            assert go_on.wait(WAIT_S)
            calls.append(request.request_id)
            now_s[0] += 0.1
            assert len(calls) < 15 or quick_ended.wait(WAIT_S)  # of 21: the long one still is encoded

    built.denoiser.encoding_gate = slow
    long = built.ask("word " * 200)
    assert begun.wait(WAIT_S)
    late, quick = built.ask("word " * 300, deadline_s=0.5), built.ask("quick", steps=2)
    go_on.set()
    quick.result()
    quick_ended.set()
    with pytest.raises(DeadlineMissed):
        late.result()
    assert long.result().images


@pytest.mark.parametrize("field", ["prompt", "negative_prompt"])
def test_more_tokens_than_are_read_are_refused(field, rig):
    """Finding 2: 750 by default; the error says how many there are, and nothing was started."""
    built = rig()
    fields = {"prompt": "x", field: "word " * 751}
    with pytest.raises(RequestError, match="751 tokens are too many; at most 750") as refused:
        built.ask(fields.pop("prompt"), loras=(LoraRef(name="a"),), **fields)
    assert refused.value.param == field
    assert built.provider.leases == []
