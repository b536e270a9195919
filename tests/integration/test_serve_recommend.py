"""Recommendation models as Serve deployments: ranked through the real ingress, with workers that are killed with -9."""

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

from fakes import ranking_model as kit
from fakes.rank_source import TinySource
from plait.app import AppArgs, bind
from plait.config import ServerSection
from plait.deployments import INGRESS, deployments
from plait.server.ports import hold_port
from plait.tuning.measure.usage import replica_pids
from plait_disagg.errors import WorkerUnavailable
from plait_disagg.package import Package
from plait_disagg.workers.ranker import CoreRanker
from plait_fabric.rpc.replicas import Replica
from plait_serving.deployments.fabric_endpoints import ServeReplicas
from plait_serving.deployments.ranking.worker import ServeRanker
from plait_serving.ranking.config import RankingSection, RankModelSection
from support import refresh as refresh_kit
from support.asking import ask
from support.cluster import SharedServe
from support.http_rank import as_json
from support.waiting import until, wait_for

pytestmark = pytest.mark.cluster

PATIENCE_S = 120.0


class Deployed:
    """The running application: one model cut in two, one whole, no images."""

    def __init__(self, serve: Any, port: int, args: AppArgs, parts: Package, *, direct_port: int) -> None:
        self.serve = serve
        self.args = args
        self.parts = parts
        self.url = f"http://127.0.0.1:{port}"
        self.direct_url = f"http://127.0.0.1:{direct_port}"

    def deploy(self, args: AppArgs) -> None:
        """As a server does: what is bound as before is kept."""
        rows = deployments(args, ranking={"tiny": TinySource(slow_s=0.02), "small": TinySource()})
        self.serve.run(bind(rows, salt="rank"), name="rank", route_prefix="/")

    def counted(self, deployment: str, counter: str) -> dict[str, float]:
        """What each replica has counted."""
        said = self.serve.get_deployment_handle(deployment, "rank").broadcast("metric_families").results(timeout_s=60)
        return {
            each.replica: sample.value
            for each in said
            for family in each.families
            for sample in family.samples
            if sample.name == f"plait_ranker_worker_{counter}"
        }

    def replicas(self, deployment: str) -> list[Replica]:
        """The replicas that answer now."""
        return ServeReplicas(deployment, self.serve.get_deployment_handle(deployment, "rank")).replicas()

    def ingress_pids(self) -> list[int]:
        """The processes of the ingress's replicas."""
        return [pid for pid, name in replica_pids("rank", run_id=None).items() if name == INGRESS]

    def ranker(self, model: str = "tiny", role: str = "cn") -> CoreRanker:
        """As the ingress has one."""
        return ServeRanker(model, self.serve.get_deployment_handle(f"{role}-{model}", "rank"))

    def get(self, path: str, body: Any = None, *, direct: bool = False) -> tuple[int, Any]:
        """Status and JSON; a body makes it a POST. ``direct``: without Serve's proxy."""
        answer = ask((self.direct_url if direct else self.url) + path, body)
        return answer.status, answer.json()


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, shared_serve: SharedServe) -> Iterator[Deployed]:
    """The application on the session's Ray."""
    folder = tmp_path_factory.mktemp("unused")
    parts = refresh_kit.packaged(folder / "parts")
    models = {
        "tiny": RankModelSection(folder=folder),
        "small": RankModelSection(folder=folder, mode="whole"),
        "parts": RankModelSection(folder=parts.folder),
    }
    held = hold_port("127.0.0.1", 0)
    server = ServerSection(direct_port=held.getsockname()[1], drain_s=2)
    args = AppArgs(images=None, recommend=RankingSection(models=models), server=server)
    assert server.direct_port is not None
    made = Deployed(shared_serve.serve, shared_serve.port, args, parts, direct_port=server.direct_port)
    made.deploy(args)
    wait_for(lambda: _healthy(made))
    yield made
    shared_serve.serve.delete("rank")
    held.close()


async def test_both_ways_to_serve_rank_alike(deployed: Deployed) -> None:
    """Over HTTP and over the workers' own door, cut and whole, under the names of the configuration."""
    request = kit.request(3, 4)
    expected = kit.expected(request)["score"]
    body = as_json(request.tensors)
    for model, role in (("tiny", "cn"), ("small", "whole")):
        ranker = deployed.ranker(model, role)
        await until(lambda core=ranker.core: core.ready() is None)  # type: ignore[misc]
        assert (ranker.card.name, ranker.card.inputs) == (model, kit.INPUTS)
        assert torch.equal((await ranker.rank(request)).outputs["score"], expected)
        await ranker.close(drain_s=1)
        status, answer = await asyncio.to_thread(deployed.get, f"/v2/models/{model}/infer", body)
        assert status == 200, answer
        scores = next(output["data"] for output in answer["outputs"] if output["name"] == "score")
        torch.testing.assert_close(torch.tensor(scores), expected)
        directly = await asyncio.to_thread(deployed.get, f"/v2/models/{model}/infer", body, direct=True)
        assert (directly[0], directly[1]["outputs"]) == (200, answer["outputs"])
    assert deployed.get("/v1/images/generations", {"prompt": "x"})[0] == 404


@pytest.mark.parametrize("role", ["cn", "hn"])
async def test_kill_nine_costs_at_most_what_was_under_way(deployed: Deployed, role: str) -> None:
    """Requests in flight are answered or end with a clear error, none hangs; Serve brings a new worker, and later ones
    are answered."""
    ranker = deployed.ranker()
    await until(lambda: ranker.core.ready() is None)
    (old,) = deployed.replicas(f"{role}-tiny")
    asked = [asyncio.ensure_future(ranker.rank(kit.request(seed))) for seed in range(50)]
    await asyncio.sleep(0.03)
    os.kill(old.pid, signal.SIGKILL)
    outcomes = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), PATIENCE_S)
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert all(isinstance(error, WorkerUnavailable) for error in errors), errors
    await asyncio.to_thread(wait_for, lambda: _new_pid(deployed, f"{role}-tiny", old.pid))
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = await ranker.rank(kit.request(7))
            break
        except WorkerUnavailable:
            assert time.monotonic() < until_s, "the model never came back"
            await asyncio.sleep(0.2)
    torch.testing.assert_close(answer.outputs["score"], kit.expected(kit.request(7))["score"])
    await ranker.close(drain_s=1)
    await asyncio.to_thread(wait_for, lambda: deployed.get("/health")[0] == 200)


def test_an_ingress_that_dies_answers_directly_again(deployed: Deployed) -> None:
    """The next replica takes the same port, without the proxy."""
    (old,) = deployed.ingress_pids()
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: deployed.ingress_pids() not in ([], [old]))
    wait_for(lambda: _status(deployed, "/health") == 200)
    assert deployed.get("/v2/models/tiny", direct=True) == deployed.get("/v2/models/tiny")


async def test_a_refresh_reaches_all_workers_of_a_model(deployed: Deployed, tmp_path: Path) -> None:
    """Published over HTTP while requests come in: each answer is one version's, none is lost, later ones are new."""
    parts = deployed.parts
    ranker = deployed.ranker("parts")
    await until(lambda: ranker.core.ready() is None)
    made = refresh_kit.update(parts, "1", "2", seed=2)
    update = refresh_kit.written(tmp_path / "u", made)
    body = {"parameters": {"update": str(update)}}
    loading = asyncio.create_task(asyncio.to_thread(deployed.get, "/v2/repository/models/parts/load", body))
    answers = []
    while not loading.done():
        answers.append(await ranker.rank(refresh_kit.request(parts, 0)))
    assert loading.result() == (200, {"name": "parts", "version": "2"})
    answers.append(await ranker.rank(refresh_kit.request(parts, 0)))
    assert answers[-1].version == "2"
    twin = refresh_kit.twin(parts.folder, tmp_path / "twin")
    scores = {
        version: refresh_kit.scores(it, refresh_kit.request(it, 0)) for version, it in (("1", parts), ("2", twin))
    }
    assert [answer.version for answer in answers] == sorted(answer.version for answer in answers)
    for answer in answers:
        assert torch.equal(answer.outputs["score"], scores[answer.version])
    assert ranker.card.version == "2"
    (refused, told) = deployed.get("/v2/repository/models/tiny/load", body)
    assert (refused, "no package" in told["error"]) == (503, True)
    await ranker.close(drain_s=1)


def test_sockets_of_living_workers_are_there(deployed: Deployed) -> None:
    """A whole worker and both halves listen on shared memory and TCP, each with a secret of its own."""
    found = [deployed.replicas(name)[0] for name in ("cn-tiny", "hn-tiny", "whole-small")]
    assert len({replica.secret for replica in found}) == 3
    for replica in found:
        shm, tcp = replica.addresses
        assert Path(shm.removeprefix("shm://")).exists()
        assert tcp.startswith("tcp://")


def test_replicas_that_are_added_in_place_get_their_share(deployed: Deployed) -> None:
    """Nothing restarts, and once clients know of them each CN and each HN has at least two in five of 300 rankings."""
    request = kit.request(3, 4)
    body = as_json(request.tensors)
    counters = {"cn-tiny": "requests_total", "hn-tiny": "rows_total"}

    def counted() -> dict[str, dict[str, float]]:
        return {name: deployed.counted(name, counter) for name, counter in counters.items()}

    def rank(_: int = 0) -> int:
        return deployed.get("/v2/models/tiny/infer", body)[0]

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


def _status(deployed: Deployed, path: str) -> int:
    """Of the ingress's own listener; 0: nobody listens."""
    try:
        return deployed.get(path, direct=True)[0]
    except OSError:
        return 0


def _new_pid(deployed: Deployed, deployment: str, old: int) -> bool:
    try:
        return any(replica.pid != old for replica in deployed.replicas(deployment))
    except Exception:
        return False


def _healthy(made: Deployed) -> bool:
    """Whether it answers; on a busy machine Serve may have just started its proxy again, and nothing listens."""
    try:
        return made.get("/health")[0] == 200
    except OSError:
        return False
