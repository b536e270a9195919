"""The tiny model of `support.ranking` served over a fabric, all in this process: HNs, CNs and rankers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from fakes import ranking_model as kit
from plait_disagg.messages.layout import layout_of_crossing, layouts_of
from plait_disagg.messages.wire import VERSION, Role, card_payload, role_payload
from plait_disagg.protocols import DenseHalf, Ranker, SparseHalf
from plait_disagg.queue.jobs import Core
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import ModelCard, RankAnswer
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from plait_disagg.workers.whole import WholeCore
from plait_fabric import Channel, Listener, listen, new_secret
from plait_fabric.rpc.client import Connect
from plait_fabric.rpc.fields import greeting
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import ReplicaLink
from support.fabric import CutListener, Replicas, new_address
from support.waiting import until

Scheme = Literal["inproc", "shm", "tcp"]

QUICK = Backoff(first_s=0.01, max_s=0.05)
PATIENCE_S = 60.0

CROSSING = layout_of_crossing(kit.FakeDense.crossing, kit.INPUTS)
OUTPUTS = layouts_of(kit.CARD).outputs


def hello_header(role: Role) -> dict[str, Any]:
    """What a client sends first."""
    return greeting("hello", VERSION, role_payload(role))


def welcome_header(card: ModelCard) -> dict[str, Any]:
    """What a server sends first."""
    return greeting("welcome", VERSION, card_payload(card, CROSSING))


class Rig(ExitStack):
    """What listens, by name, and what was opened; everything is stopped at the end, the last one first."""

    def __init__(self, scheme: Scheme = "inproc") -> None:
        super().__init__()
        self.scheme = scheme
        self.secret = new_secret()
        self.folder = Path(tempfile.mkdtemp(prefix="rank-"))
        self.addresses: dict[str, str] = {}
        self.listeners: dict[str, CutListener] = {}
        self.dialled: dict[str, Channel] = {}
        self.callback(shutil.rmtree, self.folder, ignore_errors=True)

    def listen(self, name: str) -> Listener:
        """A listener that `connect` finds under the name from now on."""
        address = new_address(self.scheme, self.folder)
        listener = self.listeners[name] = CutListener(listen(address, secret=self.secret))
        self.addresses[name] = listener.address
        return listener

    def lose(self, name: str) -> None:
        """Whoever listens under the name is gone, as when its process ends."""
        self.listeners[name].cut()

    def connect(self, *names: str) -> Connect:
        """A `Connect` that tries those names in order. `dialled`: the last channel to each."""

        def dial(left_out: frozenset[str]) -> ReplicaLink:
            listening = {name: self.addresses[name] for name in names if name in self.addresses}
            link = Replicas(listening, secret=self.secret).connect(left_out)
            self.dialled[link.replica] = link.channel
            return link

        return dial

    def hn(self, dense: DenseHalf | None = None, *, name: str = "hn", card: ModelCard = kit.CARD) -> HnWorker:
        """An HN that listens."""
        worker = HnWorker(card, {"": dense or kit.FakeDense()}, [self.listen(name)])
        self.callback(worker.stop, drain_s=0.5)
        return worker

    def cn(self, sparse: SparseHalf | None = None, *hns: str, card: ModelCard = kit.CARD, **options: Any) -> CnCore:
        """A CN's core that asks those HNs."""
        names = hns or ("hn",)
        options = {"hns": len(names), "backoff": QUICK} | options
        core = CnCore(card, sparse or kit.FakeSparse(), self.connect(*names), **options)
        self.callback(core.stop, drain_s=0.5)
        return core

    def whole(
        self, sparse: kit.FakeSparse | None = None, dense: kit.FakeDense | None = None, knobs: WorkerKnobs | None = None
    ) -> WholeCore:
        """Both halves in one core."""
        core = WholeCore(kit.CARD, sparse or kit.FakeSparse(), dense or kit.FakeDense(), knobs=knobs)
        self.callback(core.stop, drain_s=0.5)
        return core

    def front(self, core: Core, *, name: str = "cn") -> CoreServer:
        """The core behind a listener."""
        front = CoreServer(core, [self.listen(name)])
        self.callback(front.stop, drain_s=0.5)
        return front

    async def ranker(self, *names: str, model: str = "tiny", **options: Any) -> CoreRanker:
        """A remote ranker that is ready."""
        names = names or ("cn",)
        options = {"replicas": len(names), "backoff": QUICK} | options
        ranker = CoreRanker(RemoteCore(model, self.connect(*names), **options))
        self.callback(ranker.core.stop, drain_s=0.5)
        await until(lambda: ranker.core.ready() is None)
        return ranker

    async def local(self, core: Core) -> CoreRanker:
        """A ranker around a core of this process that is ready."""
        await until(lambda: core.ready() is None)
        return CoreRanker(core)


async def right(ranker: Ranker, seed: int = 5) -> None:
    """Asks, and compares."""
    right_answers([await ranker.rank(kit.request(seed))], seed)


def right_answers(answers: Iterable[RankAnswer], seed: int = 0) -> None:
    """Compares the answers to the requests of that seed and the ones after it."""
    for number, answer in enumerate(answers, start=seed):
        torch.testing.assert_close(answer.outputs["score"], kit.expected(kit.request(number))["score"])
