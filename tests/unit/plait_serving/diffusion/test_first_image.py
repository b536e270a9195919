"""How long a tenant's first image takes behind another tenant's queue, in virtual time: a call of the fake denoiser
takes as long as a table says, and nothing else takes any."""

from __future__ import annotations

import threading

import pytest

from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.values import Progress, Tenant
from support.engine import Rig, request

FLOOD, OTHER = Tenant(name="flood"), Tenant(name="other")
QUEUED, STEPS, WAIT_S = 1000, 4, 300.0

TABLES = {
    "starter model on two cores": lambda rows: 0.010 + 0.0056 * rows,
    "rows cost as much as calls": lambda rows: 0.1 * rows,
    "rows are nearly free": lambda rows: 0.05 + 0.0005 * rows,
}


class Virtual:
    """An engine in virtual time. `at[k]` is called when the flood's k-th call begins, on the compute thread."""

    def __init__(self, step_s) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.calls = 0
        self.at = {}
        self.rows = []
        self.rig = Rig(clock=self.clock, costs=StepCosts(), queue_limit=4 * QUEUED, queue_seconds=1e9)
        self.predict, self.rig.denoiser.predict = self.rig.denoiser.predict, self.take

    def clock(self):
        """Return the time; the decode thread sees none pass, however many calls are made beside it."""
        return 0.0 if threading.current_thread().name.startswith("plait-decode") else self.now_s

    def take(self, calls):
        """Take the time of a call; in its middle, somebody may come."""
        rows = sum(call.conditioning.n for call in calls)
        self.rows.append(rows)
        self.calls += 1
        half_s = 0.5 * self.step_s(rows)
        self.now_s += half_s
        if (come := self.at.pop(self.calls, None)) is not None:
            come()
        self.now_s += half_s
        return self.predict(calls)

    def ask(self, name, tenant, **more):
        """Submit; return what will hold the seconds until its last step."""
        asked_s, times = self.now_s, {}

        def sink(event):
            if isinstance(event, Progress) and event.step == event.steps:
                times["stepped_s"] = self.now_s - asked_s

        self.rig.engine.submit(request(name, steps=STEPS, tenant=tenant, **more), sink)
        return times


@pytest.fixture(params=TABLES.values(), ids=TABLES.keys())
def virtual(request):
    """A `Virtual` whose costs are known, and to which both tenants have come before."""
    made = Virtual(request.param)
    yield made
    made.rig.engine.stop(drain_s=0)


def alone_s(virtual):
    """The seconds of one request alone, once its costs are known."""
    for tenant in (OTHER, FLOOD, OTHER):
        before_s = virtual.now_s
        virtual.rig.engine.generate(request("alone", steps=STEPS, tenant=tenant), timeout_s=WAIT_S)
    assert virtual.now_s - before_s == pytest.approx(STEPS * virtual.step_s(1))
    return virtual.now_s - before_s


def test_behind_a_thousand_requests_it_is_late_by_one_request_of_its_kind_at_most(virtual):
    """Whenever it comes, twenty times, while the flood has its share in between."""
    one_s = alone_s(virtual)
    seen, first = [], virtual.calls + 20
    for number, call in enumerate(range(first, first + 20 * 9, 9)):
        virtual.at[call] = lambda number=number: seen.append(virtual.ask(f"other-{number}", OTHER))
    virtual.at[virtual.calls + 1] = lambda: [virtual.ask(f"f{i}", FLOOD) for i in range(QUEUED)]
    virtual.ask("first", FLOOD)
    assert virtual.rig.engine._registry.wait_until_empty(WAIT_S)
    delays = [(times["stepped_s"] - one_s) / one_s for times in seen]
    assert len(delays) == 20
    assert max(delays) <= 1.0, delays
