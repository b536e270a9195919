"""Ranking by the workers' deployments; imported in the ingress replica only: it needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package
from plait_disagg.refresh.errors import NotPublished
from plait_disagg.refresh.publish import publish
from plait_kernels.threads import lower_priority, run_on_own_thread, set_threads
from plait_serving.deployments.metrics import AllReplicas, answers_of, ask
from plait_serving.deployments.ranking.package_source import RankModel
from plait_serving.deployments.ranking.worker import ServeRanker, wait_until_ready
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import ServedRanker
from plait_serving.replica_metrics import ReplicaMetrics


class RemoteRankingService(LocalRankingService):
    """Its rankers' workers are deployments."""

    def __init__(self, models: Mapping[str, RankModel]) -> None:
        """Take the models by the names that requests use; connecting continues in the background."""
        rankers = {name: ServeRanker(name, model.workers) for name, model in models.items()}
        wait_until_ready([ranker.core for ranker in rankers.values()])
        served = {}
        for name, model in models.items():
            package = model.source.package()
            refreshes = ServeRefresh(name, package, model.workers, model.hns, model.shards)
            items = None if package is None else package.items
            served[name] = ServedRanker(ranker=rankers[name], items=items, refreshes=refreshes)
        super().__init__(served)
        parts = [part for it in models.values() for part in (it.workers, it.hns, *it.shards) if part is not None]
        self._workers = [AllReplicas(part) for part in parts]

    async def worker_counts(self) -> Sequence[ReplicaMetrics]:
        """Return what the workers' replicas count."""
        return await answers_of(self._workers)


_STAGE_TIMEOUT_S = 600.0
"""Gigabytes of new rows may arrive over a slow disk."""
_SWITCH_TIMEOUT_S = 60.0


class ServeFleet:
    """The replicas of some deployments, which switch at the same time. Their handles are called for
    refreshes only here."""

    def __init__(self, handles: Mapping[str, Any]) -> None:
        """Take Serve's handles, each by its deployment's name for messages."""
        self._handles = handles

    def stage(self, folder: Path) -> Mapping[str, Exception | None]:
        """Stage the update on every replica at once."""
        return self._all("stage_update", str(folder), _STAGE_TIMEOUT_S)

    def switch(self, version: str) -> Mapping[str, Exception | None]:
        """Switch every replica at once."""
        return self._all("switch_version", version, _SWITCH_TIMEOUT_S)

    def _all(self, method: str, argument: str, timeout_s: float) -> Mapping[str, Exception | None]:
        def outcomes_of(what: str, handle: Any) -> Mapping[str, Exception | None]:
            try:
                outcomes = ask(handle, method, argument, timeout_s=timeout_s)
            except Exception as error:  # Ray's and Serve's errors have no common base
                return {what: NotPublished(str(error))}
            return {f"{what} {number}": outcome for number, outcome in enumerate(outcomes)}

        with ThreadPoolExecutor(len(self._handles)) as threads:  # results() refuses to block where a loop runs
            found = list(threads.map(outcomes_of, self._handles.keys(), self._handles.values()))
        return {what: outcome for some in found for what, outcome in some.items()}


class ServeRefresh:
    """A `Refreshes` that publishes to the HNs, if there are any, and to the deployment that the ingress calls."""

    def __init__(self, name: str, package: Package | None, asked: Any, hns: Any, shards: Sequence[Any]) -> None:
        """Take Serve's handles `asked` and `hns`; `hns` is None if the workers are whole. CNs answer from one version
        of their `shards` only, so these switch together."""
        fleets = [ServeFleet({f"HN of {name}": hns})] if hns is not None else []
        held = {f"shard {number} of {name}": handle for number, handle in enumerate(shards)}
        self._fleets = (*fleets, ServeFleet({f"CN of {name}" if fleets else f"worker of {name}": asked, **held}))
        self._name, self._package = name, package

    async def refresh(self, update: Path) -> str:
        """Publish the update to both deployments."""
        return await asyncio.to_thread(run_on_own_thread, partial(self._publish, update))

    def _publish(self, update: Path) -> str:
        set_threads(1)
        lower_priority()  # requests want the cores
        if self._package is None:
            raise NotPublished(f"model {self._name} cannot be refreshed: it is no package")
        try:
            return publish(self._package, update, self._fleets)
        except PackageError as error:
            raise NotPublished(str(error)) from error
