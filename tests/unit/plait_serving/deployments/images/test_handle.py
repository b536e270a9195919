"""The ingress's image service over a Serve handle, without a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from plait_serving.deployments.images import handle
from plait_serving.deployments.images.handle import HandleImageService, translate
from plait_serving.diffusion.errors import (
    Cancelled,
    EngineError,
    EngineStopped,
    NotFound,
    NumericalError,
    Overloaded,
)
from plait_serving.diffusion.values import Failed, Finished, ImageRequest, Preview, Progress, Scheduler
from plait_serving.health import Health
from plait_serving.images.testing import fake_result

REQUEST = ImageRequest(
    request_id="r",
    prompt="x",
    width=16,
    height=16,
    steps=4,
    guidance_scale=7.5,
    seed=1,
    scheduler=Scheduler.EULER,
    partial_images=1,
)


class Response:
    """What a streaming handle call returns: plays its items; an exception among them is raised."""

    def __init__(self, items):
        self.items = list(items)
        self.cancelled = False

    def cancel(self):
        self.cancelled = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if item == "wait":
            await asyncio.sleep(3600)
        if isinstance(item, BaseException):
            raise item
        return item


class Handle:
    """A deployment handle whose calls are scripted."""

    def __init__(self, *scripts, **answers):
        self.scripts = list(scripts)
        self.responses = []
        self.generate = SimpleNamespace(remote=self._generate)
        for name, answer in answers.items():
            setattr(self, name, SimpleNamespace(remote=self._answering(answer)))

    def options(self, *, stream):
        assert stream
        return self

    def _generate(self, request):
        self.responses.append(Response(self.scripts.pop(0)))
        return self.responses[-1]

    @staticmethod
    def _answering(answer):
        async def remote():
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return remote


async def test_a_request_waits_for_a_replica_only_so_long(monkeypatch):
    """Serve would wait for as long as there is none; the client hears when to come back (finding 9)."""
    monkeypatch.setattr(handle, "CATALOG_TIMEOUT_S", 0.01)
    waiting = Handle()
    waiting.catalog = SimpleNamespace(remote=asyncio.Event().wait)
    with pytest.raises(EngineStopped, match="no engine replica answered within"):
        await HandleImageService(waiting).catalog()


def preview(index):
    return Preview(index=index, step=index, image=fake_result(REQUEST).images[0])


FINISHED = Finished(result=fake_result(REQUEST))


async def events_of(handle):
    return [event async for event in HandleImageService(handle).generate(REQUEST)]


async def test_serve_handle_passes_events_on_in_order():
    """A request's events arrive as the replica gave them, and a finished call is not cancelled."""
    handle = Handle([Progress(step=1, steps=4), preview(0), FINISHED])
    assert [type(event) for event in await events_of(handle)] == [Progress, Preview, Finished]
    assert not handle.responses[0].cancelled


async def test_serve_handle_closing_early_cancels_the_call():
    """Whoever stops reading stops the work."""
    handle = Handle([Progress(step=1, steps=4), "wait"])
    events = HandleImageService(handle).generate(REQUEST)
    await anext(events)
    await events.aclose()
    assert handle.responses[0].cancelled


async def test_serve_handle_cancelling_the_reader_cancels_the_call():
    """A cancelled task stops the work too."""
    handle = Handle(["wait"])
    task = asyncio.ensure_future(events_of(handle))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.responses[0].cancelled


async def test_serve_handle_makes_a_request_once_more_when_its_replica_died():
    """The second replica's image is the first's; previews that the client has are not sent twice."""
    handle = Handle([preview(0), ActorDiedError()], [preview(0), preview(1), FINISHED])
    events = await events_of(handle)
    assert [getattr(event, "index", None) for event in events] == [0, 1, None]
    assert isinstance(events[-1], Finished)


async def test_serve_handle_gives_up_after_the_second_death():
    """A request that kills replicas does not kill a third; the client is told."""
    handle = Handle([ActorDiedError()], [ActorDiedError()], [FINISHED])
    (event,) = await events_of(handle)
    assert isinstance(event, Failed)
    assert isinstance(event.error, EngineStopped)
    assert len(handle.responses) == 2


async def test_serve_handle_a_stream_without_an_end_is_a_failure():
    """A replica that ends its stream early never reads as success."""
    (event,) = await events_of(Handle([], []))
    assert isinstance(event, Failed)


async def test_serve_handle_errors_of_the_engine_are_events():
    """An engine error that crossed the handle is `Failed` with the same class, message and field."""
    handle = Handle([Failed(error=NumericalError("row 1 is NaN"))])
    (event,) = await events_of(handle)
    assert isinstance(event.error, NumericalError)
    assert len(handle.responses) == 1


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RayTaskError("f", "traceback", NotFound("no such", param="model")), NotFound),
        (BackPressureError(1, 1), Overloaded),
        (DeploymentUnavailableError(SimpleNamespace(name="engine", app_name="plait")), EngineStopped),
        (ActorDiedError(), EngineStopped),
        (TaskCancelledError(), Cancelled),
        (RayTaskError("f", "traceback", ValueError("bug")), EngineError),
    ],
)
def test_serve_translate_knows_what_serves_errors_mean(raised, kind):
    """Each of Ray's and Serve's errors becomes the engine error whose HTTP answer is right."""
    error = translate(raised)
    assert type(error) is kind or (kind is EngineStopped and isinstance(error, EngineStopped))
    if kind is NotFound:
        assert error.param == "model"


async def test_serve_handle_health_never_raises_and_never_hangs(monkeypatch):
    """A dead or silent replica is a reason."""
    monkeypatch.setattr("plait_serving.deployments.images.handle.HEALTH_TIMEOUT_S", 0.05)
    assert (await HandleImageService(Handle(health=Health(ready=True))).health()).ready
    dead = await HandleImageService(Handle(health=ActorDiedError())).health()
    assert not dead.ready
    assert "died" in dead.reason

    async def silent():
        await asyncio.sleep(3600)

    handle = Handle()
    handle.health = SimpleNamespace(remote=silent)
    assert "answered" in (await HandleImageService(handle).health()).reason
