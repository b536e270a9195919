"""kill -9 under load: a CN and an HN die and come back, while requests go on."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fakes import ranking_model as kit
from plait_disagg.errors import RankError
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from plait_fabric import Unreachable, connect, new_secret
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from support.rank_fabric import QUICK
from support.rank_processes import RankProcesses, rank_processes
from support.waiting import until

DEADLINE_S = 30.0


class Cluster:
    """Two CNs, each with a line to both of two HNs."""

    def __init__(self, folder: Path, processes: RankProcesses) -> None:
        self._processes = processes
        self.addresses = {name: f"shm://{folder}/{name}" for name in ("hn0", "hn1", "cn0", "cn1")}
        self.pids: dict[str, int] = {}
        for name in self.addresses:
            self.start(name)

    def start(self, name: str) -> None:
        """A process, perhaps a new one at the same address."""
        hns = [self.addresses["hn0"], self.addresses["hn1"]] if name.startswith("cn") else []
        slow_s = 0.001 if hns else 0.005
        self.pids[name] = self._processes.start(name[:2], self.addresses[name], *hns, slow_s=slow_s)

    def connect(self, left_out: frozenset[str]) -> ReplicaLink:
        """To a CN."""
        for name in ("cn0", "cn1"):
            if name not in left_out:
                try:
                    return ReplicaLink(
                        replica=name, channel=connect(self.addresses[name], secret=self._processes.secret)
                    )
                except Unreachable:
                    continue
        raise NoReplica("nobody listens")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """All are killed in the end."""
    with tempfile.TemporaryDirectory(prefix="rank-") as folder, rank_processes(new_secret()) as processes:
        yield Cluster(Path(folder), processes)


async def test_an_hn_and_a_cn_are_killed_under_load(cluster: Cluster) -> None:
    """No answer is wrong, and none comes, nor any error, after its deadline; what was lost with one worker is asked of
    the other, so hardly anything fails; both are used again when they are back, without a restart of anything else."""
    ranker = CoreRanker(RemoteCore("tiny", cluster.connect, replicas=2, backoff=QUICK))
    try:
        await until(lambda: ranker.metrics()["workers"] == 2)
        load = _Load(ranker)
        asking = asyncio.ensure_future(load.run())
        for victim in ("hn0", "cn0"):
            await load.goes_on(30)
            os.kill(cluster.pids[victim], signal.SIGKILL)
        await load.goes_on(30)
        for victim in ("hn0", "cn0"):
            await asyncio.to_thread(cluster.start, victim)
        await until(lambda: ranker.metrics()["workers"] == 2)
        await load.goes_on(30)
        load.going = False
        await asking
        assert (load.wrong, load.slow) == (0, 0)
        assert load.failed <= 0.05 * load.answered
    finally:
        await ranker.close(drain_s=1)


class _Load:
    """Some callers that ask without a pause, each request with a deadline."""

    def __init__(self, ranker: CoreRanker) -> None:
        self.going = True
        self.answered = self.failed = self.wrong = self.slow = 0
        self._ranker = ranker
        self._requests = [kit.request(seed, 1 + seed % 7) for seed in range(40)]
        self._expected = [kit.expected(request)["score"] for request in self._requests]

    async def run(self) -> None:
        """Until it is told to end."""
        await asyncio.gather(*(self._call(start) for start in range(8)))

    async def goes_on(self, answers: int) -> None:
        """Returns when so many more were answered."""
        wanted = self.answered + answers
        await until(lambda: self.answered >= wanted)

    async def _call(self, number: int) -> None:
        while self.going:
            number = (number + 8) % len(self._requests)
            deadline_s = time.monotonic() + DEADLINE_S
            try:
                answer = await self._ranker.rank(replace(self._requests[number], deadline_s=deadline_s))
            except RankError:
                self.failed += 1
                await asyncio.sleep(0.02)
            else:
                self.answered += 1
                close = torch.allclose(answer.outputs["score"], self._expected[number], rtol=1e-4, atol=1e-4)
                self.wrong += not close
            self.slow += time.monotonic() > deadline_s + 10.0
