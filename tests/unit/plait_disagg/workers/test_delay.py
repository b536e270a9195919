"""How long requests are on the way, and what a worker is told of their deadlines for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from unittest.mock import patch

import pytest

from fakes import ranking_model as kit
from plait_disagg.errors import DeadlinePassed
from plait_disagg.queue.jobs import RankJob
from plait_disagg.workers.remote import Delay
from support.rank_fabric import Rig

SLOW_S = 0.1


def test_a_delay_follows_what_it_saw() -> None:
    """Nothing is 0; a steady delay is itself; a varying one is above its mean."""
    steady, varying = Delay(), Delay()
    assert steady.likely_s == 0.0
    for number in range(100):
        steady.saw(0.01)
        varying.saw(0.01 + (0.005 if number % 2 else -0.005))
    assert steady.likely_s == pytest.approx(0.01, rel=1e-3)
    assert 0.012 < varying.likely_s < 0.018


def test_one_stall_is_no_delay() -> None:
    """Ten seconds, once, are not expected again, and are soon forgotten."""
    delay = Delay()
    for seconds in (*[0.01] * 100, 10.0):
        delay.saw(seconds)
    assert delay.likely_s < 0.03
    for _ in range(50):
        delay.saw(0.01)
    assert delay.likely_s == pytest.approx(0.01, rel=0.02)


async def test_a_worker_is_told_an_earlier_deadline_by_what_the_way_takes() -> None:
    """A way of 100 ms that the worker does not see; and never more than a quarter of what is left. What a deadline is
    made earlier by lies between what reaches the worker and that with the way there added."""
    told: list[float] = []
    ways: list[float] = []
    with Rig() as rig:
        core = rig.whole()
        submit = core.submit

        def late(job: RankJob) -> None:
            assert job.due_s is not None
            told.append(job.due_s)
            ways.append(time.monotonic() - asked_s)
            threading.Timer(SLOW_S, lambda: answered_later(submit, job)).start()

        with patch.object(core, "submit", late):
            rig.front(core)
            ranker = await rig.ranker()
            early: list[float] = []
            for left_s in (60.0, 60.0, 0.3):
                while len(told) == len(early):  # on a host that stands still the last one may be too late to be sent
                    asked_s = time.monotonic()
                    with suppress(DeadlinePassed):
                        await ranker.rank(dataclasses.replace(kit.request(3), deadline_s=asked_s + left_s))
                early.append(asked_s + left_s - told[-1])
    assert early[0] <= 0.0
    assert early[1] <= 0.25 * 60.0
    assert early[1] + ways[1] >= SLOW_S
    assert early[2] <= 0.25 * 0.3 < SLOW_S


def answered_later(submit: Callable[[RankJob], None], job: RankJob) -> None:
    """As if what went before had been in the channel."""
    job.came_s = time.monotonic()
    with suppress(DeadlinePassed):
        submit(job)
