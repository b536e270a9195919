"""What every `ImageService` promises, checked on the fake one and on the one over an engine in this process."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fakes.images import FAKE_CATALOG, FakeImageService, fake_image, fake_result
from plait_serving.diffusion.errors import Cancelled, EngineStopped, Overloaded
from plait_serving.diffusion.values import Failed, Finished, ImageRequest, Preview, Progress, Scheduler
from plait_serving.images.local import LocalImageService
from support.waiting import until

STEP_S = 0.005


class ThreadEngine:
    """An engine of the real one's shape: a thread per request, events from that thread, cancel at a step boundary."""

    def __init__(self, failures):
        self.failures = failures
        self.alive = True
        self.steps_run = 0
        self.cancels = 0
        self.submitting, self.may_submit = threading.Event(), threading.Event()
        self.may_submit.set()

    def submit(self, request, sink):
        self.submitting.set()
        assert self.may_submit.wait(60)
        error = self.failures.get(request.prompt)
        if isinstance(error, Overloaded):
            raise error
        stop = threading.Event()
        threading.Thread(target=self._run, args=(request, sink, stop, error), daemon=True).start()
        engine = self

        class Ticket:
            def cancel(self):
                engine.cancels += 1
                stop.set()

        return Ticket()

    def _run(self, request, sink, stop, error):
        for step in range(request.steps):
            if stop.wait(STEP_S):
                sink(Failed(error=Cancelled("cancelled")))
                return
            self.steps_run += 1
            if error is not None:
                sink(Failed(error=error))
                return
            sink(Progress(step=step + 1, steps=request.steps))
            if request.partial_images and step == 0:
                sink(Preview(index=0, step=1, image=fake_image(request, 0)))
        sink(Finished(result=fake_result(request)))


def request(**changes):
    values = {
        "request_id": "r", "prompt": "x", "width": 16, "height": 16, "steps": 4, "guidance_scale": 1.0, "seed": 3,
        "scheduler": Scheduler.EULER,
    }  # fmt: skip
    return ImageRequest(**{**values, **changes})


FAILURES = {"busy": Overloaded("full", retry_after_s=2.0), "stopped": EngineStopped("bye")}


@pytest.fixture(params=["fake", "local"])
def subject(request):
    """A service, and a function that says how many steps it has run."""
    if request.param == "fake":
        service = FakeImageService(failures=FAILURES, step_s=STEP_S)
        return service, lambda: service.steps_run
    engine = ThreadEngine(FAILURES)
    return LocalImageService(engine=engine, catalog=lambda: FAKE_CATALOG), lambda: engine.steps_run


async def collect(service, asked):
    return [event async for event in service.generate(asked)]


async def test_events_come_in_order_and_end_with_the_result(subject):
    """Progress counts up, the last event is Finished, and there is nothing after it."""
    events = await collect(subject[0], request(partial_images=1))
    assert [event.step for event in events if isinstance(event, Progress)] == [1, 2, 3, 4]
    assert sum(isinstance(event, Preview) for event in events) == 1
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Finished | Failed) for event in events) == 1
    assert events[-1].result.seeds == (3,)


@pytest.mark.parametrize("prompt", ["busy", "stopped"])
async def test_errors_arrive_as_failed(subject, prompt):
    """Refusals at the door and failures later are both events, never exceptions."""
    last = (await collect(subject[0], request(prompt=prompt)))[-1]
    assert isinstance(last, Failed)
    assert last.error is FAILURES[prompt]


async def test_nothing_starts_before_the_first_read(subject):
    """A generator that is never read costs nothing."""
    service, steps_run = subject
    events = service.generate(request())
    await asyncio.sleep(3 * STEP_S)
    assert steps_run() == 0
    await events.aclose()


async def test_closing_cancels_within_a_step(subject):
    """After `aclose` at most one more step runs."""
    service, steps_run = subject
    events = service.generate(request(steps=1000))
    async for event in events:
        if isinstance(event, Progress) and event.step == 2:
            break
    await events.aclose()
    before = steps_run()
    await asyncio.sleep(10 * STEP_S)
    assert steps_run() <= before + 1


async def test_cancelling_the_reader_cancels_within_a_step(subject):
    """The task that reads is cancelled in mid-wait: the work ends too."""
    service, steps_run = subject
    task = asyncio.create_task(collect(service, request(steps=1000)))
    await until(lambda: steps_run() >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = steps_run()
    await asyncio.sleep(10 * STEP_S)
    assert steps_run() <= before + 1


async def test_requests_run_side_by_side(subject):
    """Several requests at once all finish, each with its own result."""
    results = await asyncio.gather(*(collect(subject[0], request(request_id=f"r{i}", seed=i)) for i in range(8)))
    assert [events[-1].result.request_id for events in results] == [f"r{i}" for i in range(8)]


async def test_catalog_health_and_metrics_answer(subject):
    """The three questions are answered with their types."""
    service, _ = subject
    assert await service.catalog() == FAKE_CATALOG
    assert isinstance((await service.health()).ready, bool)
    assert {family.type for it in await service.counts() for family in it.families} <= {"counter", "gauge"}


# --- the local service alone -------------------------------------------------------------------------------------


async def test_a_reader_that_goes_during_submit_leaves_no_work_behind():
    """Submitting runs in a thread; if the reader is cancelled meanwhile, the ticket is cancelled when it comes."""
    engine = ThreadEngine({})
    engine.may_submit.clear()
    service = LocalImageService(engine=engine, catalog=lambda: FAKE_CATALOG)
    task = asyncio.create_task(collect(service, request(steps=1000)))
    await until(engine.submitting.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    engine.may_submit.set()
    await until(lambda: bool(engine.cancels))
    before = engine.steps_run
    await asyncio.sleep(10 * STEP_S)
    assert engine.steps_run <= before + 1


def test_events_after_the_readers_loop_has_closed_are_dropped():
    """An interrupted command's loop is gone when the engine tells that it cancelled: that is no error."""
    sinks = []

    class LateEngine(ThreadEngine):
        def submit(self, request, sink):
            sinks.append(sink)
            return super().submit(request, sink)

    async def read_one():
        service = LocalImageService(engine=LateEngine({}), catalog=lambda: FAKE_CATALOG)
        events = service.generate(request(steps=3))
        await anext(events)
        await events.aclose()

    asyncio.run(read_one())
    sinks[0](Failed(error=Cancelled("cancelled")))


async def test_a_finished_request_is_not_cancelled():
    """The ticket of a request that ended is left alone."""
    engine = ThreadEngine({})
    await collect(LocalImageService(engine=engine, catalog=lambda: FAKE_CATALOG), request())
    assert engine.cancels == 0


async def test_ready_only_after_the_warm_up_and_while_the_engine_lives():
    """Health tells the reason for each state."""
    engine = ThreadEngine({})
    service = LocalImageService(engine=engine, catalog=lambda: FAKE_CATALOG)
    assert "warm-up" in (await service.health()).reason
    service.warmed_up(1.5)
    assert (await service.health()).ready
    engine.alive = False
    health = await service.health()
    assert not health.ready
    assert "stopped" in health.reason
