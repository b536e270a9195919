"""An engine whose time is what the calls of its denoiser take by a table."""

from __future__ import annotations

import threading

from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.units import RequestPhase
from plait_serving.diffusion.values import Progress
from support.engine import Rig, request
from support.waiting import wait_for

TABLES = {
    "starter model on two cores": lambda rows: 0.010 + 0.0056 * rows,
    "rows cost as much as calls": lambda rows: 0.1 * rows,
    "rows are nearly free": lambda rows: 0.05 + 0.0005 * rows,
}


class Virtual:
    """An engine in virtual time: a call takes as long as `step_s` says of its rows, and nothing else takes any.

    `at[k]` is called in the middle of the k-th call, on the compute thread.
    """

    def __init__(self, step_s, **engine) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.calls = 0
        self.at = {}
        self.rows = []
        self.rig = Rig(clock=self.clock, costs=StepCosts(), **engine)
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

    def wait_for_decodes(self):
        """Return when all that was stepped is decoded: it takes no virtual time, but that of the host."""
        open_jobs = self.rig.engine._registry._open
        wait_for(lambda: not any(job.phase is RequestPhase.DECODING for job in list(open_jobs)))

    def wait_until_idle(self, timeout_s):
        """Return when no request is open."""
        wait_for(lambda: self.rig.engine.is_idle, timeout_s)

    def ask(self, name, tenant, **more):
        """Submit; return what will hold the seconds until its last step."""
        asked_s, times = self.now_s, {}

        def sink(event):
            if isinstance(event, Progress) and event.step == event.steps:
                times["stepped_s"] = self.now_s - asked_s

        self.rig.engine.submit(request(name, tenant=tenant, **more), sink)
        return times
