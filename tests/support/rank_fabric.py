"""The tiny model of `support.ranking` served over a fabric, all in this process: HNs, CNs and rankers."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from fakes import ranking_model as kit
from fakes.fabric import CutListener
from plait_disagg.messages.layout import layout_of_crossing, layouts_of
from plait_disagg.messages.wire import VERSION, Role, card_payload, role_payload
from plait_disagg.queue.jobs import Core
from plait_disagg.queue.knobs import WorkerKnobs
from plait_disagg.values import ModelCard
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from plait_disagg.workers.whole import WholeCore
from plait_fabric import Channel, Listener, Unreachable, connect, listen, new_secret
from plait_fabric.rpc.client import Connect
from plait_fabric.rpc.fields import greeting
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from support.waiting import until

Scheme = Literal["inproc", "shm", "tcp"]

QUICK = Backoff(first_s=0.01, max_s=0.05)
PATIENCE_S = 60.0

CROSSING = layout_of_crossing(kit.FakeDense.crossing, kit.INPUTS)
OUTPUTS = layouts_of(kit.CARD).outputs

_numbers = itertools.count()


def hello_header(role: Role) -> dict[str, Any]:
    """What a client sends first."""
    return greeting("hello", VERSION, role_payload(role))


def welcome_header(card: ModelCard) -> dict[str, Any]:
    """What a server sends first."""
    return greeting("welcome", VERSION, card_payload(card, CROSSING))


class Rig:
    """What listens, by name, and what was opened; everything is stopped at the end."""

    def __init__(self, scheme: Scheme = "inproc") -> None:
        self.scheme = scheme
        self.secret = new_secret()
        self.folder = Path(tempfile.mkdtemp(prefix="rank-"))
        self.addresses: dict[str, str] = {}
        self.listeners: dict[str, CutListener] = {}
        self.dialled: dict[str, Channel] = {}
        self._stops: list[Callable[[], Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stop in reversed(self._stops):
            stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def at_end(self, stop: Callable[[], Any]) -> None:
        """Called when the rig is left, the last one first."""
        self._stops.append(stop)

    def listen(self, name: str) -> Listener:
        """A listener that `connect` finds under the name from now on."""
        where = {
            "inproc": f"inproc://{name}-{next(_numbers)}",
            "shm": f"shm://{self.folder}/{name}-{next(_numbers)}",
            "tcp": "tcp://127.0.0.1:0",
        }
        listener = self.listeners[name] = CutListener(listen(where[self.scheme], secret=self.secret))
        self.addresses[name] = listener.address
        return listener

    def lose(self, name: str) -> None:
        """Whoever listens under the name is gone, as when its process ends."""
        self.listeners[name].cut()

    def connect(self, *names: str) -> Connect:
        """A `Connect` that tries those names in order. `dialled`: the last channel to each."""

        def dial(left_out: frozenset[str]) -> ReplicaLink:
            for name in names:
                if name not in left_out and name in self.addresses:
                    try:
                        channel = self.dialled[name] = connect(self.addresses[name], secret=self.secret)
                    except Unreachable:
                        continue
                    return ReplicaLink(replica=name, channel=channel)
            raise NoReplica("nobody listens")

        return dial

    def hn(self, dense: kit.FakeDense | None = None, *, name: str = "hn", card: ModelCard = kit.CARD) -> HnWorker:
        """An HN that listens."""
        worker = HnWorker(card, dense or kit.FakeDense(), [self.listen(name)])
        self._stops.append(lambda: worker.stop(drain_s=0.5))
        return worker

    def cn(self, sparse: kit.FakeSparse | None = None, *hns: str, **options: Any) -> CnCore:
        """A CN's core that asks those HNs."""
        names = hns or ("hn",)
        options = {"hns": len(names), "backoff": QUICK} | options
        core = CnCore(kit.CARD, sparse or kit.FakeSparse(), self.connect(*names), **options)
        self._stops.append(lambda: core.stop(drain_s=0.5))
        return core

    def whole(
        self, sparse: kit.FakeSparse | None = None, dense: kit.FakeDense | None = None, knobs: WorkerKnobs | None = None
    ) -> WholeCore:
        """Both halves in one core."""
        core = WholeCore(kit.CARD, sparse or kit.FakeSparse(), dense or kit.FakeDense(), knobs=knobs)
        self._stops.append(lambda: core.stop(drain_s=0.5))
        return core

    def front(self, core: Core, *, name: str = "cn") -> CoreServer:
        """The core behind a listener."""
        front = CoreServer(core, [self.listen(name)])
        self._stops.append(lambda: front.stop(drain_s=0.5))
        return front

    async def ranker(self, *names: str, model: str = "tiny", **options: Any) -> CoreRanker:
        """A remote ranker that is ready."""
        names = names or ("cn",)
        options = {"replicas": len(names), "backoff": QUICK} | options
        ranker = CoreRanker(RemoteCore(model, self.connect(*names), **options))
        self._stops.append(lambda: ranker.core.stop(drain_s=0.5))
        await until(lambda: ranker.core.ready() is None)
        return ranker

    def local(self, core: Core) -> CoreRanker:
        """A ranker around a core of this process."""
        return CoreRanker(core)
