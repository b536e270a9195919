"""An engine whose threads hang says so; one that is slow does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from fakes.engine import FakeDenoiser, FakeMerger, FakeProvider, resident_model
from plait_kernels.heartbeat import Stuck
from plait_serving.diffusion.decoding import DecodeQueue
from plait_serving.diffusion.engine import Engine
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.policy import GroupKey
from plait_serving.diffusion.request_terms import RowKind
from plait_serving.diffusion.values import Failed, Finished, ImageRequest, Scheduler

WAIT_S = 60.0
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


class Hanging:
    """A denoiser's gate: the call with that number hangs until the test lets it go."""

    def __init__(self, call: int) -> None:
        self.call = call
        self.calls = 0
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self.call:
            self.hangs.set()
            assert self.goes_on.wait(WAIT_S)


def engine_of(gate: Hanging, clock: Clock) -> Engine:
    merger, text_merger = FakeMerger(), FakeMerger()
    denoiser = FakeDenoiser(merger, text_merger, gate)
    engine = Engine(
        models=[resident_model(denoiser, clock=clock, loras=FakeProvider([]))],
        knobs=EngineKnobs(threads=1),
        clock=clock,
    )
    engine.start()
    return engine


REQUEST = ImageRequest(
    request_id="r", prompt="x", width=16, height=16, steps=10, guidance_scale=5.0, seed=1, scheduler=Scheduler.EULER
)  # fmt: skip


def outcome_when_it_hangs(hanging_call: int, seconds: float) -> None:
    """Make a request whose call with that number hangs, and check the engine for so long meanwhile."""
    clock, gate = Clock(), Hanging(hanging_call)
    engine = engine_of(gate, clock)
    ended = threading.Event()
    try:
        engine.submit(REQUEST, lambda event: ended.set() if isinstance(event, Finished | Failed) else None)
        assert gate.hangs.wait(WAIT_S)
        clock.checks_pass(engine.check_progress, seconds)
    finally:
        gate.goes_on.set()
        assert ended.wait(WAIT_S)
        engine.stop(drain_s=0)


def test_a_step_that_hangs_is_noticed_after_a_minute_or_so() -> None:
    """Steps of this shape were measured to take a moment (finding 9)."""
    with pytest.raises(Stuck, match="a step of 1 rows at 16x16 has not ended"):
        outcome_when_it_hangs(8, 150)


def test_the_first_step_of_a_shape_may_compile_for_minutes() -> None:
    """Nothing is known of it, so that five minutes say nothing."""
    outcome_when_it_hangs(1, 300)
    with pytest.raises(Stuck, match="never measured"):
        outcome_when_it_hangs(1, 1_200)


def test_an_engine_without_work_is_not_stuck() -> None:
    """It waits for requests for as long as there are none."""
    clock, gate = Clock(), Hanging(0)
    engine = engine_of(gate, clock)
    try:
        until_s = time.monotonic() + WAIT_S
        while engine._loop.heartbeat._task is not None and time.monotonic() < until_s:
            time.sleep(0.01)  # it has just been started
        clock.checks_pass(engine.check_progress, 3_600)
    finally:
        engine.stop(drain_s=0)


def test_a_decode_thread_that_hangs_is_noticed() -> None:
    """Images would never be ready although steps go on."""
    clock, go_on, begun = Clock(), threading.Event(), threading.Event()
    queue = DecodeQueue(set_threads=lambda threads: None, clock=clock)
    latents = torch.zeros(4)

    def hang(_: torch.Tensor) -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    try:
        queue.submit("a", latents, lambda _: True)
        assert queue.run_next(stepping=True)  # of unknown length: here; it was short, so the next one runs aside
        queue.submit("a", latents, hang)
        queue.run_next(stepping=True)
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
