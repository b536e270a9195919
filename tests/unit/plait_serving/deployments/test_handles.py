"""The ingress's service over Serve handles and the engine's deployment class, without a cluster."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from plait_serving.deployments.engine import EngineReplica, portable
from plait_serving.deployments.ingress import HandleImageService, OpenAnswers, translate, without_request_id
from plait_serving.diffusion.errors import (
    Cancelled,
    EngineError,
    EngineStopped,
    NotFound,
    NumericalError,
    Overloaded,
)
from plait_serving.diffusion.knobs import Knobs
from plait_serving.diffusion.values import Failed, Finished, ImageRequest, Preview, Progress, Scheduler
from plait_serving.images.service import Health
from plait_serving.images.testing import FakeImageService, fake_result
from support.fake_serve import FakeHosted

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
    """The second replica's picture is the first's; previews that the client has are not sent twice."""
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
    monkeypatch.setattr("plait_serving.deployments.ingress.HEALTH_TIMEOUT_S", 0.05)
    assert (await HandleImageService(Handle(health=Health(ready=True))).health()).ready
    dead = await HandleImageService(Handle(health=ActorDiedError())).health()
    assert not dead.ready
    assert "died" in dead.reason

    async def silent():
        await asyncio.sleep(3600)

    handle = Handle()
    handle.health = SimpleNamespace(remote=silent)
    assert "answered" in (await HandleImageService(handle).health()).reason


class Source:
    """A recipe of a given hosted engine."""

    def __init__(self, hosted):
        self.hosted = hosted

    def open(self, controlnets):
        self.controlnets = controlnets
        return self.hosted


async def test_serve_replica_streams_reconfigures_and_drains():
    """The deployment passes events on, validates knobs, and refuses requests once it drains."""
    hosted = FakeHosted(step_s=0.0)
    replica = EngineReplica(Source(hosted), {"edges": object()})
    events = [event async for event in replica.generate(REQUEST)]
    assert isinstance(events[-1], Finished)
    replica.reconfigure({"largest_batch": 3})
    assert hosted.knobs == [Knobs(largest_batch=3)]
    with pytest.raises(ValueError, match="largest_batch"):
        replica.reconfigure({"largest_batch": 0})
    assert (await replica.health()).ready
    await replica.drain(1.0)
    assert not (await replica.health()).ready
    (event,) = [event async for event in replica.generate(REQUEST)]
    assert isinstance(event.error, EngineStopped)
    replica.check_health()


async def test_serve_replica_thins_progress_and_nothing_else():
    """However fast the steps, only some progress events cross the handle; previews and the end always do."""
    replica = EngineReplica(Source(FakeHosted(step_s=0.0)), {})
    many = replace(REQUEST, steps=50, partial_images=3)
    kinds = [type(event) for event in [event async for event in replica.generate(many)]]
    assert 1 <= kinds.count(Progress) < 50
    assert kinds.count(Preview) == 3
    assert kinds[-1] is Finished
    await replica.drain(0)


async def test_serve_replica_reports_a_dead_compute_thread():
    """Serve replaces a replica whose engine died: check_health raises."""
    hosted = FakeHosted(step_s=0.0)
    replica = EngineReplica(Source(hosted), {})
    replica.check_health()
    hosted.alive = False
    with pytest.raises(RuntimeError, match="compute thread"):
        replica.check_health()
    hosted.alive = True
    await replica.drain(0)


async def test_serve_replica_cancels_the_request_of_a_closed_stream():
    """Closing the stream on the replica closes the engine's generator."""
    hosted = FakeHosted(step_s=0.01)
    replica = EngineReplica(Source(hosted), {})
    events = replica.generate(REQUEST)
    await anext(events)
    await events.aclose()
    assert hosted.service.cancelled == ["r"]
    await replica.drain(0)


def test_serve_portable_keeps_engine_errors_and_hides_bugs():
    """An error that might not pickle, or might tell too much, is reduced to its kind."""
    known = Failed(error=NotFound("x", param="model"))
    assert portable(known) is known
    hidden = portable(Failed(error=ValueError("secret")))
    assert isinstance(hidden.error, EngineError)
    assert "secret" not in hidden.error.message
    assert "ValueError" in hidden.error.message


async def answer_of(app):
    sent = []

    async def send(message):
        sent.append(message)

    await app({"type": "http"}, None, send)
    return sent


async def test_serve_ingress_leaves_the_request_id_to_the_proxy():
    """The proxy appends x-request-id; ours is taken out, everything else stays."""

    async def app(scope, receive, send):
        headers = [(b"X-Request-Id", b"abc"), (b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x"})

    start, body = await answer_of(without_request_id(app))
    assert start["headers"] == [(b"content-type", b"text/plain")]
    assert body["body"] == b"x"


async def test_serve_ingress_counts_open_answers():
    """Draining waits for the answers that are not sent yet, also for those that fail, and no longer than asked."""
    release = asyncio.Event()

    async def app(scope, receive, send):
        await release.wait()
        raise RuntimeError

    answers = OpenAnswers()
    assert await answers.wait_until_none(0.01)
    task = asyncio.ensure_future(answer_of(answers.count(app)))
    await asyncio.sleep(0)
    assert not await answers.wait_until_none(0.01)
    release.set()
    assert await answers.wait_until_none(1.0)
    with pytest.raises(RuntimeError):
        await task


async def test_serve_fake_service_is_what_the_replica_hosts():
    """The fake that the process tests use is the HTTP side's own fake."""
    assert isinstance(FakeHosted(0.0).service, FakeImageService)


async def test_serve_replica_takes_its_threads_back_from_ray(monkeypatch):
    """Ray's OMP_NUM_THREADS is gone before the engine is opened: with it, two threads burn their time in waiting."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    seen = []

    class Looks(Source):
        def open(self, controlnets):
            seen.append(os.environ.get("OMP_NUM_THREADS"))
            return super().open(controlnets)

    replica = EngineReplica(Looks(FakeHosted(step_s=0.0)), {})
    assert seen == [None]
    await replica.drain(0)
