"""A model whose tables are dealt to shards, as Serve deployments: the scores of one process, a shard killed, an
update."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.app import AppArgs, build
from plait_disagg.package import Package
from plait_disagg.package.manifest import TABLES
from plait_disagg.values import RankRequest
from plait_fabric.rpc.replicas import NoReplica, Replica
from plait_serving.deployments.fabric_endpoints import ServeReplicas
from plait_serving.deployments.ranking.worker import ServeRanker
from plait_serving.ranking.config import CnSection, RankingSection, RankModelSection
from support import refresh as refresh_kit
from support.asking import Answer, ask
from support.cluster import SharedServe
from support.http_rank import as_json
from support.prometheus import found
from support.waiting import until, wait_for

pytestmark = pytest.mark.cluster

PATIENCE_S = 120.0


class Deployed:
    """The running application: one model, its tables on two shards."""

    def __init__(self, shared: SharedServe, parts: Package) -> None:
        self._shared = shared
        self.parts = parts
        self.served = parts
        """The package in one process, as it is served now: tests come in any order, and one publishes an update."""

    def replica(self, deployment: str) -> Replica | None:
        """The one that answers now, if any."""
        try:
            (found,) = ServeReplicas(
                deployment, self._shared.serve.get_deployment_handle(deployment, "dealt")
            ).replicas()
        except NoReplica:
            return None
        return found

    def ranker(self) -> Any:
        """As the ingress has one."""
        return ServeRanker("parts", self._shared.serve.get_deployment_handle("cn-parts", "dealt"))

    def ask(self, path: str, body: Any = None) -> Answer:
        """Status, headers and text; a body makes it a POST."""
        return ask(f"http://127.0.0.1:{self._shared.port}{path}", body)

    def infer(self, asked: RankRequest) -> Answer:
        """What a request is answered over HTTP."""
        return self.ask("/v2/models/parts/infer", as_json(asked.tensors))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, shared_serve: SharedServe) -> Iterator[Deployed]:
    """The application on the session's Ray."""
    parts = refresh_kit.packaged(tmp_path_factory.mktemp("dealt") / "parts")
    models = {"parts": RankModelSection(folder=parts.folder, cn=CnSection(shards=2))}
    args = AppArgs(images=None, recommend=RankingSection(models=models))
    shared_serve.serve.run(build(args), name="dealt", route_prefix="/")
    made = Deployed(shared_serve, parts)
    wait_for(lambda: _answers(made))
    yield made
    shared_serve.serve.delete("dealt")


async def test_shards_give_the_scores_of_one_process(deployed: Deployed) -> None:
    """Every request has the bits of the package in one process; over HTTP it is answered as well."""
    ranker = deployed.ranker()
    await until(lambda: ranker.core.ready() is None)
    for seed in range(20):
        asked = refresh_kit.request(deployed.parts, seed, candidates=1 + seed)
        answer = await ranker.rank(asked)
        assert torch.equal(answer.outputs["score"], refresh_kit.scores(deployed.served, asked))
    await ranker.close(drain_s=1)
    asked = refresh_kit.request(deployed.parts, 3)
    answer = await asyncio.to_thread(deployed.infer, asked)
    scores = answer.json()["outputs"][0]["data"]
    assert torch.equal(torch.tensor(scores), refresh_kit.scores(deployed.served, asked))


def test_only_shards_have_rows_in_memory(deployed: Deployed) -> None:
    """A CN of a sharded model maps the tables' header and reads no row of them; a shard does."""
    cn, shard = deployed.replica("cn-parts"), deployed.replica("shard0-parts")
    assert cn is not None
    assert shard is not None
    assert _resident_bytes(cn.pid, TABLES) == 0
    assert _resident_bytes(shard.pid, TABLES) > 0


def test_a_lost_shard_is_told_and_comes_back(deployed: Deployed) -> None:
    """Without one shard requests end at once with 503 and a time to come again; the next process answers them."""
    old = deployed.replica("shard1-parts")
    assert old is not None
    os.kill(old.pid, signal.SIGKILL)
    asked = refresh_kit.request(deployed.parts, 5)
    lost = []
    until_s = time.monotonic() + PATIENCE_S
    while True:
        answer = deployed.infer(asked)
        if answer.status == 200 and lost:
            break
        if answer.status != 200:
            assert answer.status == 503, answer.text
            assert "shard 1 of parts" in answer.json()["error"]
            assert float(answer.headers["retry-after"]) >= 1
            lost.append(answer)
        assert time.monotonic() < until_s, "it never came back"
        time.sleep(0.05)
    assert torch.equal(torch.tensor(answer.json()["outputs"][0]["data"]), refresh_kit.scores(deployed.served, asked))
    new = deployed.replica("shard1-parts")
    assert new is not None
    assert new.pid != old.pid
    wait_for(lambda: _shows_both_shards(deployed, asked))


async def test_an_update_reaches_shards_and_cns_together(deployed: Deployed, tmp_path: Path) -> None:
    """Published while requests come in: each answer has the bits of the version that it names, and none is lost."""
    parts = deployed.parts
    ranker = deployed.ranker()
    await until(lambda: ranker.core.ready() is None)
    update = refresh_kit.written(tmp_path / "u", refresh_kit.update(parts, "1", "2", seed=2))
    body = {"parameters": {"update": str(update)}}
    loading = asyncio.create_task(asyncio.to_thread(deployed.ask, "/v2/repository/models/parts/load", body))
    answers = []
    while not loading.done():
        answers.append(await ranker.rank(refresh_kit.request(parts, 0)))
    assert loading.result().status == 200, loading.result().text
    answers.append(await ranker.rank(refresh_kit.request(parts, 0)))
    assert answers[-1].version == "2"
    twin = deployed.served = refresh_kit.twin(parts.folder, tmp_path / "twin")
    scores = {
        version: refresh_kit.scores(it, refresh_kit.request(it, 0)) for version, it in (("1", parts), ("2", twin))
    }
    assert [answer.version for answer in answers] == sorted(answer.version for answer in answers)
    for answer in answers:
        assert torch.equal(answer.outputs["score"], scores[answer.version])
    await ranker.close(drain_s=1)


def _resident_bytes(pid: int, file: str) -> int:
    """How much of a mapped file is in a process's memory."""
    found, mine = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        if "-" in line.split(" ", 1)[0]:
            mine = line.endswith(file)
        elif mine and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


def _shows_both_shards(made: Deployed, asked: RankRequest) -> bool:
    """Whether /metrics does, which asks the workers."""
    made.infer(asked)
    return sum(found(made.ask("/metrics").text, "plait_ranker_worker_shards", model="parts", role="cn")) == 2


def _answers(made: Deployed) -> bool:
    try:
        return made.infer(refresh_kit.request(made.parts, 1)).status == 200
    except OSError:
        return False
