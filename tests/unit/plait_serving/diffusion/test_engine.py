"""The engine's loop over fakes: joining, cancelling, deadlines, LoRA sets, failures, stopping. No models, no sleeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fakes.engine import FakeDenoiser, FakeProvider
from fakes.graphs import FakeCapture
from plait_kernels.executors import graphs
from plait_kernels.executors.graphs import GraphMemory
from plait_serving.diffusion.errors import (
    Cancelled,
    DeadlineMissed,
    EngineStopped,
    NotFound,
    NumericalError,
    OutOfMemory,
    RequestError,
)
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.values import Edit, LoraPolicy, LoraRef, Preview, Progress, Scheduler
from support.engine import WAIT_S, Gate, request, rig
from support.waiting import wait_for

__all__ = ["rig"]

PICTURE = np.zeros((16, 16, 3), np.uint8)


def value(image) -> int:
    """The fake image's one value: seed + what every step added."""
    assert len(np.unique(image)) == 1
    return int(image[0, 0, 0])


@pytest.mark.parametrize("text", [(), ("a",)])
def test_a_lora_that_was_replaced_acts_at_once_and_shares_no_call_with_the_old_one(rig, text):
    """Same name and scale, another file: in the weights and in the text encoder (finding 1)."""
    gate, provider = Gate(), FakeProvider(["a"], text=text)
    built = rig(gate=gate, provider=provider)
    loras = (LoraRef(name="a", scale=2),)
    old = built.ask("old", loras=loras, steps=3)
    gate.wait_step()
    provider.tokens["a"] = 7
    new = built.ask("new", loras=loras, steps=3)
    gate.release_all()
    assert value(old.result().images[0]) == value(new.result().images[0]) == 10 + 3 * (1 + 2)
    assert all(len(call.timesteps) == 1 for call in built.denoiser.calls)
    files = {target[0].file for target in built.merger.history if target}
    assert files == {0, 7}
    assert {target[0].file for target in built.text_merger.history if target} == ({0, 7} if text else set())


def test_more_images_than_a_batch_holds(rig):
    """Ten images with largest_batch 4 run as three units and come back in seed order."""
    built = rig(largest_batch=4)
    result = built.ask(n=10, steps=2).result()
    assert [value(image) for image in result.images] == [12 + i for i in range(10)]
    assert max(len(call.timesteps) for call in built.denoiser.calls) == 1


def test_a_sink_that_raises_cancels_its_request(rig):
    """A caller whose sink fails counts as gone; the engine lives on."""
    built = rig()
    calls = []

    def sink(event) -> None:
        calls.append(event)
        raise RuntimeError("gone")

    built.engine.submit(request("x", steps=1000), sink)
    assert value(built.ask(steps=2).result().images[0]) == 12
    wait_for(lambda: built.engine.statistics().cancelled == 1)
    assert len(calls) < 1000


def test_out_of_memory_halves_the_batch(rig):
    """A batch that does not fit is cut in half until it does; nobody fails who fits alone."""
    gate = Gate()
    built = rig(gate=gate)
    hog = built.ask("x")
    gate.wait_step()
    watches = [hog, built.ask("memory"), built.ask("y"), built.ask("z")]
    gate.release_all()
    assert [value(watch.result().images[0]) for watch in watches] == [14] * 4


@pytest.mark.parametrize("method", ["begin", "predict", "finish"])
def test_a_lost_device_ends_the_engine(rig, monkeypatch, method):
    """In an encoder, the denoiser or the decoder: the process can compute nothing more, so another one is needed. The
    request ends once, and is told to ask again."""

    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(FakeDenoiser, method, lost)
    built = rig()
    with pytest.raises(EngineStopped):
        built.ask().result()
    assert not built.engine.alive
    assert built.engine.statistics().failed == 1


@pytest.mark.parametrize("method", ["begin", "predict", "finish"])
def test_what_does_not_fit_alone_fails_alone(rig, monkeypatch, method):
    """In an encoder, the denoiser or the decoder: it is told so, graphs give theirs up, and the next one is served."""
    works, memory = getattr(FakeDenoiser, method), GraphMemory(FakeCapture(), budget_bytes=1)
    monkeypatch.setitem(graphs._ON, torch.device("cpu"), memory)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    built = rig()
    monkeypatch.setattr(FakeDenoiser, method, full)
    with pytest.raises(OutOfMemory):
        built.ask().result()
    monkeypatch.setattr(FakeDenoiser, method, works)
    assert built.ask().result().images
    assert memory.given_up == 1


def test_loading_overlaps_other_work_and_the_request_waits_for_its_set(rig):
    """While a set loads, others run; the request starts when it is there and all its steps have it."""
    provider = FakeProvider(["slow"], held=["slow"])
    built = rig(provider=provider)
    waiting = built.ask("w", loras=(LoraRef(name="slow", scale=2.0),))
    assert built.ask("o").result().images
    assert not waiting.ended.is_set()
    provider.arrive()
    result = waiting.result()
    assert value(result.images[0]) == 10 + 4 * 3
    assert result.timings.lora_s > 0
    assert provider.leases[0].releases == 1


@pytest.mark.parametrize("late", [False, True])
def test_bounded_async_runs_exactly_k_free_steps_whenever_the_set_arrives(rig, late):
    """k of the steps run without the set, all others with it, independent of timing; the result says so."""
    provider = FakeProvider(["s"], held=["s"] if late else [])
    built = rig(provider=provider)
    watch = built.ask(
        "k", steps=6, loras=(LoraRef(name="s", scale=2.0),), lora_policy=LoraPolicy.BOUNDED_ASYNC, lora_free_steps=2
    )
    if late:
        wait_for(lambda: len([event for event in watch.events if isinstance(event, Progress)]) == 2)
        provider.arrive()
    result = watch.result()
    assert value(result.images[0]) == 10 + 2 * 1 + 4 * 3
    assert (result.lora_policy, result.lora_free_steps) == (LoraPolicy.BOUNDED_ASYNC, 2)


def test_free_steps_of_two_calls_are_steps(rig):
    """Heun's: with all steps but the last one free, the last call alone has the set."""
    watch = rig(provider=FakeProvider(["s"])).ask(
        steps=3, scheduler=Scheduler.HEUN, loras=(LoraRef(name="s", scale=2.0),),
        lora_policy=LoraPolicy.BOUNDED_ASYNC, lora_free_steps=2,
    )  # fmt: skip
    assert value(watch.result().images[0]) == 10 + 4 * 1 + 1 * 3


@pytest.mark.parametrize(("strength", "steps", "previewed"), [(None, 5, [1, 3]), (0.6, 3, [1, 1])])
def test_steps_of_two_calls_are_told_as_steps(rig, strength, steps, previewed):
    """Progress and previews, of a generation and of an edit; the denoiser is called twice for each but the last."""
    built = rig()
    edit = None if strength is None else Edit(image=PICTURE, strength=strength)
    watch = built.ask(steps=5, scheduler=Scheduler.HEUN, edit=edit, partial_images=2)
    watch.result()
    told = [event for event in watch.events if isinstance(event, Progress)]
    assert told == [Progress(step=step + 1, steps=steps) for step in range(steps)]
    assert [event.step for event in watch.events if isinstance(event, Preview)] == previewed
    assert len(built.denoiser.calls) == 2 * steps - 1


@pytest.mark.parametrize(("steps", "previewed"), [(1, []), (2, [1]), (3, [1, 2])])
def test_the_last_step_is_not_previewed(rig, steps, previewed):
    """It would be decoded twice: fewer steps have fewer previews."""
    watch = rig().ask(steps=steps, partial_images=3)
    watch.result()
    assert [event.step for event in watch.events if isinstance(event, Preview)] == previewed


def test_an_image_is_encoded_once_for_all_images_of_a_request(rig, monkeypatch):
    """Which are several units."""
    encoded, encode = [], FakeDenoiser.encode
    monkeypatch.setattr(FakeDenoiser, "encode", lambda *given: encoded.append(given) or encode(*given))
    result = rig(largest_batch=2).ask(n=5, edit=Edit(image=PICTURE)).result()
    assert (len(result.images), len(encoded)) == (5, 1)


def test_a_text_lora_is_in_before_the_prompt_it_acts_on_is_encoded(rig):
    """EXACT encodes once with the set live; BOUNDED_ASYNC encodes again at step k with the set live."""
    loras = (LoraRef(name="t"),)
    built = rig(provider=FakeProvider(["t"], text=["t"]))
    built.ask("exact", loras=loras).result()
    built.ask("late", loras=loras, lora_policy=LoraPolicy.BOUNDED_ASYNC, lora_free_steps=1).result()
    assert built.denoiser.encoded == [("exact", loras), ("late", ()), ("late", loras)]


def test_leases_are_released_on_every_way_out(rig):
    """Finished, failed and cancelled requests let go of their set exactly once."""
    gate = Gate()
    built = rig(gate=gate)
    loras = (LoraRef(name="a"),)
    done, nan, gone = (built.ask(p, loras=loras, steps=s) for p, s in (("ok", 3), ("nan", 3), ("c", 40)))
    gate.wait_step()
    gone.cancel()
    gate.release_all()
    done.result()
    for watch, error in ((nan, NumericalError), (gone, Cancelled)):
        with pytest.raises(error):
            watch.result()
    assert [lease.releases for lease in built.provider.leases] == [1, 1, 1]


def test_a_deadline_that_passes_fails_the_request_at_a_boundary(rig):
    """A request whose time is up is given up between steps."""
    gate, now_s = Gate(), [0.0]
    built = rig(gate=gate, clock=lambda: now_s[0])
    watch = built.ask("d", steps=400, deadline_s=1.0)
    gate.wait_step()
    now_s[0] = 1.1
    gate.release_all()
    with pytest.raises(DeadlineMissed):
        watch.result()


def test_a_hopeless_deadline_is_refused_at_the_door(rig):
    """Once step times are known, a deadline that the steps alone overrun is refused before anything starts."""
    now_s = [0.0]

    def step():
        now_s[0] += 0.01

    built = rig(gate=step, clock=lambda: now_s[0])
    built.ask(steps=3).result()
    with pytest.raises(DeadlineMissed) as refused:
        built.ask(steps=1000, deadline_s=0.1)
    assert refused.value.param == "deadline_ms"


def test_batch_wait_gathers_mates(rig):
    """With batch_wait_ms the first step waits for requests that arrive meanwhile."""
    built = rig(batch_wait_ms=300.0, largest_batch=2, clock=lambda: 0.0)
    first, second = built.ask("1"), built.ask("2")
    first.result()
    second.result()
    assert len(built.denoiser.calls[0].timesteps) == 2


def test_reconfigure_takes_effect_without_a_restart(rig):
    """A smaller largest_batch cuts the next request into smaller units."""
    built = rig(largest_batch=8)
    built.engine.reconfigure(EngineKnobs(threads=1, largest_batch=1))
    built.ask(n=3, steps=1).result()
    assert [len(call.timesteps) for call in built.denoiser.calls] == [1, 1, 1]


def test_a_stop_drains(rig):
    """With time for it a request finishes; then nothing is taken any more, and nothing is held."""
    built = rig()
    watch = built.ask(steps=3)
    built.engine.stop(drain_s=WAIT_S)
    assert watch.result().images
    with pytest.raises(EngineStopped):
        built.ask()
    assert not built.engine.alive
    assert built.provider.closed


def test_a_dying_compute_thread_fails_its_requests(rig):
    """If the compute thread dies, callers are told and the engine says it is not alive."""

    def die() -> None:
        raise SystemExit

    built = rig(gate=die)
    with pytest.raises(EngineStopped):
        built.ask().result()
    assert not built.engine.alive


def test_what_fails_between_two_steps_costs_no_image(rig, caplog):
    """A take-over by programs, for example: it is logged, and the engine goes on."""
    built = rig()
    built.engine.between_steps(lambda: 1 / 0)
    assert built.ask().result().images
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("change", "param", "kind"),
    [
        ({"width": 12}, "size", RequestError),
        ({"seed": 2**63}, "seed", RequestError),
        ({"loras": (LoraRef(name="../x"),)}, "loras.0.name", RequestError),
        ({"loras": (LoraRef(name="a"), LoraRef(name="nope"))}, "loras.1.name", NotFound),
    ],
)
def test_bad_requests_are_refused_and_name_the_field(rig, change, param, kind):
    """Also of who comes another way than over HTTP, whose tests have all that can be wrong."""
    built = rig()
    with pytest.raises(kind) as refused:
        built.ask(**change)
    assert refused.value.param == param
    assert built.engine.statistics().accepted == 0
