"""Recommendation models as Serve deployments: one cut in two, one whole, one whose tables are dealt to shards. Ranked
through the real ingress, updated while they serve, with workers that are killed with -9."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.app import AppArgs, bind
from plait.config import ServerSection
from plait.deployments import deployments
from plait.server.ports import hold_port
from plait.tuning.measure.usage import replica_pids
from plait_disagg.errors import WorkerUnavailable
from plait_disagg.package.manifest import TABLES
from plait_disagg.package.read import Package
from plait_disagg.values import RankRequest
from plait_disagg.workers.ranker import CoreRanker
from plait_fabric.rpc.replicas import NoReplica, Replica
from plait_serving.deployments import INGRESS
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
    """The running application, without images."""

    def __init__(self, shared: SharedServe, args: AppArgs, parts: Package) -> None:
        self.serve = shared.serve
        self.args = args
        self.parts = parts
        self.served = parts
        """The package in one process, as it is served now: tests come in any order, and one publishes an update."""
        self.url = f"http://127.0.0.1:{shared.port}"
        self.direct_url = f"http://127.0.0.1:{args.server.direct_port}"

    def deploy(self, args: AppArgs) -> None:
        """As a server does: what is bound as before is kept."""
        self.serve.run(bind(deployments(args), salt="rank"), name="rank", route_prefix="/")

    def handle(self, deployment: str) -> Any:
        """Serve's."""
        return self.serve.get_deployment_handle(deployment, "rank")

    def counted(self, deployment: str, counter: str) -> dict[str, float]:
        """What each replica has counted."""
        return {
            each.replica: sample.value
            for each in self.handle(deployment).broadcast("metric_families").results(timeout_s=60)
            for family in each.families
            for sample in family.samples
            if sample.name == f"plait_ranker_worker_{counter}"
        }

    def replicas(self, deployment: str) -> list[Replica]:
        """The replicas that answer now."""
        try:
            return ServeReplicas(deployment, self.handle(deployment)).replicas()
        except NoReplica:
            return []

    def ingress_pids(self) -> list[int]:
        """The processes of the ingress's replicas."""
        return [pid for pid, name in replica_pids("rank", run_id=None).items() if name == INGRESS]

    async def ranker(self, model: str = "tiny", role: str = "cn") -> CoreRanker:
        """As the ingress has one, once it is ready."""
        ranker = ServeRanker(model, self.handle(f"{role}-{model}"))
        await until(lambda: ranker.core.ready() is None)
        return ranker

    def ask(self, path: str, body: Any = None, *, direct: bool = False) -> Answer:
        """A body makes it a POST. ``direct``: without Serve's proxy."""
        return ask((self.direct_url if direct else self.url) + path, body)

    def infer(self, request: RankRequest, model: str = "parts") -> Answer:
        """What a request is answered over HTTP."""
        return self.ask(f"/v2/models/{model}/infer", as_json(request.tensors))

    def answers(self, path: str, *, direct: bool = False) -> bool:
        """Whether it does, and well; where nobody listens it does not, be it Serve's proxy, which a busy machine may
        have just started again."""
        try:
            return self.ask(path, direct=direct).status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, shared_serve: SharedServe) -> Iterator[Deployed]:
    """The application on the session's Ray."""
    folder = tmp_path_factory.mktemp("packages")
    parts = refresh_kit.packaged(folder / "parts")
    tiny, small = (refresh_kit.copied(parts, folder / name) for name in ("tiny", "small"))
    slow = CnSection.model_validate({"knobs": {"batch_wait_ms": 50.0}})
    models = {
        "tiny": RankModelSection(folder=tiny, executor="torch", cn=slow),
        "small": RankModelSection(folder=small, executor="torch", mode="whole"),
        "parts": RankModelSection(folder=parts.folder, cn=CnSection(shards=2)),
    }
    held = hold_port("127.0.0.1", 0)
    server = ServerSection(direct_port=held.getsockname()[1], drain_s=2)
    args = AppArgs(images=None, recommend=RankingSection(models=models), server=server)
    made = Deployed(shared_serve, args, parts)
    made.deploy(args)
    wait_for(lambda: made.answers("/health"))
    yield made
    shared_serve.serve.delete("rank")
    held.close()


def _scores(answer: Answer) -> torch.Tensor:
    assert answer.status == 200, answer.text
    return torch.tensor(next(output["data"] for output in answer.json()["outputs"] if output["name"] == "score"))


async def test_all_ways_to_serve_rank_alike(deployed: Deployed) -> None:
    """Over HTTP and over the workers' own door: whole, cut, and with shards, which give the bits of one process."""
    request = refresh_kit.request(deployed.parts, 3, 4)
    expected = refresh_kit.scores(deployed.parts, request)
    for model, role in (("tiny", "cn"), ("small", "whole")):
        ranker = await deployed.ranker(model, role)
        assert (ranker.card.name, ranker.card.inputs) == (model, refresh_kit.INPUTS)
        assert torch.equal((await ranker.rank(request)).outputs["score"], expected)
        await ranker.close(drain_s=1)
        answer = await asyncio.to_thread(deployed.infer, request, model)
        torch.testing.assert_close(_scores(answer), expected)
        body = as_json(request.tensors)
        directly = await asyncio.to_thread(deployed.ask, f"/v2/models/{model}/infer", body, direct=True)
        assert (directly.status, directly.json()["outputs"]) == (200, answer.json()["outputs"])
    ranker = await deployed.ranker("parts")
    for seed in range(20):
        request = refresh_kit.request(deployed.parts, seed, candidates=1 + seed)
        answer = await ranker.rank(request)
        assert torch.equal(answer.outputs["score"], refresh_kit.scores(deployed.served, request))
    await ranker.close(drain_s=1)
    scores = _scores(await asyncio.to_thread(deployed.infer, request))
    assert torch.equal(scores, refresh_kit.scores(deployed.served, request))
    assert deployed.ask("/v1/images/generations", {"prompt": "x"}).status == 404
    workers = [it for name in ("cn-tiny", "hn-tiny", "whole-small") for it in deployed.replicas(name)]
    assert len({it.secret for it in workers}) == len(workers) >= 3


@pytest.mark.parametrize("role", ["cn", "hn"])
async def test_kill_nine_costs_at_most_what_was_under_way(deployed: Deployed, role: str) -> None:
    """Requests in flight are answered or end with a clear error, none hangs; Serve brings a new worker, and later ones
    are answered."""
    ranker = await deployed.ranker()
    (old,) = deployed.replicas(f"{role}-tiny")
    asked = [asyncio.ensure_future(ranker.rank(refresh_kit.request(deployed.parts, seed))) for seed in range(50)]
    await asyncio.sleep(0.03)
    os.kill(old.pid, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert all(isinstance(error, WorkerUnavailable) for error in errors), errors
    await asyncio.to_thread(wait_for, lambda: any(it.pid != old.pid for it in deployed.replicas(f"{role}-tiny")))
    until_s, later = time.monotonic() + PATIENCE_S, refresh_kit.request(deployed.parts, 7)
    while True:
        try:
            answer = await ranker.rank(later)
            break
        except WorkerUnavailable:
            assert time.monotonic() < until_s, "the model never came back"
            await asyncio.sleep(0.2)
    torch.testing.assert_close(answer.outputs["score"], refresh_kit.scores(deployed.parts, later))
    await ranker.close(drain_s=1)
    await asyncio.to_thread(wait_for, lambda: deployed.answers("/health"))


def test_an_ingress_that_dies_answers_directly_again(deployed: Deployed) -> None:
    """The next replica takes the same port, without the proxy."""
    (old,) = deployed.ingress_pids()
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: deployed.ingress_pids() not in ([], [old]))
    wait_for(lambda: deployed.answers("/health", direct=True))
    direct, proxied = (deployed.ask("/v2/models/tiny", direct=is_direct) for is_direct in (True, False))
    assert (direct.status, direct.json()) == (proxied.status, proxied.json())


def test_only_shards_have_rows_in_memory(deployed: Deployed) -> None:
    """A CN of a sharded model maps the tables' header and reads no row of them; a shard does."""
    (cn,), (shard,) = deployed.replicas("cn-parts"), deployed.replicas("shard0-parts")
    deployed.infer(refresh_kit.request(deployed.parts, 5))  # they come when they are asked for
    assert _resident_bytes(cn.pid, TABLES) == 0
    assert _resident_bytes(shard.pid, TABLES) > 0


def test_a_lost_shard_is_told_and_comes_back(deployed: Deployed) -> None:
    """Without one shard requests end at once with 503 and a time to come again; the next process answers them."""
    (old,) = deployed.replicas("shard1-parts")
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
    assert torch.equal(_scores(answer), refresh_kit.scores(deployed.served, asked))
    (new,) = deployed.replicas("shard1-parts")
    assert new.pid != old.pid
    wait_for(lambda: _shows_both_shards(deployed, asked))


async def test_an_update_reaches_all_workers_of_a_model_together(deployed: Deployed, tmp_path: Path) -> None:
    """CN, HN and shards, published over HTTP while requests come in: each answer has the bits of the version that it
    names, and none is lost."""
    parts = deployed.parts
    ranker = await deployed.ranker("parts")
    update = refresh_kit.written(tmp_path / "u", refresh_kit.update(parts, "1", "2", seed=2))
    body = {"parameters": {"update": str(update)}}
    loading = asyncio.create_task(asyncio.to_thread(deployed.ask, "/v2/repository/models/parts/load", body))
    answers = []
    while not loading.done():
        answers.append(await ranker.rank(refresh_kit.request(parts, 0)))
    assert loading.result().json() == {"name": "parts", "version": "2"}
    answers.append(await ranker.rank(refresh_kit.request(parts, 0)))
    assert answers[-1].version == ranker.card.version == "2"
    twin = deployed.served = refresh_kit.twin(parts.folder, tmp_path / "twin")
    scores = {
        version: refresh_kit.scores(it, refresh_kit.request(it, 0)) for version, it in (("1", parts), ("2", twin))
    }
    assert [answer.version for answer in answers] == sorted(answer.version for answer in answers)
    for answer in answers:
        assert torch.equal(answer.outputs["score"], scores[answer.version])
    await ranker.close(drain_s=1)


def test_replicas_that_are_added_in_place_get_their_share(deployed: Deployed) -> None:
    """Nothing restarts, and once clients know of them each CN and each HN has at least two in five of 300 rankings."""
    request = refresh_kit.request(deployed.parts, 3, 4)
    body = as_json(request.tensors)
    counters = {"cn-tiny": "requests_total", "hn-tiny": "rows_total"}

    def counted() -> dict[str, dict[str, float]]:
        return {name: deployed.counted(name, counter) for name, counter in counters.items()}

    def rank(_: int = 0) -> int:
        return deployed.ask("/v2/models/tiny/infer", body).status

    def all_serve() -> bool:
        assert rank() == 200
        grown = [
            [it for it, count in now.items() if count > before[name].get(it, 0.0)] for name, now in counted().items()
        ]
        return [len(each) for each in grown] == [2, 2]

    before = counted()
    old = {replica.pid for name in counters for replica in deployed.replicas(name)} | {*deployed.ingress_pids()}
    changed = deployed.args.model_dump()
    for role in ("cn", "hn"):
        changed["recommend"]["models"]["tiny"][role]["replicas"] = 2
    deployed.deploy(AppArgs.model_validate(changed))
    wait_for(lambda: all(len(deployed.replicas(name)) == 2 for name in counters))
    found = {replica.pid for name in counters for replica in deployed.replicas(name)} | {*deployed.ingress_pids()}
    assert old <= found
    wait_for(all_serve)
    before = counted()
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(rank, range(300))) == [200] * 300
    for name, after in counted().items():
        shares = [count - before[name][replica] for replica, count in after.items()]
        assert min(shares) >= 0.4 * (300 if name == "cn-tiny" else 300 * request.candidates), (name, shares)
    deployed.deploy(deployed.args)


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
