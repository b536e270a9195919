"""The one handle of a model's deployments, most of which have no replica."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import cloudpickle
import pytest
from ray.serve._private.common import DeploymentID, ReplicaID

from plait_serving.deployments.node_class_handle import PlacedHandle


class Handle:
    """Serve's handle of a deployment, as far as it matters: without replicas a broadcast fails. Serve tells a process
    of replicas once it has chosen options or a method."""

    def __init__(self, name, replicas):
        self.name, self.replicas, self.calls, self.chosen, self._router = name, replicas, Counter(), {}, None

    def options(self, **chosen):
        self.chosen = chosen
        return self.generate

    def broadcast(self, method, *arguments):
        if not self.replicas:
            raise RuntimeError("no replica")
        return answering(*((self.name, number, method, *arguments) for number in range(self.replicas)))

    @property
    def generate(self):
        deployment = DeploymentID(name=self.name, app_name="plait")
        replicas = {ReplicaID(str(number), deployment): None for number in range(self.replicas)}
        routing = SimpleNamespace(_request_router=SimpleNamespace(curr_replicas=replicas))
        self._router = SimpleNamespace(_asyncio_router=routing)
        return self

    def remote(self, *arguments):
        self.calls[arguments] += 1
        return self.name


def answering(*answers):
    """What a broadcast returns."""
    return SimpleNamespace(results=lambda **_: answers)


def test_a_broadcast_reaches_all_replicas_of_all_deployments():
    """A deployment without replicas is no error."""
    handle = PlacedHandle({"a": Handle("a", 2), "b": Handle("b", 0), "c": Handle("c", 1)})
    found = handle.broadcast("stage", "x").results(timeout_s=1, return_exceptions=True)
    assert sorted(found) == [("a", 0, "stage", "x"), ("a", 1, "stage", "x"), ("c", 0, "stage", "x")]


def test_an_error_among_the_answers_is_raised_unless_it_was_asked_for():
    """As Serve's own handle does."""

    class Failing(Handle):
        def broadcast(self, method, *arguments):
            return answering(ValueError("no"))

    handle = PlacedHandle({"a": Failing("a", 1)})
    assert isinstance(handle.broadcast("x").results(return_exceptions=True)[0], ValueError)
    with pytest.raises(ValueError, match="no"):
        handle.broadcast("x").results()


def test_requests_go_only_where_replicas_are_and_follow_them():
    """The more replicas, the more requests; none to a deployment whose replicas have gone."""
    handles = {"a": Handle("a", 0), "b": Handle("b", 3), "c": Handle("c", 1)}
    handle = PlacedHandle(handles).options(stream=True)
    asked = Counter(handle.generate.remote("image") for _ in range(400))
    assert set(asked) == {"b", "c"}
    assert asked["b"] > asked["c"]
    assert all(each.chosen == {"stream": True} for each in handles.values())
    handles["b"].replicas, handles["a"].replicas = 0, 1
    assert {handle.generate.remote("image") for _ in range(100)} == {"a", "c"}
    handles["a"].replicas = handles["c"].replicas = 0
    assert handle.generate.remote("nobody") in handles  # Serve keeps it until there is a replica


def test_a_handle_can_be_pickled_before_and_while_it_is_used():
    """The application is pickled on its way to the ingress, and again there: Serve looks what a replica calls."""
    handle = PlacedHandle({"a": Handle("a", 1)})
    for _ in range(2):
        there = cloudpickle.loads(cloudpickle.dumps(handle))
        assert there.broadcast("x").results() == [("a", 0, "x")]
        handle.generate.remote("image")
