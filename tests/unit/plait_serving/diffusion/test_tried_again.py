"""What was running when an engine's process died is tried again alone, and before all that came later."""

from __future__ import annotations

import pytest

from fakes.engine import FakeProvider
from plait_serving.diffusion.errors import DeadlineMissed, Overloaded
from plait_serving.diffusion.values import Event, LoraRef, Progress, Scheduler, Tenant
from support.engine import Gate, request, rig

__all__ = ["rig"]


@pytest.mark.parametrize(("tenant", "scheduler"), [("a", Scheduler.DDIM), ("b", Scheduler.DDIM), ("b", Scheduler.HEUN)])
def test_it_goes_before_newcomers_for_a_step_and_with_them_from_then_on(rig, tenant, scheduler) -> None:
    """Whosever it is. Its first step, of which the client hears, is shared with nobody: Heun's takes two calls. Eight
    that are tried again take theirs in turn."""
    gate = Gate()
    built = rig(gate=gate)
    newcomers = [built.ask(str(i), steps=3, tenant=Tenant(name="a")) for i in range(48)]
    gate.wait_step()
    more = {"tenant": Tenant(name=tenant), "scheduler": scheduler, "tried_again_s": 30.0}
    tried = [built.ask("t", steps=steps, **more) for steps in range(16, 8, -1)]
    gate.release_all()
    for watch in (*newcomers, *tried):
        assert watch.result().images
    calls = [call.timesteps for call in built.denoiser.calls]
    each = scheduler.calls_per_step
    alone = [each * (steps - 1) + 1 - call for steps in range(16, 8, -1) for call in range(each)]
    assert calls[1 : 1 + len(alone)] == [(timestep,) for timestep in alone]
    assert len(calls[1 + len(alone)]) > 8


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
