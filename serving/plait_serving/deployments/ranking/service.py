"""Ranking by the workers' deployments; imported in the ingress replica only: it needs torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.refresh.errors import NotPublished
from plait_disagg.refresh.publish import publish
from plait_kernels.threads import lower_priority, run_on_own_thread, set_threads
from plait_serving.deployments import worker_name
from plait_serving.deployments.handles import ask
from plait_serving.deployments.ranking.worker import ServeRanker, wait_until_ready
from plait_serving.ranking.config import MAX_SHARDS, shard_role
from plait_serving.ranking.local import LocalRankingService, ServedRanker


def remote_ranking(models: Mapping[str, Path], handles: Mapping[str, Any]) -> LocalRankingService:
    """Return a service whose rankers' workers are deployments, of the models' folders by the names that requests use,
    and the handles of deployments by their names; connecting continues in the background."""
    parts = {name: parts_of(name, handles) for name in models}
    rankers = {name: ServeRanker(name, next(iter(parts[name].values()))) for name in models}
    wait_until_ready([ranker.core for ranker in rankers.values()])
    served = {}
    for name, folder in models.items():
        package = open_package(folder)  # it knows the items by id, and what updates are checked against
        refresh = partial(published, package, fleets_of(name, parts[name]))
        served[name] = ServedRanker(ranker=rankers[name], items=package.items, refresh=refresh)
    return LocalRankingService(served)


def parts_of(model: str, handles: Mapping[str, Any]) -> dict[str, Any]:
    """Return the handles of a model's deployments by role: first the one that is asked, then HNs, then shards."""
    roles = ("whole", "cn", "hn", *map(shard_role, range(MAX_SHARDS)))
    return {role: handles[name] for role in roles if (name := worker_name(model, role)) in handles}


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


def fleets_of(name: str, parts: Mapping[str, Any]) -> tuple[ServeFleet, ...]:
    """Return what an update is published to: the HNs, if there are any, then the deployment that the ingress calls. CNs
    answer from one version of their shards only, so these switch together."""
    if "whole" in parts:
        return (ServeFleet({f"worker of {name}": parts["whole"]}),)
    asked, hns, *shards = parts.values()
    held = {f"shard {number} of {name}": handle for number, handle in enumerate(shards)}
    return ServeFleet({f"HN of {name}": hns}), ServeFleet({f"CN of {name}": asked, **held})


async def published(package: Package, fleets: Sequence[ServeFleet], update: Path) -> str:
    """Publish an update of a model to its deployments; return its version. Raises `RefreshError`."""

    def quietly() -> str:
        set_threads(1)
        lower_priority()  # requests want the cores
        try:
            return publish(package, update, fleets)
        except PackageError as error:
            raise NotPublished(str(error)) from error

    return await asyncio.to_thread(run_on_own_thread, quietly)
