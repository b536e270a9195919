"""Serve's router for engine replicas with several base models: the adapter of `images/routing.py`."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from plait_serving.diffusion.values import ImageRequest
from plait_serving.images.routing import ReplicaState, SentRequests, begins_in_s


class ModelRouter(RequestRouter):  # type: ignore[misc]  # Serve has no types
    """Ranks the replicas by when a request would begin there; calls that are no image requests go to any."""

    def initialize_state(self, **_: Any) -> None:
        """Begin with nothing sent; Serve calls this after the constructor."""
        self._sent: dict[ReplicaID, SentRequests] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas, each a rank of its own, the best first."""
        replicas = random.sample(candidate_replicas, len(candidate_replicas))
        request = _request_of(pending_request)
        if request is not None:
            names = [lora.name for lora in request.loras]
            replicas.sort(key=lambda replica: begins_in_s(self._state(replica), request.model, names))
        return [[replica] for replica in replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Remember what was sent where."""
        request = _request_of(pending_request)
        if request is not None:
            self._sent.setdefault(replica_id, SentRequests()).add(request.model)

    def _state(self, replica: RunningReplica) -> ReplicaState:
        gone = self._sent.keys() - self.curr_replicas.keys()
        for replica_id in gone:
            del self._sent[replica_id]
        sent = self._sent.setdefault(replica.replica_id, SentRequests())
        sent.hear(ReplicaState.parse(replica.routing_stats))
        return sent.state


def _request_of(pending: PendingRequest | None) -> ImageRequest | None:
    return next((arg for arg in pending.args if isinstance(arg, ImageRequest)), None) if pending is not None else None
