"""What was running when an engine's process died is tried again alone, and before all that came later."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from fakes.engine import FakeProvider, size_of
from plait_serving.diffusion.errors import DeadlineMissed, Overloaded
from plait_serving.diffusion.units import ImageJob, SpentSeconds, cut_into_units, heads
from plait_serving.diffusion.values import Event, LoraRef, Progress, Scheduler, Tenant
from support.engine import Gate, Rig, request, rigs


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    """`rig(**options)` builds a `Rig`; every one is stopped at the end."""
    yield from rigs()


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_it_goes_before_newcomers_for_a_step_and_with_them_from_then_on(rig, tenant) -> None:
    """Whosever it is. Its first step is shared with nobody; eight that are tried again take theirs in turn."""
    gate = Gate()
    built = rig(gate=gate)
    newcomers = [built.ask(str(i), steps=3, tenant=Tenant(name="a")) for i in range(48)]
    gate.wait_step()
    tried = [built.ask("t", steps=steps, tenant=Tenant(name=tenant), tried_again_s=30.0) for steps in range(16, 8, -1)]
    gate.release_all()
    for watch in (*newcomers, *tried):
        assert watch.result().images
    calls = [call.timesteps for call in built.denoiser.calls]
    assert calls[1:9] == [(steps,) for steps in range(16, 8, -1)]
    assert len(calls[9]) > 8


def test_it_is_the_oldest_of_its_tenant_from_then_on(rig) -> None:
    """Where requests run one after another its images are made before those of newcomers that were there before it."""
    gate, ended = Gate(), []
    built = rig(gate=gate, largest_batch=1)

    def ask(name: str, steps: int, **more: object) -> None:
        def sink(event: Event) -> None:
            if isinstance(event, Progress) and event.step == event.steps:
                ended.append(name)

        built.engine.submit(request(name, steps=steps, **more), sink)

    ask("runs", 2)
    gate.wait_step()
    for name in ("new 1", "new 2", "new 3"):
        ask(name, 3)
    for name in ("tried 1", "tried 2"):
        ask(name, 9, tried_again_s=30.0)
    gate.release_all()
    built.engine.stop(drain_s=60)
    assert set(ended[:2]) == {"tried 1", "tried 2"}
    assert len(ended) == 6


def test_one_whose_set_is_not_there_yet_lets_others_run(rig) -> None:
    """Nothing stands still for it; it is alone once it can run."""
    provider = FakeProvider(["slow"], held=["slow"])
    built = rig(provider=provider)
    tried = built.ask("t", steps=9, loras=(LoraRef(name="slow"),), tried_again_s=1.0)
    assert built.ask("n").result().images
    provider.arrive()
    assert tried.result().images
    assert tried.result().timings.total_s >= 1.0
    assert tried.result().timings.lora_s < 1.0


def test_a_full_queue_has_room_for_it(rig) -> None:
    """It was admitted before; newcomers have taken its place since."""
    gate = Gate()
    built = rig(gate=gate, queue_limit=1)
    newcomer = built.ask("n")
    with pytest.raises(Overloaded):
        built.ask("m")
    tried = built.ask("t", tried_again_s=2.0)
    gate.release_all()
    assert newcomer.result().images
    assert tried.result().images


def test_its_deadline_counts_from_its_arrival(rig) -> None:
    """What the first attempt took is gone."""
    built = rig(clock=lambda: 100.0)
    assert built.ask("in time", deadline_s=5.0, tried_again_s=4.0).result().images
    with pytest.raises(DeadlineMissed):
        built.ask("late", deadline_s=5.0, tried_again_s=6.0)


def test_the_trial_ends_with_a_step_of_the_sampler() -> None:
    """Which the client hears of: Heun's takes two calls. Of a request of several units the first one is tried."""
    asked = request(n=3, scheduler=Scheduler.HEUN, tried_again_s=0.0)
    jobs = []
    for order, one in ((10, request()), (0, asked)):
        job = ImageJob(
            request=one, size=size_of(one), sink=lambda _: None, spent=SpentSeconds(0.0), loras=None, deadline_at_s=None
        )
        job.units = cut_into_units(job, 2, itertools.count(order))
        jobs.append(job)
    tried = jobs[1].units
    for calls in (0, 1):
        tried[0].step = calls
        assert heads(jobs, largest_batch=8, overtake_limit=2) == ([tried[0]], [])
    tried[0].step = 2
    ready, behind = heads(jobs, largest_batch=8, overtake_limit=2)
    assert {unit.order for unit in (*ready, *behind)} == {0, 1, 10}
