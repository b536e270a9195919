"""How a client finds replicas through Serve: what Serve has told this process costs no call."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID

from plait_fabric.rpc.replicas import NoReplica, Replica
from plait_serving.deployments import fabric_endpoints
from plait_serving.deployments.fabric_endpoints import ServeReplicas


def replica_id(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=DeploymentID(name="cn", app_name="app"))


class Handle:
    """Serve's handle of a deployment with these replicas."""

    def __init__(self, *names: str) -> None:
        self.ids = [replica_id(name) for name in names]
        self.calls = 0
        routing = SimpleNamespace(curr_replicas=dict.fromkeys(self.ids))
        self._router = SimpleNamespace(_asyncio_router=SimpleNamespace(_request_router=routing))

    def broadcast(self, method: str) -> Any:
        assert method == "describe"
        self.calls += 1
        return self

    def results(self, **_: Any) -> Sequence[Replica]:
        return [Replica(name=it.to_full_id_str(), host="h", addresses=("tcp://x",), secret=b"") for it in self.ids]


def test_to_look_for_another_replica_costs_no_call_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look all the time, since the number of replicas may change; one that is new is found."""
    monkeypatch.setattr(fabric_endpoints, "dial", lambda address, secret: SimpleNamespace())
    handle = Handle("a", "b")
    replicas = ServeReplicas("CNs", handle)
    connected = frozenset(it.to_full_id_str() for it in handle.ids)
    with pytest.raises(NoReplica, match="there is no other replica"):
        replicas.connect(connected)
    assert handle.calls == 0
    assert replicas.connect(frozenset({handle.ids[0].to_full_id_str()})).replica == handle.ids[1].to_full_id_str()
    assert handle.calls == 1
