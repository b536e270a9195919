"""The `RankingService` that calls the workers' deployments; imported in the ingress replica only: it needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import Metric

from plait_disagg.workers.remote import RemoteRanker
from plait_serving.deployments.metrics import families_of, replicas_of
from plait_serving.deployments.ranking.package_source import RankModel
from plait_serving.deployments.ranking.refresh import ServeRefresh
from plait_serving.deployments.ranking.worker import remote_ranker, wait_until_ready
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import RankingService, ServedRanker

__all__ = ["remote_ranking_service"]


def remote_ranking_service(models: Mapping[str, RankModel]) -> RankingService:
    """Return a service for the models, by the names that requests use; connecting continues in the background."""
    return _RemoteRankingService(models)


class _RemoteRankingService(LocalRankingService):
    """Its rankers' workers are deployments."""

    def __init__(self, models: Mapping[str, RankModel]) -> None:
        rankers = {name: remote_ranker(name, model.workers) for name, model in models.items()}
        wait_until_ready([ranker.core for ranker in rankers.values()])
        super().__init__({name: _served(name, model, rankers[name]) for name, model in models.items()})
        parts = [part for it in models.values() for part in (it.workers, it.hns, *it.shards) if part is not None]
        self._workers = [replicas_of(part) for part in parts]

    async def worker_families(self) -> Sequence[Metric]:
        """Return what the workers' replicas count."""
        return await families_of(self._workers)


def _served(name: str, model: RankModel, ranker: RemoteRanker) -> ServedRanker:
    refreshes = ServeRefresh(name, model.source, model.workers, model.hns, model.shards)
    return ServedRanker(ranker=ranker, items=model.source.items(), refreshes=refreshes)
