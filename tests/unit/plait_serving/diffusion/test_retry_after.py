"""Whether there is room when a refusal says so, in virtual time."""

from __future__ import annotations

import random
import threading

import pytest

from fakes.virtual_engine import TABLES, Virtual
from plait_serving.diffusion.errors import Overloaded
from plait_serving.diffusion.values import Tenant

FLOOD = Tenant(name="flood")
LIMIT, ASKED, WAIT_S = 24, 50, 300.0


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("steps", [(120, 120), (60, 240)], ids=["equal", "mixed"])
def test_there_is_room_when_a_refusal_says_so(table, steps):
    """A flood that fills each place at once: three in four of its refusals name the time until the next place within a
    factor of two, or the second that is the least."""
    rng = random.Random(1)
    said: list[tuple[float, float]] = []
    ratios: list[float] = []
    virtual, over = Virtual(table, queue_limit=LIMIT, queue_seconds=1e9), threading.Event()

    def come():
        number = virtual.calls
        virtual.wait_for_decodes()
        while True:
            try:
                virtual.ask(f"f{number}-{rng.random()}", FLOOD, steps=rng.choice(steps))
            except Overloaded as refused:
                said.append((virtual.now_s, refused.retry_after_s))
                break
            ratios.extend(in_s / max(1.0, virtual.now_s - at_s) for at_s, in_s in said)
            said.clear()
        if number < ASKED * 20:
            virtual.at[number + 20] = come
        else:
            over.set()

    virtual.ask("first", FLOOD, steps=3)
    virtual.wait_until_idle(WAIT_S)
    virtual.at[virtual.calls + 1] = come
    virtual.ask("second", FLOOD, steps=3)
    assert over.wait(WAIT_S)
    virtual.rig.engine.stop(drain_s=0)
    assert len(ratios) > ASKED / 2
    right = sum(0.499 <= ratio <= 2.0 for ratio in ratios)
    assert right >= 0.75 * len(ratios), sorted(ratios)
