"""The `RankingService` that calls the workers' deployments; imported in the ingress replica only: it needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import Metric

from plait_serving.deployments.metrics import families_of, replicas_of
from plait_serving.deployments.ranking.refresh import ServeRefresh
from plait_serving.deployments.ranking.source import RankModel
from plait_serving.deployments.ranking.worker import remote_ranker
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import RankingService, ServedRanker

__all__ = ["remote_ranking_service"]


def remote_ranking_service(models: Mapping[str, RankModel]) -> RankingService:
    """Return a service for the models, by the names that requests use; connecting continues in the background."""
    return _RemoteRankingService(models)


class _RemoteRankingService(LocalRankingService):
    """Its rankers' workers are deployments."""

    def __init__(self, models: Mapping[str, RankModel]) -> None:
        super().__init__({name: _served(name, model) for name, model in models.items()})
        parts = [part for it in models.values() for part in (it.workers, it.hns, *it.shards) if part is not None]
        self._workers = [replicas_of(part) for part in parts]

    async def worker_families(self) -> Sequence[Metric]:
        """Return what the workers' replicas count."""
        return await families_of(self._workers)


def _served(name: str, model: RankModel) -> ServedRanker:
    ranker = remote_ranker(name, model.workers, replicas=model.replicas, max_replicas=model.max_replicas)
    refreshes = ServeRefresh(name, model.source, model.workers, model.hns, model.shards)
    return ServedRanker(ranker=ranker, items=model.source.items(), refreshes=refreshes)
