"""What the ingress does with every answer, without a cluster."""

from __future__ import annotations

import asyncio

import pytest

from plait_serving.deployments.ingress import OpenResponses


async def test_serve_ingress_counts_open_answers():
    """Draining waits for the answers that are not sent yet, also for those that fail, and no longer than asked."""
    release = asyncio.Event()

    async def app(scope, receive, send):
        await release.wait()
        raise RuntimeError

    answers = OpenResponses()
    assert await answers.wait_until_none(0.01)
    task = asyncio.ensure_future(answers.count(app)({"type": "http"}, None, None))
    await asyncio.sleep(0)
    assert not await answers.wait_until_none(0.01)
    release.set()
    assert await answers.wait_until_none(1.0)
    with pytest.raises(RuntimeError):
        await task
