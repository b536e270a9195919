"""How long a tenant's first image takes behind another tenant's queue, in virtual time."""

from __future__ import annotations

import pytest

from fakes.virtual_engine import TABLES, Virtual
from plait_serving.diffusion.values import Tenant
from support.engine import request
from support.waiting import wait_for

FLOOD, OTHER = Tenant(name="flood"), Tenant(name="other")
QUEUED, STEPS, WAIT_S = 400, 4, 300.0


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
