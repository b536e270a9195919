"""The `RankingService` that asks the workers' deployments; imported in the ingress replica only: it needs torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait_serving.deployments.ranking.refresh import ServeRefresh
from plait_serving.deployments.ranking.source import RankModel
from plait_serving.deployments.ranking.worker import remote_ranker
from plait_serving.ranking.local import LocalRankingService
from plait_serving.ranking.service import RankingService, ServedRanker

__all__ = ["remote_ranking_service"]


def remote_ranking_service(
    rankers: Mapping[str, Any], models: Mapping[str, RankModel], hns: Mapping[str, Any]
) -> RankingService:
    """A service of the models behind ``rankers``, Serve's handles by name; connecting goes on after this returned.

    ``hns``: handles of the HNs of models that have them.
    """
    served = {
        name: ServedRanker(
            ranker=remote_ranker(name, handle, replicas=models[name].replicas, max_replicas=models[name].max_replicas),
            items=models[name].source.items(),
            refreshes=ServeRefresh(name, models[name].source, handle, hns.get(name)),
        )
        for name, handle in rankers.items()
    }
    return LocalRankingService(served)
