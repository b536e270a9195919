"""All replicas of a deployment, and the deployments of a model, most of which have no replica: without a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import cloudpickle
import httpx2
import pytest
from ray.exceptions import GetTimeoutError
from ray.serve._private.common import DeploymentID, ReplicaID

from fakes.broadcast import BroadcastHandle
from plait_serving.deployments import ingress as ingress_module
from plait_serving.deployments.handles import AllReplicas, PlacedHandle, ask
from plait_serving.deployments.ingress import Ingress
from plait_serving.http.context import HttpSettings
from plait_serving.replica_metrics import ReplicaMetrics, family, this_process
from support.prometheus import found, total
from support.waiting import until


def telling(*answers: object) -> BroadcastHandle:
    return BroadcastHandle("metric_families", *answers)


def said(name: str, steps: float, waiting: float = 0.0) -> ReplicaMetrics:
    families = [family("x_steps_total", "Steps", steps), family("x_waiting", "Waiting", waiting)]
    return ReplicaMetrics(replica=name, families=families)


async def told(replicas: AllReplicas, name: str = "x_steps_total") -> dict[str, float]:
    """What is shown of each replica."""
    families = [it for answer in await replicas.answers() for it in answer.labelled()]
    return {it.labels["replica"]: it.value for each in families for it in each.samples if it.name == name}


async def test_of_a_replica_that_is_late_only_its_queue_is_shown_as_it_was() -> None:
    """For a minute, as long as others answer. Not its counters: of two ingresses the other may have told newer ones,
    and what falls is a restart to Prometheus."""
    now = [100.0]
    handle = telling(said("a", 1, 5), said("b", 2, 6))
    replicas = AllReplicas(handle, clock=lambda: now[0])
    assert await told(replicas) == {"a": 1, "b": 2}
    handle.answers = (GetTimeoutError("late"), said("b", 3, 7))
    assert await told(replicas, "x_waiting") == {"a": 5, "b": 7}
    now[0] += 50
    assert await told(replicas, "x_waiting") == {"a": 5, "b": 7}
    assert await told(replicas) == {"b": 3}
    now[0] += 20
    assert await told(replicas, "x_waiting") == {"b": 7}
    handle.answers = (said("a", 4, 1), said("b", 3, 7))
    assert await told(replicas) == {"a": 4, "b": 3}


async def test_a_replica_that_is_gone_is_not_shown() -> None:
    """Serve knows that it died, so nothing of it is missing; nobody at all is nothing."""
    handle = telling(said("a", 1), said("b", 2))
    replicas = AllReplicas(handle)
    await told(replicas)
    handle.answers = (RuntimeError("the actor died"), said("b", 3))
    assert await told(replicas) == {"b": 3}
    handle.answers = RuntimeError("Serve knows no replica")
    assert await told(replicas) == {}


async def test_who_asks_meanwhile_gets_the_same_answers() -> None:
    """Many scrapes at once are one question to the replicas, and one that gives up does not end it."""
    handle = telling(said("a", 1))
    handle.gate.clear()
    replicas = AllReplicas(handle)
    asked = [asyncio.ensure_future(told(replicas)) for _ in range(5)]
    await until(lambda: handle.calls == 1)
    asked[0].cancel()
    handle.gate.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert answers[1:] == [{"a": 1}] * 4
    assert handle.calls == 1


async def test_a_handle_that_cannot_be_made_is_no_answer() -> None:
    """Outside of Serve, or while its controller is away, there are no others; the next time is another try."""

    def nothing() -> Any:
        raise RuntimeError("no controller")

    assert await told(AllReplicas(make=nothing)) == {}


async def test_an_ingress_tells_what_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ingresses and of other deployments. Itself it counts once, whatever the broadcast says of it; and it answers
    within a second (finding 9)."""
    handle, net = telling(said("another", 5), said(this_process(), 5), TimeoutError()), telling(said("edges", 7))
    monkeypatch.setattr(ingress_module, "AllReplicas", lambda of=None, make=None: AllReplicas(handle if make else of))
    ingress = Ingress({"controlnet-edges": net}, HttpSettings)
    app = ingress.__serve_build_asgi_app__()
    text = await scraped(app)
    assert found(text, "x_steps_total", replica="another") == [5]
    assert sorted(found(text, "x_steps_total")) == [5, 7]
    net.answers = ()
    own = await ingress.metric_families()
    assert own.replica == this_process()
    assert total(list(own.families), "plait_requests_total", route="/metrics") == 1
    handle.gate.clear()
    handle.answers = ()
    assert found(await scraped(app), "x_steps_total") == []
    assert handle.waited_s < 1.0


async def test_an_ingress_learns_of_tenants_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is new, of what is gone from the ingresses that know it; and after each request, before whoever counted
    it may go."""
    monkeypatch.setattr(ingress_module, "LOOK_S", 0.01)
    known = {("engine", "acme", "images"): 3.0}
    handle = telling(ReplicaMetrics(replica="another", families=(), account=known))
    monkeypatch.setattr(ingress_module, "AllReplicas", lambda make: AllReplicas(handle))
    ingress = Ingress({}, HttpSettings)
    app = ingress.__serve_build_asgi_app__()
    await ingress.check_health()
    async with asyncio.timeout(60.0):
        while (await ingress.metric_families()).account != known:  # noqa: ASYNC110  # nobody is told
            await asyncio.sleep(0.01)
        known[("engine", "acme", "images")] = 4.0
        while (await ingress.metric_families()).account != known:
            await scraped(app, "/version")
            await asyncio.sleep(0.01)


async def scraped(app: Any, path: str = "/metrics") -> str:
    """What GET of the path answers."""
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as client:
        return (await client.get(path)).text


class Handle:
    """Serve's handle of a deployment, as far as it matters: without replicas a broadcast fails. Serve tells a process
    of replicas once it has chosen options or a method."""

    def __init__(self, name, replicas):
        self.name, self.replicas, self.calls, self.chosen, self._router = name, replicas, Counter(), {}, None

    def options(self, **chosen):
        self.chosen = chosen
        return self.generate

    def broadcast(self, method, *arguments):
        if not self.replicas:
            raise RuntimeError("no replica")
        answers = [(self.name, number, method, *arguments) for number in range(self.replicas)]
        return SimpleNamespace(results=lambda **_: answers)

    @property
    def generate(self):
        deployment = DeploymentID(name=self.name, app_name="plait")
        replicas = {ReplicaID(str(number), deployment): None for number in range(self.replicas)}
        routing = SimpleNamespace(_request_router=SimpleNamespace(curr_replicas=replicas))
        self._router = SimpleNamespace(_asyncio_router=routing)
        return self

    def remote(self, *arguments):
        self.calls[arguments] += 1
        return self.name


def test_a_broadcast_reaches_all_replicas_of_all_deployments():
    """A deployment without replicas is no error."""
    handle = PlacedHandle({"a": Handle("a", 2), "b": Handle("b", 0), "c": Handle("c", 1)})
    found = ask(handle, "stage", "x", timeout_s=1)
    assert sorted(found) == [("a", 0, "stage", "x"), ("a", 1, "stage", "x"), ("c", 0, "stage", "x")]


def test_requests_go_only_where_replicas_are_and_follow_them():
    """The more replicas, the more requests; none to a deployment whose replicas have gone."""
    handles = {"a": Handle("a", 0), "b": Handle("b", 3), "c": Handle("c", 1)}
    handle = PlacedHandle(handles).options(stream=True)
    asked = Counter(handle.generate.remote("image") for _ in range(400))
    assert set(asked) == {"b", "c"}
    assert asked["b"] > asked["c"]
    assert all(each.chosen == {"stream": True} for each in handles.values())
    handles["b"].replicas, handles["a"].replicas = 0, 1
    assert {handle.generate.remote("image") for _ in range(100)} == {"a", "c"}
    handles["a"].replicas = handles["c"].replicas = 0
    assert handle.generate.remote("nobody") in handles  # Serve keeps it until there is a replica


def test_a_handle_can_be_pickled_before_and_while_it_is_used():
    """The application is pickled on its way to the ingress, and again there: Serve looks what a replica calls."""
    handle = PlacedHandle({"a": Handle("a", 1)})
    for _ in range(2):
        there = cloudpickle.loads(cloudpickle.dumps(handle))
        assert ask(there, "x", timeout_s=1) == [("a", 0, "x")]
        handle.generate.remote("image")
