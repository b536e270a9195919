"""The policy that Serve's controller runs, given what Serve and Ray would tell it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.serve.config import AutoscalingConfig

from plait_deploy.errors import PlacementError
from plait_deploy.on_ray.nodes import DEVICES, LABEL, NODE, name_at, node_number
from plait_deploy.on_ray.policy import PlacementPolicy, placed_deployments, policy_options
from plait_deploy.placement.values import Demand, task_of

IDS = {name: f"{at:056x}" for at, name in enumerate("abcd", 0x1F3A)}
IDS = {name: value[::-1] for name, value in IDS.items()}  # ids differ in their first digits


def ray_node(name, gpus=2, *, alive=True, label=None):
    return {
        "NodeID": IDS[name],
        "Alive": alive,
        "Resources": {"CPU": 8.0, "GPU": float(gpus), "memory": 2.0**34},
        "Labels": {LABEL: label or name},
    }


class Serve:
    """Keeps the numbers that a policy returns, and starts replicas as Ray would: on the node of their class."""

    def __init__(self, demands, classes="ab", nodes=None, follows=None):
        self.demands = demands
        self.now_s = 0.0
        self.nodes = nodes if nodes is not None else [ray_node(name) for name in classes]
        kwargs = policy_options(demands, tuple(classes), follows=follows)["policy_kwargs"]
        self.policy = PlacementPolicy(**kwargs, nodes=lambda: self.look(), clock=lambda: self.now_s)
        self.contexts = {
            name_at(each.name, of): SimpleNamespace(
                deployment_name=name_at(each.name, of),
                target_num_replicas=0,
                running_replicas=[],
                capacity_adjusted_max_replicas=each.replicas,
                raw_metrics={},
                config=AutoscalingConfig(min_replicas=0, max_replicas=each.replicas),
            )
            for each in demands
            for of in classes
        }

    def look(self):
        """Returns what Ray says of its nodes."""
        return self.nodes

    def tick(self, *, starts=True):
        """A second passes."""
        self.now_s += 1.0
        wanted, _ = self.policy(self.contexts)
        for name, number in wanted.items():
            context = self.contexts[name]
            context.target_num_replicas = number
            context.running_replicas = context.running_replicas[:number]
            if starts:
                self._start(name, context)
        return {name: number for name, number in wanted.items() if number}

    def _start(self, name, context):
        of = name.rpartition("@")[2]
        alive = [each for each in self.nodes if each["Alive"] and each["Labels"][LABEL] == of]
        while alive and len(context.running_replicas) < context.target_num_replicas:
            replica = f"{name}#{len(context.running_replicas)}"
            context.running_replicas.append(replica)
            free = self._free(alive[0])
            milli = round(
                1000 * next(it.task.total_milli / 1000 for it in self.demands if it.name == name[: -len(of) - 1])
            )
            device = min((left, at) for at, left in enumerate(free) if left >= milli)[1]
            said = {NODE: node_number(alive[0]["NodeID"]), DEVICES: float(1 << device)}
            for key, value in said.items():
                context.raw_metrics.setdefault(key, {})[replica] = [SimpleNamespace(value=value)]

    def _free(self, node):
        free = [1000] * int(node["Resources"]["GPU"])
        for each in self.demands:
            for context in self.contexts.values():
                if context.deployment_name.rpartition("@")[0] != each.name:
                    continue
                for replica in context.running_replicas:
                    at = context.raw_metrics.get(NODE, {}).get(replica)
                    if at and at[-1].value == node_number(node["NodeID"]):
                        device = int(context.raw_metrics[DEVICES][replica][-1].value).bit_length() - 1
                        free[device] -= each.task.gpu_milli
        return free


def demand(name, gpus, replicas):
    return Demand(name=name, task=task_of(name, num_cpus=0.1, num_gpus=gpus), replicas=replicas)


def count(found, name):
    return sum(number for key, number in found.items() if key.startswith(f"{name}@"))


def settle(serve, **more):
    for _ in range(12):
        found = serve.tick(**more)
    return found


def test_a_lost_node_is_left_and_one_that_comes_back_is_no_reason_to_move():
    """Its replicas start on the other node, and stay there."""
    serve = Serve([demand("x", 0.5, 3)])
    before = settle(serve)
    (fuller,) = [name for name, number in before.items() if number == max(before.values())][:1]
    lost = fuller[-1]
    for node in serve.nodes:
        node["Alive"] = node["Labels"][LABEL] != lost
    serve.contexts[fuller].running_replicas = []
    after = settle(serve)
    assert fuller not in after
    assert count(after, "x") == 3
    serve.nodes = [ray_node("d", label=lost), *(each for each in serve.nodes if each["Alive"])]
    assert settle(serve) == after


def test_nodes_without_a_class_and_of_other_classes_take_nothing():
    """They are no part of the plan, however much room they have."""
    serve = Serve([demand("x", 1, 2)], nodes=[ray_node("a"), ray_node("b", label="0ther"), ray_node("c", label="")])
    assert settle(serve) == {"x@a": 2}


def test_without_a_node_nothing_starts_and_nothing_ends(caplog):
    """Ray forgets its nodes for a moment when its GCS is started again."""
    serve = Serve([demand("x", 1, 1)], nodes=[])
    assert settle(serve) == {}
    serve.nodes = [ray_node("a")]
    found = settle(serve)
    assert count(found, "x") == 1
    serve.nodes = []
    assert settle(serve) == found
    assert "ERROR" not in caplog.text


def test_a_number_that_follows_the_load_is_asked_for_once_for_all_classes():
    """By the policy that scales ranking workers: at a pressure of 0.9 in all replicas together, more."""
    from plait_serving.deployments.scaling import PRESSURE, autoscaling
    from plait_serving.sections import Replicas

    policy = autoscaling(Replicas(min=2, max=4, up_after_s=2, down_after_s=2))["policy"]
    serve = Serve([demand("hn", 0.5, 4)], follows={"hn": policy})
    pressure = 0.6

    def said(context):
        return {PRESSURE: dict.fromkeys(context.running_replicas, pressure)}

    def after(ticks):
        for _ in range(ticks):
            for context in serve.contexts.values():
                context.aggregated_metrics, context.current_time = said(context), serve.now_s
            found = serve.tick()
        return count(found, "hn")

    assert after(8) == 2
    pressure = 0.9
    assert after(4) == 3
    assert after(20) == 4
    pressure = 0.05
    assert after(30) == 2


def test_an_error_leaves_the_numbers_as_they_are(caplog):
    """Ray's GCS may be away for a while; an exception would stop Serve's control loop."""
    serve = Serve([demand("x", 1, 2)])
    before = settle(serve)

    def nobody():
        raise RuntimeError("the GCS does not answer")

    serve.look = nobody
    assert settle(serve) == before
    assert "the GCS does not answer" in caplog.text


def test_the_number_of_a_deployment_that_is_not_placed_stays():
    """Serve leaves alone what a policy says nothing of."""
    serve = Serve([demand("x", 1, 1)])
    serve.contexts["ingress"] = SimpleNamespace(deployment_name="ingress", target_num_replicas=3)
    wanted, states = serve.policy(serve.contexts)
    assert "ingress" not in wanted
    assert sum(wanted.values()) == 1
    assert states == {}


@pytest.mark.parametrize(
    ("names", "classes", "sentence"),
    [
        (["x"], [], "there is no class of nodes"),
        (["x@y"], ["a"], "'x@y' names no deployment"),
        (["x"], ["-a"], "class -a cannot be a label's value"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused_in_a_sentence(names, classes, sentence):
    """Names with the sign that parts model and class, and classes that no label can carry."""
    with pytest.raises(PlacementError) as caught:
        placed_deployments([demand(name, 0.5, 1) for name in names], classes)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
