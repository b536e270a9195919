"""What a server under test is asked for."""

from __future__ import annotations

import asyncio
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest

from plait_bench.faults import server
from plait_bench.faults.requests import image_ask


def test_the_capacity_counts_every_answer_of_clients_that_wait_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no refusal; each request here takes a tenth of a second of a clock that only they move."""
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(server, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    numbers = iter(range(1_000_000))

    async def send(_: Any) -> SimpleNamespace:
        await asyncio.sleep(0)
        clock.now_s += 0.1
        return SimpleNamespace(status=429 if next(numbers) % 5 == 4 else 200)

    asks = cycle([image_ask("image")])
    client: Any = SimpleNamespace(send=send)
    found = asyncio.run(server.capacity_per_s(client, asks, seconds=20.0, clients=8))
    assert found == pytest.approx(8.0, rel=0.05)
