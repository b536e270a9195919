"""How long a refusal stands, and who finds out whether it still does, in virtual time; the proxy gives an ingress's to
the next requests itself, while it stands."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from plait_serving.diffusion.errors import Overloaded
from plait_serving.http.a1111 import routes as a1111
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge import refusals
from plait_serving.http.edge.refusals import (
    FIRST_TRIES,
    HELD_S,
    PACED_PATHS,
    REFUSED_HEADER,
    REPEATED_HEADER,
    TRY_S,
    RecentRefusals,
    RepeatMiddleware,
    RequestPace,
    without_repeated,
)
from plait_serving.http.images import routes as images
from plait_serving.http.images.routes import RefusingRoute
from support.http_app import AsgiCall, make_app
from support.keys import api_key
from support.prometheus import total

URL = "/v1/images/generations"
KEYS = tuple(api_key(f"sk-{name}", tenant=name) for name in ("acme", "blue"))


class Behind:
    """The ingress's application, and what reaches it."""

    def __init__(self, *failing: str) -> None:
        failures = {prompt: Overloaded("full", retry_after_s=40.0) for prompt in failing}
        self.app = make_app(FakeImageService(failures=failures), HttpSettings(api_keys=KEYS))
        self.seen: list[dict[bytes, bytes]] = []

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            self.seen.append(dict(scope["headers"]))
        await self.app(scope, receive, send)


@pytest.fixture
def now(monkeypatch):
    """Seconds of a clock that stands."""
    moment = [100.0]
    monkeypatch.setattr(refusals, "HELD_S", 1.0)
    return moment


def client_of(behind, now):
    """A client of the proxy."""
    return TestClient(RepeatMiddleware(behind, monotonic_s=lambda: now[0]))


def ask(client, *, key="acme", prompt="x", url=URL, **headers):
    return client.post(url, json={"prompt": prompt}, headers={"authorization": f"Bearer sk-{key}", **headers})


def test_a_refusal_that_stands_does_not_reach_the_ingress(now):
    """It is the ingress's own, but for the request's id."""
    behind = Behind("x")
    client = client_of(behind, now)
    first, second, third = ask(client), ask(client), ask(client, prompt="y", **{"x-request-id": "mine"})
    assert len(behind.seen) == 1
    assert [each.status_code for each in (first, second, third)] == [429, 429, 429]
    assert first.content == second.content == third.content
    assert second.headers["retry-after"] == "40"
    assert set(second.headers) == set(first.headers)
    assert REFUSED_HEADER not in first.headers
    assert third.headers["x-request-id"] == "mine"
    assert re.fullmatch(r"req_[0-9a-f]{24}", second.headers["x-request-id"])
    assert second.headers["x-request-id"] != first.headers["x-request-id"]


def test_others_are_asked_for(now):
    """Another tenant, another path, another way to ask, and a page of another origin get answers of their own."""
    behind = Behind("x")
    client = client_of(behind, now)
    ask(client)
    assert ask(client, key="blue", prompt="y").status_code == 200
    assert ask(client, key="nobody").status_code == 401
    assert ask(client, url="/v1/images/control_maps").status_code == 400
    assert client.get("/health").status_code == 200
    ask(client, origin="http://evil")
    ask(client, **{"sec-fetch-site": "same-site"})
    assert len(behind.seen) == 7


async def test_of_many_that_come_at_once_few_cross(now):
    """Before it is known that there is no room; the others get the first one's refusal."""
    crossed, first = [], asyncio.Event()

    async def slow(scope, receive, send):
        crossed.append(scope)
        await first.wait()
        await send({"type": "http.response.start", "status": 429, "headers": [(REFUSED_HEADER.encode(), b"tenant")]})
        await send({"type": "http.response.body"})

    proxy = RepeatMiddleware(slow, monotonic_s=lambda: now[0])
    calls = [AsgiCall(proxy, b"{}") for _ in range(500)]
    await asyncio.sleep(0)
    assert len(crossed) == 32
    first.set()
    for call in calls:
        await call.done()
    assert {call.status for call in calls} == {429}
    assert len(crossed) < 100


def test_a_pace_lets_some_go_ahead():
    """Four at once, then ten a second; what was not used is not saved up, and other names have their own."""
    pace = RequestPace(at_once=4, per_s=10.0)
    assert [pace.wait_s("a", 1.0) for _ in range(6)] == pytest.approx([0.0] * 4 + [0.1, 0.2], abs=1e-9)
    assert pace.wait_s("b", 1.0) == 0.0
    assert pace.wait_s("a", 1.5) == pytest.approx(0.0)
    assert [pace.wait_s("a", 100.0) for _ in range(5)] == pytest.approx([0.0] * 4 + [0.1], abs=1e-9)


def test_a_refusal_counts_as_ten_requests():
    """For a second at most, which is not saved up either; nobody else waits for it."""
    pace = RequestPace(at_once=4, per_s=10.0)
    assert pace.wait_s("a", 1.0) == 0.0
    pace.refused("a", 1.0)
    assert pace.wait_s("a", 1.0) == pytest.approx(0.8)
    for _ in range(9):
        pace.refused("a", 1.0)
    assert pace.wait_s("a", 1.0) == pytest.approx(1.1)
    assert pace.wait_s("b", 1.0) == 0.0
    assert pace.wait_s("a", 3.0) == 0.0


@pytest.mark.parametrize(("status", "crossed"), [(400, 3), (404, 3), (200, 20), (429, 20), (503, 20)])
async def test_what_is_refused_for_what_it_says_crosses_slowly(now, status, crossed):
    """Whoever sends it again and again, one after the other: the proxy and the ingress would read it all day. Answers
    that are not marked are not repeated."""
    seen = []

    async def behind(scope, receive, send):
        seen.append(scope)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body"})

    proxy = RepeatMiddleware(behind, monotonic_s=lambda: now[0])
    for _ in range(20):
        call = AsgiCall(proxy, b"{}")
        for _ in range(5):
            await asyncio.sleep(0)
        if not call.task.done():
            break
    assert len(seen) == crossed
    await call.done()
    assert call.status == status


def test_names_of_a_pace_are_bounded():
    """Those whose time is over are forgotten when there are too many (finding 12)."""
    pace = RequestPace(at_once=1, per_s=1.0, max_names=10)
    for number in range(100):
        pace.wait_s(str(number), float(10 * number))
    assert len(pace._ends_s) <= 10


def test_the_paced_paths_are_those_that_are_refused():
    """The proxy does not import the routes."""
    routes = (*images.router.routes, *a1111.making.routes)
    paths = {route.path for route in routes if isinstance(route, RefusingRoute)}
    assert paths == PACED_PATHS


def test_the_ingress_learns_how_many_were_refused(now):
    """When the refusal's time is over the next request says so, and /metrics counts them, of their tenant as well."""
    behind = Behind("x")
    client = client_of(behind, now)
    for _ in range(8):
        ask(client)
    now[0] += 1.01
    assert ask(client, prompt="y").status_code == 429  # the ingress itself, where the refusal stands as long
    assert behind.seen[-1][REPEATED_HEADER.encode()] == b"7"
    text = client.get("/metrics", headers={"authorization": "Bearer sk-acme"}).text
    assert total(text, "plait_rejected_total", reason="overloaded") == 9
    assert total(text, "plait_requests_total", outcome="refused", code="429", route=URL) == 9
    used = behind.app.state.context.metrics.used
    assert used == {("acme", "image_requests_rejected"): 8}  # the engine counts the first itself


def test_nobody_else_is_believed(now):
    """A client's own count is taken off by the proxy, and by a listener that has none before it."""
    behind = Behind()
    for app in (RepeatMiddleware(behind, monotonic_s=lambda: now[0]), without_repeated(behind)):
        ask(TestClient(app), prompt="y", **{REPEATED_HEADER: "1000"})
        assert REPEATED_HEADER.encode() not in behind.seen[-1]


def test_a_long_answer_is_passed_on_and_forgotten(now):
    """The proxy keeps refusals, not whatever somebody marks."""

    async def long(scope, receive, send):
        seen.append(scope)
        await send({"type": "http.response.start", "status": 429, "headers": [(REFUSED_HEADER.encode(), b"tenant")]})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
        await send({"type": "http.response.body"})

    seen = []
    client = client_of(long, now)
    assert [len(ask(client).content) for _ in range(2)] == [20_000, 20_000]
    assert len(seen) == 2


def test_a_refusal_holds_for_a_moment():
    """And says when it was; others are not held up."""
    now = [100.0]
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    recent.note("a", "full")
    now[0] += 0.1
    standing = recent.standing("a")
    assert (standing.refusal, standing.at_s) == ("full", 100.0)
    assert recent.standing("b") is None
    now[0] += HELD_S
    assert recent.standing("a") is None


def test_those_that_were_let_through_learn_of_a_refusal():
    """Of many that come at once the first is refused; the others are told, without using up a try."""
    now = [0.0]
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    assert [recent.standing("a") for _ in range(3)] == [None] * 3
    assert recent.held("a") is None
    recent.note("a", "full")
    assert recent.held("a").refusal == "full"
    now[0] = HELD_S
    assert [recent.held("a") for _ in range(20)] == [None] * 20
    assert [recent.standing("a") is None for _ in range(FIRST_TRIES + 1)] == [True] * FIRST_TRIES + [False]


@pytest.mark.parametrize(("took_s", "try_s"), [(0.0, TRY_S), (0.5, 1.0)])
def test_few_find_out_whether_there_is_room_again(took_s, try_s):
    """They do not pile up behind slow refusals: twice as many try only after a time without one, twice as long as the
    last took; soon after there is room nobody is held. Those who were are counted once."""
    now, tried = [0.0], []
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    recent.note("a", "full", took_s=took_s)
    for periods in (0.0, 0.9, 1.1, 2.0, 2.2, 12.0):
        now[0] = HELD_S + periods * try_s
        tried.append(sum(recent.standing("a") is None for _ in range(100)))
    assert tried == [FIRST_TRIES, 0, 2 * FIRST_TRIES, 0, 4 * FIRST_TRIES, 100]
    assert [recent.take_held("a") for _ in range(2)] == [600 - sum(tried), 0]


def test_refusals_of_many_names_are_bounded():
    """Old ones give way; with none that is old, new ones are not remembered (finding 12: dicts that only grow)."""
    now = [0.0]
    recent: RecentRefusals[int] = RecentRefusals(lambda: now[0], max_names=10)
    for name in range(50):
        recent.note(str(name), name)
    assert [name for name in range(50) if recent.standing(str(name))] == list(range(10))
    now[0] += 10.0
    recent.note("new", 1)
    assert recent.standing("new") is not None
    assert [name for name in range(50) if recent.standing(str(name))] == []
