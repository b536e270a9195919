"""What the ingress does with every answer, without a cluster."""

from __future__ import annotations

import asyncio

import pytest

from plait_serving.deployments.ingress import OpenResponses, without_request_id


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

    answers = OpenResponses()
    assert await answers.wait_until_none(0.01)
    task = asyncio.ensure_future(answer_of(answers.count(app)))
    await asyncio.sleep(0)
    assert not await answers.wait_until_none(0.01)
    release.set()
    assert await answers.wait_until_none(1.0)
    with pytest.raises(RuntimeError):
        await task
