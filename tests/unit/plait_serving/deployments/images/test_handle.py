"""The ingress's image service over a Serve handle, without a cluster."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from fakes.images import FAKE_CATALOG, FAKE_REQUEST, fake_result
from plait_kernels.executors.audit import AuditStatistics
from plait_serving.deployments.images import handle
from plait_serving.deployments.images.catalog_pieces import Accepted, CatalogPacker
from plait_serving.deployments.images.counted import audit_families
from plait_serving.deployments.images.handle import HandleImageService, translate
from plait_serving.diffusion.errors import (
    Cancelled,
    EngineError,
    EngineStopped,
    KillsReplicas,
    NotFound,
    NumericalError,
    Overloaded,
)
from plait_serving.diffusion.values import Failed, Finished, Preview, Progress
from plait_serving.health import Health
from plait_serving.images.service import Catalog, LoraCard
from plait_serving.replica_metrics import ReplicaMetrics
from support.prometheus import total
from support.waiting import until


class Response:
    """What a streaming handle call returns: plays its items; an exception among them is raised, a function called."""

    def __init__(self, items):
        self.items = list(items)
        self.cancelled = False

    def cancel(self):
        self.cancelled = True

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)  # others come between
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if callable(item):
            if inspect.isawaitable(waiting := item()):
                await waiting
            return await anext(self)
        if isinstance(item, BaseException):
            raise item
        return item


def for_ever():
    """Nothing comes."""
    return asyncio.sleep(3600)


class Handle:
    """A deployment handle whose calls are scripted."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.requests, self.responses = [], []
        self.generate = SimpleNamespace(remote=self._generate)

    def options(self, *, stream):
        assert stream
        return self

    def _generate(self, request):
        self.requests.append(request)
        self.responses.append(Response(self.scripts.pop(0)))
        return self.responses[-1]


class Told(Handle):
    """A handle of engines that tell catalogs: each is told by the next replica that is asked, the last one for ever."""

    def __init__(self, *answers):
        super().__init__()
        self.answers, self.known, self.asked = list(answers), [], asyncio.Event()
        self.catalog = SimpleNamespace(remote=self._tell)

    def _tell(self, known):
        self.known.append(known)
        self.asked.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not isinstance(answer, Catalog):
            return Response([answer])
        return Response(CatalogPacker(1.5).pieces(answer, known))


@pytest.fixture
def quick(monkeypatch):
    """Engines are asked again at once."""
    monkeypatch.setattr(handle, "_PERIOD_S", 0.0)


LARGER = replace(FAKE_CATALOG, loras=(*FAKE_CATALOG.loras, LoraCard(name="new", family="sd1", format="peft")))


async def test_a_request_waits_for_a_replica_only_so_long(monkeypatch):
    """Serve would wait for as long as there is none; the client hears when to come back (finding 9)."""
    monkeypatch.setattr(handle, "CATALOG_TIMEOUT_S", 0.01)
    with pytest.raises(EngineStopped, match="no engine replica answered within"):
        await HandleImageService(Told(for_ever)).catalog()


async def test_requests_ask_no_engine_for_the_catalog():
    """All get what was told, whoever leaves before it; of those who come later none waits for anything."""
    gate = asyncio.Event()
    told = Told(FAKE_CATALOG)
    told.catalog = SimpleNamespace(remote=lambda known: Response([gate.wait, *told._tell(known).items]))
    service = HandleImageService(told)
    leaver, *others = [asyncio.ensure_future(service.catalog()) for _ in range(3)]
    await told.asked.wait()
    leaver.cancel()
    gate.set()
    assert await asyncio.gather(*others) == [FAKE_CATALOG] * 2
    assert leaver.cancelled()
    for _ in range(100):
        assert await service.catalog() is await service.catalog()
    assert told.known == [""]


async def test_a_catalog_that_changes_is_told_once(quick):
    """What is known is not sent again, whichever replica is asked."""
    told = Told(FAKE_CATALOG, FAKE_CATALOG, LARGER)
    service = HandleImageService(told)
    assert await service.catalog() == FAKE_CATALOG
    while await service.catalog() != LARGER:  # noqa: ASYNC110  # nobody is told
        await asyncio.sleep(0)
    known = await service.catalog()
    count = len(told.known)
    await until(lambda: len(told.known) > count + 2)
    assert await service.catalog() is known
    assert told.known[0] == ""
    assert len(set(told.known)) == 3


async def test_a_replica_that_fails_is_news_only_to_who_has_no_catalog(quick):
    """It is told to those who wait; who knows a catalog goes on with it, until an engine tells another one."""
    failure = RayTaskError("f", "traceback", NotFound("no such"))
    told = Told(failure, FAKE_CATALOG, failure, failure, LARGER)
    service = HandleImageService(told)
    with pytest.raises(NotFound):
        await service.catalog()
    while True:
        try:
            found = await service.catalog()
        except NotFound:
            continue
        if found == LARGER:
            break
        assert found == FAKE_CATALOG
        await asyncio.sleep(0)


async def test_a_catalog_that_cannot_be_read_is_told_at_once_and_asked_for_again(quick, caplog):
    """Who asked must not wait until the time is over; the log says what was wrong, and the next one may be whole."""
    told = Told(FAKE_CATALOG)
    head, *_ = CatalogPacker(1.5).pieces(FAKE_CATALOG, "")
    answers = [Response([head, b"no catalog"])]
    told.catalog = SimpleNamespace(remote=lambda known: answers.pop() if answers else told._tell(known))
    service = HandleImageService(told)
    with pytest.raises(EngineError, match="internal error"):
        await service.catalog()
    assert "cannot be read" in caplog.text
    assert await service.catalog() == FAKE_CATALOG


async def test_a_replica_that_is_silent_or_dies_is_left_for_another(quick, monkeypatch):
    """After a moment, twice as long the next time; or at once, as nothing was begun (finding 10)."""
    monkeypatch.setattr(handle, "_PATIENCE_S", 0.01)
    told = Told(for_ever, ActorDiedError(), for_ever, ActorDiedError(), FAKE_CATALOG)
    assert await HandleImageService(told).catalog() == FAKE_CATALOG
    assert len(told.known) >= 5


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([Health(ready=True)], None),
        ([ActorDiedError(), ActorDiedError(), Health(ready=True)], None),
        ([ActorDiedError()], "answered"),
        ([for_ever], "answered"),
    ],
)
async def test_health_never_raises_and_never_hangs(monkeypatch, answers, reason):
    """A dead or silent replica is a reason. Another one is asked: Serve offers a dead one beside a living one until it
    has learned of its end (finding 10)."""
    monkeypatch.setattr(handle, "HEALTH_TIMEOUT_S", 1.0 if reason is None else 0.05)
    left = iter([*answers, *answers[-1:] * 1000])
    asked = Handle()
    asked.health = SimpleNamespace(remote=lambda: anext(Response([next(left)])))
    health = await HandleImageService(asked).health()
    assert health.ready if reason is None else reason in health.reason


def preview(index):
    return Preview(index=index, step=index, image=fake_result(FAKE_REQUEST).images[0])


FINISHED = Finished(result=fake_result(FAKE_REQUEST))


async def collect(events):
    return [event async for event in events]


async def events_of(handle):
    return await collect(HandleImageService(handle).generate(FAKE_REQUEST))


@pytest.mark.parametrize(
    "events",
    [(Progress(step=1, steps=4), preview(0), FINISHED), (Failed(error=NumericalError("row 1 is NaN")),)],
    ids=["finished", "failed"],
)
async def test_serve_handle_passes_events_on_in_order(events):
    """A request's events arrive as the replica gave them, and a call that ended is not cancelled."""
    handle = Handle(events)
    assert list(map(id, await events_of(handle))) == list(map(id, events))
    assert not handle.responses[0].cancelled


async def test_serve_handle_cancelling_the_reader_cancels_the_call():
    """A cancelled task stops the work too."""
    handle = Handle([for_ever])
    task = asyncio.ensure_future(events_of(handle))
    await until(lambda: bool(handle.responses))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert handle.responses[0].cancelled


STEP = Progress(step=1, steps=4)
DIED = [Accepted(), ActorDiedError()]


def lasting(now, seconds):
    """What a script plays for time to pass."""
    return lambda: now.__setitem__(0, now[0] + seconds)


def several(count):
    return [replace(FAKE_REQUEST, request_id=str(i), prompt=str(i)) for i in range(count)]


async def ends_of(service, requests):
    """The last event of each of them, made at once."""
    all_events = await asyncio.gather(*(collect(service.generate(request)) for request in requests))
    return [events[-1] for events in all_events]


async def test_serve_handle_makes_a_request_once_more_when_its_replica_died(monkeypatch):
    """The second replica's image is the first's; previews that the client has are not sent twice. It says since when it
    waits: by that it goes before others, and its deadline counts."""
    now = [1_000.0]
    monkeypatch.setattr(handle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    scripted = Handle([preview(0), lasting(now, 5), ActorDiedError()], [preview(0), preview(1), FINISHED])
    events = await events_of(scripted)
    assert [getattr(event, "index", None) for event in events] == [0, 1, None]
    assert isinstance(events[-1], Finished)
    first, second = scripted.requests
    assert (first.tried_again_s, second.tried_again_s) == (None, 5)
    assert second.prompt == first.prompt


async def test_serve_handle_of_eight_that_died_together_only_the_cause_fails(monkeypatch):
    """Each takes its first step while no other of them does, however long: who survives it ends well, and what another
    replica dies of is refused from then on."""
    now, trying = [1_000.0], []
    monkeypatch.setattr(handle, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def begins():
        assert trying == []
        trying.append(now[0])

    eight = several(8)
    trials = [[begins, Accepted(), lasting(now, 100), trying.clear, STEP, FINISHED] for _ in eight]
    trials[3][4:] = [ActorDiedError()]
    scripted = Handle(*[list(DIED) for _ in eight], *trials)
    service = HandleImageService(scripted)
    ends = await ends_of(service, eight)
    cause = int(scripted.requests[8 + 3].request_id)
    assert [i for i, end in enumerate(ends) if not isinstance(end, Finished)] == [cause]
    assert isinstance(ends[cause].error, EngineStopped)
    (again,) = await ends_of(service, [eight[cause]])
    assert isinstance(again.error, KillsReplicas)


async def test_serve_handle_without_a_replica_all_end_together(monkeypatch):
    """The first one waits for it in vain, and those behind it do not wait as long again; an answer begins anew."""
    now, waited, real = [1_000.0], [], asyncio.timeout

    def timeout(delay_s):
        waited.append(delay_s)
        now[0] += max(0.0, delay_s)
        return real(0.0)

    monkeypatch.setattr(handle, "time", SimpleNamespace(monotonic=lambda: now[0]))
    four = several(4)
    scripted = Handle(*[list(DIED) for _ in four], *[[for_ever] for _ in four])
    service = HandleImageService(scripted)
    running = [service.generate(request) for request in four]
    waiting = [asyncio.ensure_future(collect(events)) for events in running]
    await until(lambda: len(scripted.responses) == 5)
    monkeypatch.setattr(handle.asyncio, "timeout", timeout)
    waiting[0].cancel()
    ends = [(await task)[-1] for task in waiting[1:]]
    assert all(isinstance(end.error, EngineStopped) for end in ends)
    assert waited == [120.0, 0.0, 0.0]


async def test_serve_handle_who_dies_late_and_of_nobody_else_is_the_cause():
    """Its first step was survived, and what came after it was not, twice."""
    scripted = Handle([Accepted(), STEP, ActorDiedError()], [Accepted(), STEP, ActorDiedError()])
    service = HandleImageService(scripted)
    (end,) = await ends_of(service, [FAKE_REQUEST])
    assert isinstance(end.error, EngineStopped)
    (end,) = await ends_of(service, [FAKE_REQUEST])
    assert isinstance(end.error, KillsReplicas)


async def test_serve_handle_waits_for_a_replica_only_so_long(monkeypatch):
    """Also after the catalog: a replica that died since then may never come back (finding 9). Its queue is another
    matter."""
    monkeypatch.setattr(handle, "ACCEPT_TIMEOUT_S", 0.02)
    nobody = Handle([for_ever])
    (event,) = await events_of(nobody)
    assert isinstance(event.error, EngineStopped)
    assert event.error.retry_after_s >= 1
    assert nobody.responses[0].cancelled
    queue = Handle([Accepted(), lambda: asyncio.sleep(0.1), FINISHED])
    assert [type(event) for event in await events_of(queue)] == [Finished]


async def test_serve_handle_metrics_are_those_of_all_replicas():
    """Whichever ingress is asked, all engines are counted, each audit by its model; a dead one hides nothing, but
    without any that is an error."""
    engines, audits = Handle(), audit_families({"emoji": AuditStatistics(checked=5, drifted=1, largest=0.25)})
    answers = [*(ReplicaMetrics(replica=it, families=audits) for it in "ab"), ActorDiedError()]
    engines.broadcast = lambda _: SimpleNamespace(results=lambda **_: answers)
    counts = await HandleImageService(engines).counts()
    families = [it for answer in counts for it in answer.labelled()]
    assert total(families, "plait_audit_checked_total") == 10
    assert total(families, "plait_audit_drifted_total", model="emoji", replica="a") == 1
    assert total(families, "plait_audit_largest_share_of_tolerance", model="emoji", replica="b") == 0.25
    answers = [ActorDiedError()]
    with pytest.raises(EngineStopped):
        await HandleImageService(engines).counts()


async def test_serve_handle_a_stream_without_an_end_is_a_failure():
    """A replica that ends its stream early never reads as success."""
    (event,) = await events_of(Handle([], []))
    assert isinstance(event, Failed)


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
