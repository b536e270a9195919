"""An engine whose threads hang says so; one that is slow does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from plait_kernels.heartbeat import Stuck
from plait_serving.diffusion import decoding
from plait_serving.diffusion.decoding import DecodeQueue
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.request_terms import RowKind
from support.engine import WAIT_S, Gate, rig
from support.waiting import wait_for

__all__ = ["rig"]

PERIOD_S = 5.0


class Clock:
    """The real clock and what a test adds to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s

    def checks_pass(self, check: Callable[[], None], seconds: float) -> None:
        """Check every few seconds, for as long as told on this clock."""
        for _ in range(round(seconds / PERIOD_S)):
            self.ahead_s += PERIOD_S
            check()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_that_hangs_is_noticed_after_a_minute_or_so(rig, clock) -> None:
    """Steps of this shape were measured to take a moment (finding 9)."""
    gate = Gate()
    built = rig(gate=gate, clock=clock, costs=StepCosts())
    built.ask(steps=10)
    gate.wait_step()
    gate.let(7)
    with pytest.raises(Stuck, match="a step of 1 rows at 16x16 has not ended"):
        clock.checks_pass(built.engine.check_progress, 150)


def test_an_engine_without_work_is_not_stuck(rig, clock) -> None:
    """It waits for requests for as long as there are none."""
    engine = rig(clock=clock).engine
    wait_for(lambda: engine._loop.heartbeat._task is None)  # it has just been started
    clock.checks_pass(engine.check_progress, 3_600)


def test_a_decode_thread_that_hangs_is_noticed(clock, monkeypatch) -> None:
    """Images would never be ready although steps go on."""
    monkeypatch.setattr(decoding, "is_gpu", lambda _: True)
    go_on, begun = threading.Event(), threading.Event()
    queue = DecodeQueue(clock)

    def hang(_: torch.Tensor) -> None:
        begun.set()
        go_on.wait(WAIT_S)

    try:
        queue.submit("a", torch.zeros(4), hang)
        assert begun.wait(WAIT_S)
        with pytest.raises(Stuck, match="a decode beside the steps"):
            clock.checks_pass(queue.heartbeat.check, 1_200)
    finally:
        go_on.set()
        queue.close()


def test_only_measured_row_counts_have_a_measured_time() -> None:
    """Another count of rows is another shape to a compiler, so an estimate would be no measure."""
    costs, key = StepCosts(), GroupKey((64, 64), RowKind(64 * 64), ())
    assert costs.measured_s(key, 2) is None
    for _ in range(3):
        costs.record(key, 2, 0.5)
    assert costs.measured_s(key, 2) == 0.5
    assert costs.measured_s(key, 4) is None
