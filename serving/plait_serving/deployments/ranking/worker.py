"""The deployments of ranking models, and how the ingress reaches them.

A model is either one deployment of whole workers, or one of CNs and one of HNs; the CNs find the HNs through Serve.
This module is imported only in the replicas: it needs torch, but nothing from the diffusion engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from plait_disagg.package.read import open_package
from plait_disagg.package.sharding import Sharding, identity, plan_of, remote_tables
from plait_disagg.queue.jobs import Core
from plait_disagg.queue.knobs import HnKnobs, WorkerKnobs
from plait_disagg.queue.scale import Gauge, cn_pressure, hn_pressure
from plait_disagg.refresh.errors import RefreshError
from plait_disagg.refresh.live_package import LivePackage, Refresher, open_live
from plait_disagg.tables.pieces import HeldPieces
from plait_disagg.tables.remote import RemoteShard, shards_metrics, wait_for_shards
from plait_disagg.tables.rows_wire import ShardIdentity
from plait_disagg.workers.cn import CnCore
from plait_disagg.workers.core_server import CoreServer
from plait_disagg.workers.hn import HnWorker
from plait_disagg.workers.ranker import CoreRanker
from plait_disagg.workers.remote import RemoteCore
from plait_disagg.workers.shard import ShardWorker
from plait_disagg.workers.whole import WholeCore
from plait_fabric import Listener, new_secret
from plait_fabric.rpc.client import Connect
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import Replica
from plait_kernels.devices import default_device
from plait_kernels.threads import run_on_own_thread, set_threads
from plait_serving.cores import cpu_threads, declare_thread_cap
from plait_serving.deployments.fabric_endpoints import ServeReplicas, open_listeners, this_replica
from plait_serving.deployments.handles import ask_all
from plait_serving.deployments.process import configure_logging, seconds_to_start, shorten_gil_interval
from plait_serving.deployments.ray_internals import given_knobs
from plait_serving.deployments.scaling import PRESSURE
from plait_serving.health import HEALTH_TIMEOUT_S
from plait_serving.ranking.config import MAX_WORKERS, BetweenHosts, NoKnobs, RankExecutor, RankRole
from plait_serving.ranking.counted import rank_families
from plait_serving.replica_metrics import ReplicaMetrics, this_process

_log = logging.getLogger(__name__)

_DRAIN_S = 5.0
_LOOK_S = 0.02
_LEAVE_S = 12.0
"""So long a replica that is replaced goes on serving clients that find no other: Serve gives it 20 s in all."""
_FOUND_S = 2 * Backoff().max_s
"""Within this time clients usually find a replica."""

T = TypeVar("T")

_Core: TypeAlias = CnCore | WholeCore | HnWorker | ShardWorker
_Door: TypeAlias = CoreServer | HnWorker | ShardWorker
"""What others reach a worker by."""


class RankWorker:
    """One replica of a CN, HN or whole deployment, with every hook that Serve calls."""

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        role: RankRole,
        device: str = "auto",
        executor: RankExecutor = "auto",
        hns: Any = None,
        dealt: Mapping[str, Any] | None = None,
        shard: int = 0,
        shards: Sequence[Any] = (),
        between_hosts: BetweenHosts = "tcp",
    ) -> None:
        """Load this role's half from the folder, which `plait models package` made, and listen. With `device` "auto", a
        dense half uses CUDA if available; with `executor` "auto", one on the CPU runs on prepared programs where these
        are faster. `hns`, for a CN: Serve's handle of the model's HN deployment.

        `dealt`: how the tables are dealt, if they are; `shard`: which one this is; `shards`, for a CN: the
        handles of all. Raises `PackageError`.
        """
        configure_logging(f"{role}-{name}", os.environ)
        shorten_gil_interval()
        self._role: RankRole = role
        self._model = name
        self._secret = new_secret()
        self._stopped = False
        self._shards: list[RemoteShard] = []
        self._sharding, self._shard = None if dealt is None else Sharding(**dealt), shard
        live = run_on_own_thread(lambda: self._opened(folder, device, executor, shards))
        self._plain_knobs = self._plain(given_knobs())
        listeners = open_listeners(self._secret, kind="rank", between_hosts=between_hosts)
        reach_hn = ServeReplicas(f"the HNs of {name}", hns).connect
        self._core, self._worker = self._started(live, listeners, reach_hn)
        self._gauge = Gauge(self._core.metrics, self._pressure)
        self._refresher = Refresher(live, self._core, on_version=self._announce)
        self._start_s = seconds_to_start()
        _log.info("%s of %s listens at %s", role, name, ", ".join(self._worker.addresses))

    def _started(self, live: LivePackage, listeners: Sequence[Listener], reach_hn: Connect) -> tuple[_Core, _Door]:
        """Start what this role does, and what others reach it by. `reach_hn`: of a CN."""
        knobs = self._plain_knobs
        card = live.card(mode="whole" if self._role == "whole" else "split")
        card = replace(card, name=self._model)  # what requests call it, not what its maker did
        if self._role == "hn":
            hn = HnWorker(card, live.dense, listeners, catch_up=self._catch_up, knobs=knobs)
            return hn, hn
        if self._role == "shard":
            own = identity(live.package, plan_of(live.package, _there(self._sharding)), self._shard)
            shard = ShardWorker(own, _there(live.pieces), listeners, version=live.version)
            return shard, shard
        if self._role == "whole":
            whole = WholeCore(card, _there(live.sparse), live.dense[live.dense_version], knobs=knobs)
            return whole, CoreServer(whole, listeners)
        counts: Callable[[], Mapping[str, float]] = partial(shards_metrics, self._shards) if self._shards else dict
        cn = CnCore(
            card,
            _there(live.sparse),
            reach_hn,
            max_hns=MAX_WORKERS,
            dense_version=live.dense_version,
            knobs=knobs,
            more_metrics=counts,
        )
        door = CoreServer(cn, listeners)
        wait_for_shards(self._shards)
        wait_until_ready([cn])
        return cn, door

    def _opened(self, folder: Path, device: str, executor: RankExecutor, handles: Sequence[Any]) -> LivePackage:
        """Load what this role holds: the halves with all tables, a shard of the tables, or the CN half without."""
        role, sharding = self._role, self._sharding

        def reach(of: ShardIdentity) -> RemoteShard:
            replicas = ServeReplicas(f"shard {of.shard} of {self._model}", handles[of.shard])
            made = RemoteShard(replicas.connect, of, max_replicas=MAX_WORKERS)
            self._shards.append(made)
            return made

        if sharding is None:
            device, prepares = default_device() if device == "auto" else device, executor == "auto"
            return open_live(folder, sparse=role != "hn", dense=role != "cn", device=device, prepares=prepares)
        package = open_package(folder)
        plan = plan_of(package, sharding)
        if role == "shard":
            return LivePackage(package, pieces=HeldPieces(package.tables, plan.of_shard(self._shard)))
        tables = remote_tables(package, plan, reach)
        return LivePackage(package, sparse=package.sparse(tables), tables=tables)

    def _plain(self, knobs: Mapping[str, Any]) -> WorkerKnobs:
        if self._role == "shard":
            NoKnobs.model_validate(dict(knobs))
            return WorkerKnobs(threads=1)
        given = (WorkerKnobs if self._role == "cn" else HnKnobs).model_validate(dict(knobs))
        return WorkerKnobs(**{**given.model_dump(), "threads": cpu_threads(given.threads)})

    async def describe(self) -> Replica:
        """Return this replica's addresses and secret. For our own processes only; Serve carries the answer."""
        worker = self._worker
        return this_replica(worker.addresses, self._secret, channels=worker.channels, start_s=self._start_s)

    async def why_not_ready(self) -> str | None:
        """Return what is missing to answer a request now, if anything; a shard, which answers CNs only, lacks none."""
        return None if isinstance(self._core, ShardWorker) else self._core.ready()

    async def metric_families(self) -> ReplicaMetrics:
        """Return what this worker counts."""
        counted = rank_families("plait_ranker_worker", {self._model: self._core.metrics()}, {"role": self._role})
        return ReplicaMetrics(replica=this_process(), families=counted)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this replica's pressure; Serve collects it where the number of replicas follows the load."""
        return {PRESSURE: self._gauge.read()}

    def _pressure(self, before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> float:
        if self._role != "hn":
            return cn_pressure(before, after, seconds)
        return hn_pressure(before, after, seconds, largest_batch_rows=self._plain_knobs.largest_batch_rows)

    async def stage_update(self, folder: str) -> RefreshError | None:
        """Stage an update with `Refresher.stage`; return errors instead of raising them: Serve would wrap them."""
        return await asyncio.to_thread(self._refreshed, lambda refresher: refresher.stage(Path(folder)))

    async def switch_version(self, version: str) -> RefreshError | None:
        """Switch with `Refresher.switch`; return errors instead of raising them."""
        return await asyncio.to_thread(self._refreshed, lambda refresher: refresher.switch(version))

    def _refreshed(self, step: Callable[[Refresher], None]) -> RefreshError | None:
        def alone() -> None:
            set_threads(1)
            step(self._refresher)

        try:
            run_on_own_thread(alone)
        except RefreshError as error:
            return error
        return None

    def _catch_up(self) -> None:
        if hasattr(self, "_refresher"):  # else a CN was quicker than this constructor
            self._refresher.catch_up()

    def _announce(self, version: str) -> None:
        if isinstance(self._worker, CoreServer):
            self._worker.announce()
        _log.info("%s of %s is at version %s", self._role, self._model, version)

    async def drain(self, drain_s: float) -> None:
        """Refuse new requests from now on; return when nothing runs any more, at the latest after `drain_s`."""
        self._stopped = True
        await asyncio.to_thread(self._worker.stop, drain_s=drain_s)

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Apply `user_config`; Serve calls this after the constructor and on every change. Raises on a bad knob."""
        self._plain_knobs = self._plain(user_config)
        self._core.reconfigure(self._plain_knobs)
        declare_thread_cap(self._plain_knobs.threads)

    def check_health(self) -> None:
        """Raise if the replica is unhealthy. Serve calls this every few seconds and replaces a replica that keeps
        raising."""
        if not self._stopped:
            if not self._worker.alive:
                raise RuntimeError(f"the {self._role}'s threads have died")
            self._core.heartbeat.check()
        if self._refresher.is_behind():  # an update came while this replica started
            threading.Thread(target=self._catch_up, name="plait-catch-up", daemon=True).start()

    def __del__(self) -> None:
        """Shut down when Serve removes the replica: clients move elsewhere, requests that have arrived are answered."""
        if not self._stopped and hasattr(self, "_worker"):
            self._worker.leave(_LEAVE_S)
            self._stopped = True
            self._worker.stop(drain_s=_DRAIN_S)
            for shard in self._shards:
                shard.close()


class ServeRanker(CoreRanker):
    """Asks a model's CNs or whole workers, however many there are at a time, also whether they are ready: a CN may be
    there without its HNs."""

    def __init__(self, name: str, handle: Any) -> None:
        """Start connecting to the replicas of that deployment."""
        connect = ServeReplicas(f"model {name}", handle).connect
        super().__init__(RemoteCore(name, connect, max_replicas=MAX_WORKERS))
        self._handle = handle

    async def ready(self) -> str | None:
        """Return None if a request would be answered now, otherwise what is missing."""
        return await super().ready() or await asyncio.to_thread(self._missing)

    def _missing(self) -> str | None:
        answers = ask_all(self._handle, "why_not_ready", timeout_s=HEALTH_TIMEOUT_S)
        if None in answers:
            return None
        return next((it for it in answers if isinstance(it, str)), f"no worker answered within {HEALTH_TIMEOUT_S:g} s")


def wait_until_ready(cores: Sequence[Core]) -> None:
    """Wait at most `_FOUND_S` until whoever these ask is connected: requests come as soon as this replica is made. No
    longer, since at the start of a server those load their tables meanwhile."""
    until_s = time.monotonic() + _FOUND_S
    while any(core.ready() for core in cores) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


def _there(half: T | None) -> T:
    assert half is not None, "not opened, although the role needs it"
    return half
