"""The event loop's face of a core: outcomes reach the tasks that wait, whichever thread has them, and whenever."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from plait_disagg.errors import WorkerUnavailable
from plait_disagg.queue.jobs import Outcome, RankJob
from plait_disagg.values import ModelCard, RankAnswer, RankRequest
from plait_disagg.workers.ranker import CoreRanker


class HeldCore:
    """A core that answers when it is told to."""

    alive = True

    def __init__(self) -> None:
        self.jobs: list[RankJob] = []
        self.cancelled: list[RankJob] = []

    @property
    def card(self) -> ModelCard:
        raise WorkerUnavailable("no worker")

    def submit(self, job: RankJob) -> None:
        self.jobs.append(job)

    def cancel(self, job: RankJob) -> None:
        self.cancelled.append(job)

    def ready(self) -> str | None:
        return None

    def metrics(self) -> dict[str, float]:
        return {}

    def stop(self, *, drain_s: float) -> None:
        pass


def answer(version: int) -> RankAnswer:
    return RankAnswer(outputs={}, version=str(version))


def asked(ranker: CoreRanker, count: int) -> list[asyncio.Task[RankAnswer]]:
    request = RankRequest(request_id="r", model="m", candidates=1, tensors={})
    return [asyncio.ensure_future(ranker.rank(request)) for _ in range(count)]


def deliver_from_a_thread(ranker: CoreRanker, outcomes: Sequence[tuple[RankJob, Outcome]]) -> None:
    """Deliver one by one while the event loop, whose thread calls this, waits: it is woken and cannot come to it."""

    def each() -> None:
        for outcome in outcomes:
            ranker.deliver([outcome])

    thread = threading.Thread(target=each)
    thread.start()
    thread.join()


async def test_a_busy_loop_is_woken_once_for_all_that_arrives_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    core = HeldCore()
    ranker, loop, wakes = CoreRanker(core), asyncio.get_running_loop(), list[object]()
    wake = loop.call_soon_threadsafe

    def counted(callback: object, *args: object) -> object:
        wakes.append(callback)
        return wake(callback, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    for turn in (1, 2):
        tasks = asked(ranker, 4)
        await asyncio.sleep(0)
        lost, gone = WorkerUnavailable("the worker was lost"), tasks[1]
        answers = [answer(k) for k in range(4)]
        jobs, core.jobs = core.jobs, []
        gone.cancel()
        deliver_from_a_thread(ranker, list(zip(jobs, [answers[0], answers[1], lost, answers[3]], strict=True)))
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert [got[0], got[2], got[3]] == [answers[0], lost, answers[3]]
        assert isinstance(got[1], asyncio.CancelledError)
        assert core.cancelled == [jobs[1]]
        core.cancelled.clear()
        assert len(wakes) == turn


def test_a_loop_that_ended_before_it_took_its_outcomes_hinders_none_after_it() -> None:
    core = HeldCore()
    ranker = CoreRanker(core)

    async def ask_and_leave() -> None:
        asked(ranker, 1)
        await asyncio.sleep(0)
        deliver_from_a_thread(ranker, [(core.jobs.pop(), answer(0))])

    async def ask() -> RankAnswer:
        (task,) = asked(ranker, 1)
        await asyncio.sleep(0)
        deliver_from_a_thread(ranker, [(core.jobs.pop(), answer(1))])
        return await task

    for _ in range(2):
        asyncio.run(ask_and_leave())
        assert asyncio.run(ask()).version == "1"


def test_outcomes_for_a_closed_loop_are_dropped() -> None:
    core = HeldCore()
    ranker = CoreRanker(core)

    async def ask_and_leave() -> None:
        asked(ranker, 1)
        await asyncio.sleep(0)

    asyncio.run(ask_and_leave())
    ranker.deliver([(core.jobs.pop(), answer(0))])
