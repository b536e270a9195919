"""How long requests are on the way, and what a worker is told of their deadlines for it."""

from __future__ import annotations

import dataclasses
import time

import pytest

from fakes import ranking_model as kit
from plait_disagg.queue.jobs import RankJob
from plait_disagg.workers import remote
from plait_disagg.workers.remote import Delay
from support.rank_fabric import Rig


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


class Way(Delay):
    """A delay that a test sets; it keeps what it saw."""

    likely_s = 0.0
    seen: list[float]

    def saw(self, seconds: float) -> None:
        self.seen.append(seconds)


async def test_a_worker_is_told_an_earlier_deadline_by_what_the_way_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never by more than a quarter of what is left; what an answer took beyond the worker's own time is the way."""
    told: list[tuple[float, float]] = []
    monkeypatch.setattr(remote, "Delay", Way)
    monkeypatch.setattr(Way, "seen", [], raising=False)
    with Rig() as rig:
        core = rig.whole()
        submit = core.submit

        def noted(job: RankJob) -> None:
            assert job.due_s is not None
            told.append((job.due_s, time.monotonic()))
            submit(job)

        monkeypatch.setattr(core, "submit", noted)
        rig.front(core)
        ranker = await rig.ranker()
        for likely_s, early_s in ((1.0, 1.0), (100.0, 15.0)):
            monkeypatch.setattr(Way, "likely_s", likely_s)
            asked_s = time.monotonic()
            answer = await ranker.rank(dataclasses.replace(kit.request(3), deadline_s=asked_s + 60.0))
            took_s = time.monotonic() - asked_s
            due_s, came_s = told.pop()
            assert early_s - (came_s - asked_s) <= asked_s + 60.0 - due_s <= early_s + 1e-6
            assert Way.seen.pop() <= took_s - answer.timings.total_s + 1e-6
