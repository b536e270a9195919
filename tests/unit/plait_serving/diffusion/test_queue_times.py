"""How long a tenant's first image takes behind the queue of another, and when there is room again: in virtual time."""

from __future__ import annotations

import random
import threading

import pytest

from fakes.virtual_engine import TABLES, Virtual
from plait_serving.diffusion.errors import Overloaded
from plait_serving.diffusion.values import Tenant
from support.engine import request
from support.waiting import wait_for

FLOOD, OTHER = Tenant(name="flood"), Tenant(name="other")
QUEUED, STEPS, WAIT_S = 400, 4, 300.0
LIMIT, ASKED = 24, 50


@pytest.fixture(params=TABLES.values(), ids=TABLES.keys())
def virtual(request):
    """A `Virtual` whose costs are known, and to which both tenants have come before."""
    made = Virtual(request.param, queue_limit=4 * QUEUED, queue_seconds=1e9)
    yield made
    made.rig.engine.stop(drain_s=0)


def alone_s(virtual):
    """The seconds of one request alone, once its costs are known."""
    for tenant in (OTHER, FLOOD, OTHER):
        before_s = virtual.now_s
        virtual.rig.engine.generate(request("alone", steps=STEPS, tenant=tenant), timeout_s=WAIT_S)
    assert virtual.now_s - before_s == pytest.approx(STEPS * virtual.step_s(1))
    return virtual.now_s - before_s


def test_behind_hundreds_of_requests_it_is_late_by_one_request_of_its_kind_at_most(virtual):
    """Whenever it comes, eight times, while the flood has its share in between."""
    one_s = alone_s(virtual)
    seen, first = [], virtual.calls + 20
    for number, call in enumerate(range(first, first + 8 * 9, 9)):
        virtual.at[call] = lambda number=number: seen.append(virtual.ask(f"other-{number}", OTHER, steps=STEPS))
    virtual.at[virtual.calls + 1] = lambda: [virtual.ask(f"f{i}", FLOOD, steps=STEPS) for i in range(QUEUED)]
    virtual.ask("first", FLOOD, steps=STEPS)
    wait_for(lambda: len(seen) == 8 and all(seen), WAIT_S)
    delays = [(times["stepped_s"] - one_s) / one_s for times in seen]
    assert max(delays) <= 1.0, delays


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("steps", [(120, 120), (60, 240)], ids=["equal", "mixed"])
def test_there_is_room_when_a_refusal_says_so(table, steps):
    """A flood that fills each place at once: three in four of its refusals name the time until the next place within a
    factor of two, or the second that is the least."""
    rng = random.Random(1)
    said: list[tuple[float, float]] = []
    ratios: list[float] = []
    virtual, over = Virtual(table, queue_limit=LIMIT, queue_seconds=1e9), threading.Event()

    def come():
        number = virtual.calls
        virtual.wait_for_decodes()
        while True:
            try:
                virtual.ask(f"f{number}-{rng.random()}", FLOOD, steps=rng.choice(steps))
            except Overloaded as refused:
                said.append((virtual.now_s, refused.retry_after_s))
                break
            ratios.extend(in_s / max(1.0, virtual.now_s - at_s) for at_s, in_s in said)
            said.clear()
        if number < ASKED * 20:
            virtual.at[number + 20] = come
        else:
            over.set()

    virtual.ask("first", FLOOD, steps=3)
    virtual.wait_until_idle(WAIT_S)
    virtual.at[virtual.calls + 1] = come
    virtual.ask("second", FLOOD, steps=3)
    assert over.wait(WAIT_S)
    virtual.rig.engine.stop(drain_s=0)
    assert len(ratios) > ASKED / 2
    right = sum(0.499 <= ratio <= 2.0 for ratio in ratios)
    assert right >= 0.75 * len(ratios), sorted(ratios)
