"""The metrics of all replicas of a deployment, without a cluster."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from ray.exceptions import GetTimeoutError

from plait_serving.deployments.ingress import Ingress
from plait_serving.deployments.metrics import AllReplicas, MetricsText, this_process
from plait_serving.http.context import HttpSettings


class Handle:
    """A handle whose broadcast answers what a test has set."""

    def __init__(self, *answers: Any) -> None:
        self.answers: Any = answers
        self.calls = 0
        self.gate = threading.Event()
        self.gate.set()

    def broadcast(self, method: str) -> Handle:
        """What Serve's handle does."""
        assert method == "metrics_text"
        self.calls += 1
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool) -> Any:
        """Waits on a thread."""
        assert return_exceptions
        self.gate.wait(timeout_s)
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers


def text(name: str, value: object) -> MetricsText:
    return MetricsText(replica=name, text=f"x {value}\n")


async def test_a_replica_that_is_late_is_shown_as_it_was() -> None:
    """For a minute, as long as others answer: a gap in a counter reads as a restart."""
    now = [100.0]
    handle = Handle(text("a", 1), text("b", 2))
    replicas = AllReplicas(lambda: handle, clock=lambda: now[0])
    assert await replicas.texts() == {"a": "x 1\n", "b": "x 2\n"}
    handle.answers = (GetTimeoutError("late"), text("b", 3))
    assert await replicas.texts() == {"a": "x 1\n", "b": "x 3\n"}
    now[0] += 50
    assert await replicas.texts() == {"a": "x 1\n", "b": "x 3\n"}
    now[0] += 20
    assert await replicas.texts() == {"b": "x 3\n"}


async def test_a_replica_that_is_gone_is_not_shown() -> None:
    """Serve knows that it died, so nothing of it is missing; nobody at all is nothing."""
    handle = Handle(text("a", 1), text("b", 2))
    replicas = AllReplicas(lambda: handle)
    await replicas.texts()
    handle.answers = (RuntimeError("the actor died"), text("b", 3))
    assert await replicas.texts() == {"b": "x 3\n"}
    handle.answers = RuntimeError("Serve knows no replica")
    assert await replicas.texts() == {}


async def test_who_asks_meanwhile_gets_the_same_answers() -> None:
    """Many scrapes at once are one question to the replicas, and one that gives up does not end it."""
    handle = Handle(text("a", 1))
    handle.gate.clear()
    replicas = AllReplicas(lambda: handle)
    asked = [asyncio.ensure_future(replicas.texts()) for _ in range(5)]
    await asyncio.sleep(0.02)
    asked[0].cancel()
    handle.gate.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert answers[1:] == [{"a": "x 1\n"}] * 4
    assert handle.calls == 1


async def test_a_handle_that_cannot_be_made_is_no_answer() -> None:
    """Outside of Serve, or while its controller is away, there are no others; the next time is another try."""

    def nothing() -> Any:
        raise RuntimeError("no controller")

    assert await AllReplicas(nothing).texts() == {}


async def test_an_ingress_adds_what_the_others_count() -> None:
    """Itself it counts once, whatever the broadcast says of it; and it answers within a second (finding 9)."""
    ingress = Ingress(None, HttpSettings)
    app = ingress.__serve_build_asgi_app__()
    counter = '# TYPE plait_requests_total counter\nplait_requests_total{outcome="ok",route="/x"} 5.0\n'
    handle = Handle(
        MetricsText(replica="another", text=counter), MetricsText(replica=this_process(), text=counter), TimeoutError()
    )
    ingress._ingresses = AllReplicas(lambda: handle)
    assert 'plait_requests_total{outcome="ok",route="/x"} 5.0\n' in await scraped(app)
    own = await ingress.metrics_text()
    assert own.replica == this_process()
    assert 'route="/metrics"' in own.text
    handle.gate.clear()
    handle.answers = ()
    began_s = time.monotonic()
    assert 'route="/x"' not in await scraped(app)
    assert time.monotonic() - began_s < 5  # 0.7 s on a quiet host


async def scraped(app: Any) -> str:
    """What GET /metrics answers."""
    body = bytearray()
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "path": "/metrics", "raw_path": b"/metrics", "root_path": "", "scheme": "http", "query_string": b"",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        body.extend(message.get("body", b""))

    await app(scope, receive, send)
    return body.decode()
