"""What every `ImageService` promises, checked on the fake one and on the one over an engine in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import asdict

import numpy as np
import pytest

from fakes.engine import FakeProvider
from fakes.images import FAKE_CATALOG, FakeImageService
from plait_serving.deployments.images import hosted
from plait_serving.diffusion.errors import Cancelled, EngineStopped, LoraError, NumericalError, Overloaded
from plait_serving.diffusion.values import Edit, Failed, Finished, LoraRef, Preview, Progress
from support.engine import LocalImages, Rig, request
from support.waiting import until

STEP_S = 0.005
FAILURES = {"busy": Overloaded("full", retry_after_s=2.0), "nan": NumericalError("NaN")}


@pytest.fixture
def rig():
    """`rig(before, **more)` builds an engine of slow steps, which is stopped at the end; `before` is called with a
    request and its sink when it is submitted."""
    made = []

    def build(before=lambda asked, sink: None, **more):
        made.append(Rig(gate=lambda: time.sleep(STEP_S), **more))
        engine = made[-1].engine
        submit = engine.submit

        def submit_after(asked, sink):
            before(asked, sink)
            return submit(asked, sink)

        engine.submit = submit_after
        return made[-1]

    yield build
    for each in made:
        each.engine.stop(drain_s=0)


def local(rig):
    """The service over that engine."""
    return LocalImages(rig.engine, FAKE_CATALOG)


def refuse(asked, sink):
    """An engine that is full for some."""
    if asked.prompt == "busy":
        raise FAILURES["busy"]


@pytest.fixture(params=["fake", "local"])
def subject(request, rig):
    """A service, and a function that says how many steps it has run."""
    if request.param == "fake":
        service = FakeImageService(failures=FAILURES, step_s=STEP_S)
        return service, lambda: service.steps_run
    made = rig(refuse)
    return local(made), lambda: len(made.denoiser.calls)


async def collect(service, asked):
    return [event async for event in service.generate(asked)]


async def test_events_come_in_order_and_end_with_the_result(subject):
    """Progress counts up, previews are spread over the steps, the last event is Finished, and nothing is after it."""
    events = await collect(subject[0], request(steps=12, partial_images=3, wants_progress=True))
    assert [event.step for event in events if isinstance(event, Progress)] == list(range(1, 13))
    previews = [(event.index, event.step) for event in events if isinstance(event, Preview)]
    assert previews == [(0, 3), (1, 6), (2, 9)]
    assert [event for event in events if isinstance(event, Finished | Failed)] == events[-1:]
    assert events[-1].result.seeds == (10,)


@pytest.mark.parametrize("prompt", sorted(FAILURES))
async def test_errors_arrive_as_failed(subject, prompt):
    """Refusals at the door and failures later are both events, never exceptions."""
    last = (await collect(subject[0], request(prompt)))[-1]
    assert isinstance(last, Failed)
    assert type(last.error) is type(FAILURES[prompt])


async def test_nothing_starts_before_the_first_read(subject):
    """A generator that is never read costs nothing."""
    service, steps_run = subject
    events = service.generate(request())
    await asyncio.sleep(3 * STEP_S)
    assert steps_run() == 0
    await events.aclose()


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_leaving_cancels_within_a_step(subject, how):
    """After `aclose`, or where the task that reads is cancelled in mid-wait, at most one more step runs."""
    service, steps_run = subject
    events = service.generate(request(steps=100, wants_progress=True))
    if how == "closed":
        while getattr(await anext(events), "step", 0) < 2:
            pass
        await events.aclose()
    else:
        task = asyncio.create_task(collect(service, request(steps=100)))
        await until(lambda: steps_run() >= 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    before = steps_run()
    await asyncio.sleep(10 * STEP_S)
    assert steps_run() <= before + 1


async def test_requests_run_side_by_side(subject):
    """Several requests at once all finish, each with its own result."""
    results = await asyncio.gather(*(collect(subject[0], request(request_id=f"r{i}")) for i in range(8)))
    assert [events[-1].result.request_id for events in results] == [f"r{i}" for i in range(8)]


# --- the local service alone -------------------------------------------------------------------------------------


async def test_a_reader_that_goes_during_submit_leaves_no_work_behind(rig):
    """Submitting runs in a thread; if the reader is cancelled meanwhile, the ticket is cancelled when it comes."""
    submitting, may_submit = threading.Event(), threading.Event()

    def wait(asked, sink):
        submitting.set()
        assert may_submit.wait(60)

    made = rig(wait)
    task = asyncio.create_task(collect(local(made), request(steps=100)))
    await until(submitting.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_submit.set()
    await until(lambda: made.engine.statistics().cancelled == 1)


async def test_a_full_queue_and_a_stop_are_told(rig):
    """With the time to come back; who still waits when the engine stops, and who comes later, hears that."""
    made = rig(queue_limit=1)
    service = local(made)
    running = asyncio.create_task(collect(service, request(steps=1000)))
    await until(lambda: bool(made.denoiser.calls))
    full = (await collect(service, request()))[-1].error
    assert isinstance(full, Overloaded)
    assert full.retry_after_s >= 1
    await asyncio.to_thread(made.engine.stop, drain_s=0)
    for events in (await running, await collect(service, request())):
        assert isinstance(events[-1].error, EngineStopped)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"loras": (LoraRef(name="unreadable"),)}, LoraError),
        ({"loras": (LoraRef(name="unmergeable"),)}, LoraError),
        ({"prompt": "nan"}, NumericalError),
        ({"prompt": "boom", "width": 24}, ValueError),  # of another size, as all requests of a call fail with it
        ({"prompt": "unencodable"}, ValueError),
    ],
    ids=str,
)
async def test_what_goes_wrong_fails_its_request_alone(rig, fields, error):
    """While a LoRA loads or is merged, in the model, in a text encoder."""
    provider = FakeProvider(["unreadable", "unmergeable"], failing=["unreadable"])
    service = local(rig(provider=provider, broken=frozenset({"unmergeable"})))
    failed, fine = await asyncio.gather(*(collect(service, request(**each)) for each in (fields, {"steps": 30})))
    assert isinstance(failed[-1].error, error)
    assert isinstance(fine[-1], Finished)


async def test_leaving_gives_up_a_lora_that_still_loads(rig):
    """The request is cancelled without ever running."""
    provider = FakeProvider(["slow"], held=["slow"])
    made = rig(provider=provider)
    task = asyncio.create_task(collect(local(made), request(loras=(LoraRef(name="slow"),))))
    await until(lambda: bool(provider.waiting))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: made.engine.statistics().cancelled == 1)
    assert made.denoiser.calls == []


GREY = np.full((16, 16, 3), 40, np.uint8)


async def test_an_edit_starts_from_its_image_and_is_counted(rig):
    """The arithmetic denoiser adds 1 per step: the image, its noise (the seed) and the steps that run; outside the
    mask the image. Usage and timings count what ran."""
    made, mask = rig(), np.zeros((16, 16), np.uint8)
    mask[:, :8] = 255
    edit = Edit(image=GREY, mask=mask, strength=0.5)
    result = (await collect(local(made), request(steps=10, edit=edit)))[-1].result
    (image,) = result.images
    assert set(image[:, :8].reshape(-1)) == {40 + 10 + 5}
    assert set(image[:, 8:].reshape(-1)) == {40}
    used = made.engine.usage()["default"]
    assert (used.images, used.steps) == (1, 5)
    times = asdict(result.timings)
    assert times["denoise_s"] >= 5 * STEP_S
    assert times.pop("total_s") == pytest.approx(sum(times.values()))


async def test_an_image_is_encoded_between_steps_of_others(rig):
    """While one request steps, the images of four edits are encoded one after the other, never two in a row once the
    time of a turn is over."""
    order, asked, now_s = [], [], [0.0]
    made = rig(lambda *given: asked.append(given), largest_batch=16, clock=lambda: now_s[0])
    encode, predict = made.denoiser.encode, made.denoiser.predict

    def slow(image):
        order.append("encode")
        now_s[0] += 0.3
        return encode(image)

    def step(calls):
        order.append("step")
        now_s[0] += STEP_S
        while len(asked) < 5:  # what is running does not end before the others have come
            time.sleep(0.001)
        return predict(calls)

    made.denoiser.encode, made.denoiser.predict = slow, step
    service = local(made)
    running = asyncio.create_task(collect(service, request(steps=400)))
    await until(lambda: "step" in order)
    edits = [request(f"edit {i}", edit=Edit(image=GREY)) for i in range(4)]
    answers = await asyncio.gather(*(collect(service, each) for each in edits))
    assert all(isinstance(events[-1], Finished) for events in answers)
    first, last = order.index("encode"), len(order) - order[::-1].index("encode")
    assert order.count("encode") == 4
    assert "encodeencode" not in "".join(order[first:last])
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_events_after_the_readers_loop_has_closed_are_dropped(rig):
    """An interrupted command's loop is gone when the engine tells that it cancelled: that is no error."""
    sinks = []
    made = rig(lambda asked, sink: sinks.append(sink))

    async def read_one():
        events = local(made).generate(request(wants_progress=True))
        await anext(events)
        await events.aclose()

    asyncio.run(read_one())
    sinks[0](Failed(error=Cancelled("cancelled")))


async def test_ready_only_after_the_warm_up_and_while_the_engine_lives(rig, monkeypatch):
    """Health tells the reason for each state."""
    made = rig()
    service = local(made)
    assert "warm-up" in (await service.health()).reason
    monkeypatch.setattr(hosted, "warm_up", lambda engine: 1.5)
    service.warm_up()
    assert (await service.health()).ready
    made.engine.stop(drain_s=0)
    health = await service.health()
    assert not health.ready
    assert "stopped" in health.reason
