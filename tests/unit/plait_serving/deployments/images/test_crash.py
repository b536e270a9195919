"""A request that engines die with, among others and before newcomers: the real handle over engines on fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from plait_serving.deployments.images.engine_source import Accepted
from plait_serving.deployments.images.handle import HandleImageService
from plait_serving.diffusion.errors import EngineStopped, KillsReplicas
from plait_serving.diffusion.values import Event, Failed, Finished, ImageRequest
from plait_serving.images.local import LocalImageService
from support.engine import Gate, Rig, request
from support.waiting import until

IN_FLIGHT, NEWCOMERS, CULPRIT = 8, 48, 3


class DiesOf(BaseException):
    """What a prompt does to the process of its engine."""


class Replicas:
    """Stands for Serve's handle: one engine at a time, which a prompt kills; then there is another one."""

    def __init__(self) -> None:
        self.rigs: list[Rig] = []
        self.gates: list[Gate] = []
        self.generate = SimpleNamespace(remote=self._remote)
        self.start()

    def options(self, *, stream: bool) -> Replicas:
        """Be the streaming handle as well."""
        assert stream
        return self

    def start(self) -> None:
        """Start the next engine; it stands before its first step."""
        gate = Gate()
        rig = Rig(gate=gate)
        predict, loop, gone = rig.denoiser.predict, asyncio.get_running_loop(), asyncio.Event()

        def lethal(calls: Any) -> Any:
            if not any(float(call.conditioning.text[0, 0, 0]) == 2.0 for call in calls):  # "boom"
                return predict(calls)
            gate()
            loop.call_soon_threadsafe(self._die, gone)
            raise DiesOf

        rig.denoiser.predict = lethal
        rig.gone = gone
        self.rigs.append(rig)
        self.gates.append(gate)

    def _die(self, gone: asyncio.Event) -> None:
        gone.set()
        self.start()

    def _remote(self, asked: ImageRequest) -> Any:
        rig = self.rigs[-1]
        events = LocalImageService(engine=rig.engine, catalog=lambda: None).generate(asked)
        return _Response(events, rig.gone)


class _Response:
    """The events of a call, until its engine's process is gone."""

    def __init__(self, events: AsyncGenerator[Event, None], gone: asyncio.Event) -> None:
        self._events, self._gone, self._accepted = events, gone, False

    def cancel(self) -> None:
        """Do nothing: nobody leaves."""

    def __aiter__(self) -> _Response:
        return self

    async def __anext__(self) -> object:
        if not self._accepted:
            self._accepted = True
            return Accepted()
        event, gone = (asyncio.ensure_future(it) for it in (anext(self._events, None), self._gone.wait()))
        await asyncio.wait((event, gone), return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if self._gone.is_set() or event.result() is None:
            event.cancel()
            raise ActorDiedError
        return event.result()


@pytest.fixture
async def replicas() -> AsyncGenerator[Replicas, None]:
    """One engine at a time."""
    made = Replicas()
    yield made
    for rig, gate in zip(made.rigs, made.gates, strict=True):
        gate.release_all()
        rig.engine.stop(drain_s=0)


async def test_of_eight_in_flight_and_48_newcomers_only_the_cause_fails(replicas: Replicas) -> None:
    """All others end well, whatever came between, and are not refused from then on. Two engines die of it; each of
    those that were in flight takes its first step alone, and goes before the newcomers."""
    service = HandleImageService(replicas)

    async def end_of(i: int) -> Event:
        prompt = "boom" if i == CULPRIT else str(i)
        asked = request(prompt, request_id=str(i), steps=9 if i < IN_FLIGHT else 3)
        return [event async for event in service.generate(asked)][-1]

    ends = [asyncio.ensure_future(end_of(i)) for i in range(IN_FLIGHT)]
    await asyncio.to_thread(replicas.gates[0].wait_step)
    await until(lambda: replicas.rigs[0].engine.statistics().accepted == IN_FLIGHT)
    replicas.gates[0].release_all()
    await until(lambda: len(replicas.rigs) == 2)
    ends += [asyncio.ensure_future(end_of(IN_FLIGHT + i)) for i in range(NEWCOMERS)]
    await until(lambda: replicas.rigs[1].engine.statistics().accepted == NEWCOMERS + 1)
    replicas.gates[1].release_all()
    await until(lambda: len(replicas.rigs) == 3)
    replicas.gates[2].release_all()
    found = await asyncio.gather(*ends)
    assert [i for i, end in enumerate(found) if not isinstance(end, Finished)] == [CULPRIT]
    assert isinstance(found[CULPRIT], Failed)
    assert isinstance(found[CULPRIT].error, EngineStopped)
    assert len(replicas.rigs) == 3
    tried = [call.timesteps for rig in replicas.rigs[1:] for call in rig.denoiser.calls if 9 in call.timesteps]
    assert set(tried) == {(9,)}
    assert isinstance((await end_of(CULPRIT)).error, KillsReplicas)
    assert isinstance(await end_of(0), Finished)
