"""The engine's loop over fakes: joining, cancelling, deadlines, LoRA sets, failures, stopping. No models, no sleeps."""

from __future__ import annotations

import threading
import time

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
    LoraError,
    NotFound,
    NumericalError,
    OutOfMemory,
    Overloaded,
    RequestError,
)
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.values import (
    Finished,
    LoraPolicy,
    LoraRef,
    Preview,
    Progress,
)
from support.engine import WAIT_S, Gate, request, rigs


@pytest.fixture
def rig():
    """`rig(**options)` builds a `Rig`; every one is stopped at the end."""
    yield from rigs()


def value(image) -> int:
    """The fake image's one value: seed + what every step added."""
    assert len(np.unique(image)) == 1
    return int(image[0, 0, 0])


def test_a_request_runs_all_its_steps_and_seeds_its_images(rig):
    """n images come from seeds seed..seed+n-1, each after every step; progress counts up."""
    watch = rig().ask(n=3, steps=5)
    result = watch.result()
    assert [value(image) for image in result.images] == [15, 16, 17]
    assert result.seeds == (10, 11, 12)
    assert [event.step for event in watch.events if isinstance(event, Progress)] == [1, 2, 3, 4, 5]
    assert isinstance(watch.events[-1], Finished)


def test_timings_add_up(rig):
    """The parts of `Timings` are not negative and sum to the total."""
    timings = rig().ask(loras=(LoraRef(name="a"),)).result().timings
    parts = [timings.queue_s, timings.lora_s, timings.encode_s, timings.denoise_s, timings.decode_s]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(timings.total_s, abs=5e-3)


def test_requests_that_agree_share_a_call_whatever_their_step(rig):
    """A request that arrives later joins at the next step boundary."""
    gate = Gate()
    built = rig(gate=gate)
    first = built.ask(steps=4)
    gate.wait_step()
    second = built.ask(steps=2)
    gate.let(1)
    gate.release_all()
    first.result()
    second.result()
    assert (3, 2) in [call.timesteps for call in built.denoiser.calls]


def test_different_lora_sets_never_share_a_call(rig):
    """Each set's images are made with exactly its weights, however the groups interleave."""
    built = rig(overtake_limit=1)
    watches = {
        scale: built.ask(f"p{scale}", loras=(LoraRef(name="a", scale=scale),) if scale else (), steps=3)
        for scale in (0, 1, 2)
    }
    for scale, watch in watches.items():
        assert value(watch.result().images[0]) == 10 + 3 * (1 + scale)


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
    assert all(len(call.prompts) == 1 for call in built.denoiser.calls)
    files = {target[0].file for target in built.merger.history if target}
    assert files == {0, 7}
    assert {target[0].file for target in built.text_merger.history if target} == ({0, 7} if text else set())


def test_sets_that_are_inputs_share_a_call_and_are_not_merged(rig):
    """Sets that the denoiser takes go with the call; one that it does not take is merged and steps without them."""
    gate = Gate()
    built = rig(gate=gate)
    built.denoiser.taken.add("a")
    first = built.ask("first", steps=3)
    gate.wait_step()
    watches = {scale: built.ask(f"p{scale}", loras=(LoraRef(name="a", scale=scale),), steps=3) for scale in (1, 2)} | {
        0: first
    }
    merged = built.ask("merged", loras=(LoraRef(name="b", scale=5),), steps=3)
    gate.release_all()
    for scale, watch in watches.items():
        assert value(watch.result().images[0]) == 10 + 3 * (1 + scale)
    assert value(merged.result().images[0]) == 10 + 3 * (1 + 5)
    calls = built.denoiser.calls
    assert (1.0, 2.0) in {tuple(sorted(call.inputs))[-2:] for call in calls}
    assert not [call for call in calls if call.loras and any(call.inputs)]
    assert {call.loras for call in calls} == {(), (LoraRef(name="b", scale=5),)}


def test_sets_that_could_go_both_ways_share_calls_or_are_merged(rig):
    """Alone a set is merged. Beside another it is an input where a call for all costs hardly more than one for each;
    either way each request gets its own images."""
    gate = Gate()
    built = rig(gate=gate)
    built.denoiser.either_way.update("ab")
    alone = built.ask("alone", loras=(LoraRef(name="a", scale=2),), steps=2)
    gate.wait_step()
    gate.let(1)
    built.merger.cost_s = 1e9  # merging never pays from here on
    others = {s: built.ask(f"p{s}", loras=(LoraRef(name="b", scale=s),), steps=3) for s in (3, 4)} | {
        0: built.ask("plain", steps=3)
    }
    gate.release_all()
    assert value(alone.result().images[0]) == 10 + 2 * (1 + 2)
    for scale, watch in others.items():
        assert value(watch.result().images[0]) == 10 + 3 * (1 + scale)
    assert [target for target in built.merger.history if target] == [(LoraRef(name="a", scale=2),)]
    assert (0.0, 3.0, 4.0) in {tuple(sorted(call.inputs)) for call in built.denoiser.calls}


def test_a_denoiser_that_takes_sets_from_now_on_gets_them_as_inputs(rig):
    """Between two steps: what was merged is restored, and the request goes on with the same images."""
    gate = Gate()
    built = rig(gate=gate)
    loras = (LoraRef(name="a", scale=2),)
    watch = built.ask("x", loras=loras, steps=4)
    gate.wait_step()
    built.engine.between_steps(lambda: built.denoiser.taken.add("a"))
    gate.let(1)
    gate.release_all()
    assert value(watch.result().images[0]) == 10 + 4 * 3
    assert built.merger.history == [loras, ()]
    assert [call.inputs for call in built.denoiser.calls] == [(0.0,), (2.0,), (2.0,), (2.0,)]


def test_more_images_than_a_batch_holds(rig):
    """Ten images with largest_batch 4 run as three units and come back in seed order."""
    built = rig(largest_batch=4)
    result = built.ask(n=10, steps=2).result()
    assert [value(image) for image in result.images] == [12 + i for i in range(10)]
    assert max(len(call.timesteps) for call in built.denoiser.calls) == 1


def test_cancel_stops_at_the_next_boundary_and_spares_batch_mates(rig):
    """After cancel at most the running step is finished for that request; the mate gets all of its own."""
    gate = Gate()
    built = rig(gate=gate)
    victim, mate = built.ask("v", steps=50), built.ask("m", steps=6)
    gate.wait_step()
    gate.let(2)
    victim.ticket.cancel()
    gate.release_all()
    with pytest.raises(Cancelled):
        victim.result()
    assert value(mate.result().images[0]) == 16
    assert len([event for event in victim.events if isinstance(event, Progress)]) <= 4


def test_a_sink_that_raises_cancels_its_request(rig):
    """A caller whose sink fails counts as gone; the engine lives on."""
    built = rig()
    calls = []

    def sink(event) -> None:
        calls.append(event)
        raise RuntimeError("gone")

    built.engine.submit(request("x", steps=1000), sink)
    assert value(built.ask(steps=2).result().images[0]) == 12
    deadline = time.monotonic() + WAIT_S
    while built.engine.statistics().cancelled == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert built.engine.statistics().cancelled == 1
    assert len(calls) < 1000


def test_a_nan_row_fails_alone(rig):
    """The row that turned NaN is an error; the other of the same call is an image."""
    gate = Gate()
    built = rig(gate=gate)
    good, bad = built.ask("g"), built.ask("nan")
    gate.wait_step()
    gate.release_all()
    with pytest.raises(NumericalError):
        bad.result()
    assert value(good.result().images[0]) == 14


def test_out_of_memory_halves_the_batch(rig):
    """A batch that does not fit is cut in half until it does; nobody fails who fits alone."""
    gate = Gate()
    built = rig(gate=gate)
    hog = built.ask("x")
    gate.wait_step()
    watches = [hog, built.ask("memory"), built.ask("y"), built.ask("z")]
    gate.release_all()
    assert [value(watch.result().images[0]) for watch in watches] == [14] * 4


def test_a_bug_in_a_step_fails_its_batch_and_not_the_engine(rig):
    """An unexpected exception reaches the callers of that batch; later requests work."""
    built = rig()
    with pytest.raises(ValueError, match="boom"):
        built.ask("boom").result()
    with pytest.raises(ValueError, match="no"):
        built.ask("unencodable").result()
    assert built.ask().result().images
    assert built.engine.alive


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
        deadline = time.monotonic() + WAIT_S
        while len([e for e in watch.events if isinstance(e, Progress)]) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        provider.arrive()
    result = watch.result()
    assert value(result.images[0]) == 10 + 2 * 1 + 4 * 3
    assert (result.lora_policy, result.lora_free_steps) == (LoraPolicy.BOUNDED_ASYNC, 2)


def test_a_text_lora_is_in_before_the_prompt_it_acts_on_is_encoded(rig):
    """EXACT encodes once with the set live; BOUNDED_ASYNC encodes again at step k with the set live."""
    loras = (LoraRef(name="t"),)
    built = rig(provider=FakeProvider(["t"], text=["t"]))
    built.ask("exact", loras=loras).result()
    built.ask("late", loras=loras, lora_policy=LoraPolicy.BOUNDED_ASYNC, lora_free_steps=1).result()
    assert built.denoiser.encoded == [("exact", loras), ("late", ()), ("late", loras)]


def test_a_lora_that_fails_to_load_or_merge_fails_its_requests_only(rig):
    """Loading and merging errors reach the request that asked; a mate without LoRAs is served."""
    built = rig(provider=FakeProvider(["bad", "unmergeable"], failing=["bad"]), broken=frozenset({"unmergeable"}))
    with pytest.raises(LoraError):
        built.ask("l", loras=(LoraRef(name="bad"),)).result()
    with pytest.raises(LoraError):
        built.ask("m", loras=(LoraRef(name="unmergeable"),)).result()
    assert value(built.ask().result().images[0]) == 14


def test_leases_are_released_on_every_way_out(rig):
    """Finished, failed and cancelled requests let go of their set exactly once."""
    gate = Gate()
    built = rig(gate=gate)
    loras = (LoraRef(name="a"),)
    done, nan, gone = (built.ask(p, loras=loras, steps=s) for p, s in (("ok", 3), ("nan", 3), ("c", 40)))
    gate.wait_step()
    gone.ticket.cancel()
    gate.release_all()
    done.result()
    for watch, error in ((nan, NumericalError), (gone, Cancelled)):
        with pytest.raises(error):
            watch.result()
    assert [lease.releases for lease in built.provider.leases] == [1, 1, 1]


def test_a_full_queue_refuses_with_a_time_to_come_back(rig):
    """Request number queue_limit + 1 is refused at once; a place frees when one ends."""
    gate = Gate()
    built = rig(gate=gate, queue_limit=2)
    first, second = built.ask("1"), built.ask("2")
    with pytest.raises(Overloaded) as refused:
        built.ask("3")
    assert refused.value.retry_after_s >= 1
    gate.release_all()
    first.result()
    second.result()
    assert built.ask("4").result().images


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


def test_previews_are_spread_over_the_steps(rig):
    """Three partial images of a twelve-step request come after steps 3, 6 and 9."""
    watch = rig().ask(steps=12, partial_images=3)
    watch.result()
    previews = [event for event in watch.events if isinstance(event, Preview)]
    assert [(preview.index, preview.step) for preview in previews] == [(0, 3), (1, 6), (2, 9)]


def test_prompts_of_different_length_run_in_one_turn(rig):
    """Prompts with different chunk counts cannot share a call but do share the turn."""
    gate = Gate()
    built = rig(gate=gate)
    short = built.ask("s")
    gate.wait_step()
    long = built.ask("w " * 25)
    gate.release_all()
    assert value(short.result().images[0]) == value(long.result().images[0]) == 14


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


def test_stop_drains_then_fails_what_is_left(rig):
    """With time to drain a request finishes; without, it fails with EngineStopped; then submit refuses."""
    drained = rig()
    watch = drained.ask(steps=3)
    drained.engine.stop(drain_s=WAIT_S)
    assert watch.result().images
    gate = Gate()
    cut = rig(gate=gate)
    victim = cut.ask(steps=100)
    gate.wait_step()
    stopper = threading.Thread(target=cut.engine.stop, kwargs={"drain_s": 0.0})
    stopper.start()
    gate.release_all()
    stopper.join(WAIT_S)
    with pytest.raises(EngineStopped):
        victim.result()
    with pytest.raises(EngineStopped):
        cut.ask()
    assert not cut.engine.alive
    assert cut.provider.closed


def test_a_dying_compute_thread_fails_its_requests(rig):
    """If the compute thread dies, callers are told and the engine says it is not alive."""

    def die() -> None:
        raise SystemExit

    built = rig(gate=die)
    with pytest.raises(EngineStopped):
        built.ask().result()
    assert not built.engine.alive


@pytest.mark.parametrize(
    ("change", "param", "kind"),
    [
        ({"width": 12}, "size", RequestError),
        ({"width": 8192, "height": 8192}, "size", RequestError),
        ({"n": 0}, "n", RequestError),
        ({"n": 11}, "n", RequestError),
        ({"steps": 0}, "num_inference_steps", RequestError),
        ({"guidance_scale": float("nan")}, "guidance_scale", RequestError),
        ({"seed": -1}, "seed", RequestError),
        ({"seed": 2**63}, "seed", RequestError),
        ({"deadline_s": 0.0}, "deadline_ms", RequestError),
        ({"partial_images": 4}, "partial_images", RequestError),
        ({"lora_free_steps": 1}, "lora_free_steps", RequestError),
        ({"loras": (LoraRef(name="../x"),)}, "loras.0.name", RequestError),
        ({"loras": (LoraRef(name="a\n"),)}, "loras.0.name", RequestError),
        ({"loras": (LoraRef(name="a"), LoraRef(name="nope"))}, "loras.1.name", NotFound),
        ({"loras": (LoraRef(name="a", scale=float("inf")),)}, "loras.0.scale", RequestError),
        ({"loras": (LoraRef(name="a"), LoraRef(name="a"))}, "loras", RequestError),
    ],
)
def test_bad_requests_are_refused_and_name_the_field(rig, change, param, kind):
    """Nothing wrong gets past the door."""
    built = rig()
    with pytest.raises(kind) as refused:
        built.ask(**change)
    assert refused.value.param == param
    assert built.engine.statistics().accepted == 0
