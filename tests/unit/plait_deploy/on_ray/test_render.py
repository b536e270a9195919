"""`plait deploy render --cluster`: a Serve configuration whose replicas are placed."""

from __future__ import annotations

import pytest
import yaml
from ray import serve
from ray.serve._private.build_app import build_app
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema

from plait.app import AppArgs, build
from plait_deploy.on_ray.nodes import LABEL

CLUSTER = """
nodes:
  - {name: l40s, count: 2, cpus: 16, memory_gib: 64, gpus: 4}
  - {name: host, cpus: 16, memory_gib: 64}
"""
CONFIG = """
version: 1
images:
  {replicas: 3, num_gpus: 0.7, knobs: {threads: 2}, controlnets: {edges: {folder: ./edges, replicas: 2, num_gpus: 0.3}}}
recommend:
  models:
    shop: {folder: ./shop, cn: {replicas: {min: 1, max: 4}}, hn: {replicas: 2, num_gpus: 0.5}}
"""


@pytest.fixture
def render(tmp_path, render):
    def run(config=CONFIG, cluster=CLUSTER, *options):
        (tmp_path / "cluster.yaml").write_text(cluster)
        code, said = render(config, "--cluster", str(tmp_path / "cluster.yaml"), *options)
        return code, said.out, said.err

    return run


def application(render, *arguments):
    code, text, error = render(*arguments)
    assert code == 0, error
    return yaml.safe_load(text)["applications"][0]


def test_a_deployment_for_each_model_and_class_with_a_selector_of_its_own(render):
    """The ingress is the only one that is not placed."""
    rendered = application(render)
    found = {each["name"]: each for each in rendered["deployments"]}
    placed = {name for name in found if "@" in name}
    assert placed == {
        f"{name}@{of}" for name in ("engine", "controlnet-edges", "cn-shop", "hn-shop") for of in ("l40s", "host")
    }
    actor = found["engine@l40s"]["ray_actor_options"]
    assert (actor["num_gpus"], actor["label_selector"]) == (0.7, {LABEL: "l40s"})
    assert found["engine@host"]["autoscaling_config"]["max_replicas"] == 3
    assert found["engine@host"]["autoscaling_config"]["min_replicas"] == 0
    assert found["engine@host"]["user_config"]["threads"] == 2
    follows = rendered["autoscaling_policy"]["policy_kwargs"]["follows"]
    assert (
        follows["cn-shop"]["policy_kwargs"]["max_replicas"]
        == found["cn-shop@host"]["autoscaling_config"]["max_replicas"]
        == 4
    )


def test_new_numbers_of_replicas_are_no_new_version(render):
    """Serve restarts all replicas when the code's version changes."""

    def version(config):
        _, text, _ = render(config)
        return get_app_code_version(ServeDeploySchema.model_validate(yaml.safe_load(text)).applications[0])

    more = CONFIG.replace("{replicas: 3,", "{replicas: 5,").replace("replicas: 2,", "replicas: 4,")
    assert more.count("4") == 3
    assert version(more) == version(CONFIG)
    assert version(CONFIG.replace("0.7", "0.6")) != version(CONFIG)


def test_the_application_has_the_deployments_that_the_configuration_names(render):
    """Serve refuses a configuration with options for a deployment that is not there."""
    rendered = application(render)
    built = build_app(build(AppArgs.model_validate(rendered["args"])), name="plait")
    there = {each.name: each for each in built.deployments}
    assert {each["name"] for each in rendered["deployments"]} | {"ingress"} == set(there)
    assert isinstance(there["engine@l40s"], serve.Deployment)
    for each in rendered["deployments"]:
        if "@" in each["name"]:
            assert (
                there[each["name"]].ray_actor_options["label_selector"] == each["ray_actor_options"]["label_selector"]
            )


@pytest.mark.parametrize(
    ("config", "cluster", "sentence"),
    [
        (CONFIG.replace("replicas: 3", "replicas: 30"), CLUSTER, "the cluster is too full for"),
        (CONFIG, CLUSTER.replace("host", "a host"), "class a host cannot be a label's value"),
        (CONFIG, CLUSTER.replace("host", "a@b"), "'a@b' names no deployment and no class of nodes"),
        (CONFIG, "nodes: []", "nodes: must have at least 1 item"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(render, config, cluster, sentence):
    """Nothing is printed that could be deployed."""
    code, text, error = render(config, cluster)
    assert (code, text) == (1, "")
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


def test_pods_are_placed_by_kubernetes(render):
    """With KubeRay the option is refused."""
    code, text, error = render(CONFIG, CLUSTER, "--target", "kuberay", "--image", "x:1", "--allow-tag")
    assert (code, text) == (1, "")
    assert "--cluster goes with --target serve" in error
