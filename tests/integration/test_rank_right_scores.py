"""Scores over HTTP are torch's, where OpenVINO has other ideas: zeros and large integers.

The default configuration, where a program wins every trial that it may enter, and rests for none; each number of
candidates is asked often enough that its choice is made, and then from every row on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from torch import nn

from plait_disagg.dense import prepared
from plait_disagg.graph.inputs import Dense, Ids, Input
from plait_disagg.package.read import open_package
from plait_disagg.package.write import write_package
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.whole import WholeCore
from plait_kernels.executors import background
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.ranking.local import LocalRankingService, ServedRanker
from support.dense import programs_win
from support.http_rank import as_json, outputs_of
from support.rank_fabric import QUICK, Rig
from support.waiting import wait_for

BEFORE = 5  # a bucket is tried when it comes for the third time
LARGE = [2**31 - 1, 2**31, 2**33, 2**33 + 1, 2**43, 0, 1, 6]


class Model(nn.Module):
    """A model with a table, whose rows are zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(4, 2)
        nn.init.zeros_(self.items.weight)

    def zero(self, item: torch.Tensor) -> torch.Tensor:
        return self.items(item)[:, 0]


class Euler(Model):
    """Complex numbers by angle and length, as EulerNet has them."""

    def forward(self, *, item: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        angle, length = torch.atan2(y, x), 0.5 * torch.log(x**2 + y**2 + 1e-8)
        return (torch.exp(length) * torch.cos(2.0 * angle) + angle).sum(1) + self.zero(item)


class LargeIntegers(Model):
    """What int64 is for."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ends", torch.tensor([2**31, 2**33]))

    def forward(self, *, item: torch.Tensor, t: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "seventh": (t // 7).float() + self.zero(item),
            "rest": (t % 7).float(),
            "equal": (t == 2**33 + 1).float(),
            "clamped": t.clamp(max=2**33).float(),
            "bucket": torch.bucketize(t, self.ends).float(),
        }


@dataclass(frozen=True)
class Case:
    """A model, rows that no executor is wrong about, with which its choice is made, and rows of the same shapes for
    which it matters. `wanted`: what is known of these without torch."""

    module: Callable[[], nn.Module]
    inputs: tuple[Input, ...]
    tame: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    wanted: dict[str, list[float]] | None = None


CASES = {
    "euler": Case(
        Euler,
        (Dense("x", shape=(4,)), Dense("y", shape=(4,))),
        {"x": torch.rand(2, 4) + 0.5, "y": torch.rand(2, 4) + 0.5},
        {
            "x": torch.tensor([[0.0, 0.0, -1.0, 2.0], [1.0, -0.0, -3.0, 0.5]]),
            "y": torch.tensor([[0.0, 1.0, 0.0, -2.0], [0.0, 0.0, -0.0, 1.0]]),
        },
    ),
    "large": Case(
        LargeIntegers,
        (Ids("t", min=0, max=2**44),),
        {"t": torch.arange(len(LARGE))},
        {"t": torch.tensor(LARGE)},
        {"equal": [0, 0, 0, 1, 0, 0, 0, 0], "bucket": [0, 0, 1, 2, 2, 0, 0, 0]},
    ),
}


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig() as made:
        yield made


@pytest.fixture(scope="module")
def hns() -> dict[str, HnWorker]:
    """Those of the application."""
    return {}


@pytest.fixture(scope="module")
def client(rig: Rig, hns: dict[str, HnWorker], tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """All models, whole and split, in one application."""
    served = {}
    for name, case in CASES.items():
        folder: Path = tmp_path_factory.mktemp("scores") / name
        write_package(folder, case.module().eval(), (*case.inputs, Ids("item")), name=name)
        package = open_package(folder)
        whole = CoreRanker(WholeCore(package.card(), package.sparse(), package.dense(prepares=True)))
        rig.callback(lambda whole=whole: asyncio.run(whole.close(drain_s=0.5)))
        card = package.card(mode="split")
        hn = hns[name] = HnWorker(card, {"": package.dense(prepares=True)}, [rig.listen(name)])
        rig.callback(hn.stop, drain_s=0.5)
        cn = CnCore(card, package.sparse(), rig.connect(name), backoff=QUICK)
        rig.callback(cn.stop, drain_s=0.5)
        wait_for(lambda cn=cn: cn.ready() is None)  # type: ignore[misc]
        served |= {f"{name}-whole": ServedRanker(ranker=whole), f"{name}-split": ServedRanker(ranker=CoreRanker(cn))}
    return TestClient(create_app(None, HttpSettings(), ranking=LocalRankingService(served)))


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    """Between two trials is no time: every bucket has had its own."""
    monkeypatch.setattr(prepared, "REST", 0.0)


def test_an_hns_audits_are_counted(client, hns):
    """By the HN, whose replica tells it."""
    body = as_json(CASES["euler"].tame | {"item": np.array([0, 1])})
    assert client.post("/v2/models/euler-split/infer", json=body).status_code == 200
    assert hns["euler"].metrics()["audit_drifted_total"] == 0


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in CASES for mode in ("whole", "split")])
def test_scores_are_torchs(client, name, mode):
    """For one candidate, and for a hundred."""
    case = CASES[name]
    count = len(next(iter(case.rows.values())))
    module = case.module().eval()

    def ask(rows: dict[str, torch.Tensor], candidates: int, first: int) -> dict[str, np.ndarray]:
        given = {key: value[torch.arange(first, first + candidates) % count] for key, value in rows.items()}
        given["item"] = torch.arange(candidates) % 4
        with torch.no_grad():
            made = module(**given)
        body = as_json(given)
        answer = client.post(f"/v2/models/{name}-{mode}/infer", json=body)
        assert answer.status_code == 200, answer.text
        scores = outputs_of(answer)
        for key, value in (made if isinstance(made, dict) else {"score": made}).items():
            wanted = value.numpy()
            assert (np.abs(scores[key] - wanted) <= 1e-5 * np.maximum(1.0, np.abs(wanted))).all(), (key, scores)
        background.wait()
        return scores

    with programs_win():
        for candidates in (1, 100):
            for first in range(BEFORE):
                ask(case.tame, candidates, first)
            for first in range(count):
                scores = ask(case.rows, candidates, first)
                for key, known in (case.wanted or {}).items():
                    assert scores[key].tolist() == [known[at % count] for at in range(first, first + candidates)]
