"""`plait deploy render`: a Serve YAML that Ray understands whole and that means the same plait.yaml."""

from __future__ import annotations

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from plait.app import AppArgs, build
from plait.cli import main as root
from plait.config import load_config
from plait.deployments import logical_cpus
from plait_deploy.serve import render_serve

CONFIG = """
server: {host: 0.0.0.0, port: 9000, drain_s: 5}
images:
  model: ./base
  replicas: 2
  knobs: {largest_batch: 8, threads: 2}
  controlnets: {edges: {folder: cn/edges, replicas: 3}}
  loras: {folder: loras}
recommend:
  models:
    cut:
      folder: models/cut
      cn: {replicas: 2, knobs: {wire: float16}}
      hn: {replicas: {min: 1, max: 4}, knobs: {threads: 3}}
    small: {folder: models/small, mode: whole, whole: {knobs: {largest_waiting: 5}}}
"""

WORKERS = ["cn-cut", "hn-cut", "whole-small"]


@pytest.fixture
def rendered(render):
    """The document of a plait.yaml."""

    def run(text=CONFIG):
        code, said = render(text, "--target", "serve")
        assert code == 0
        return yaml.safe_load(said.out)

    return run


def test_deploy_render_keeps_the_meaning_of_the_configuration(rendered, tmp_path):
    """Serve's own schema accepts it. The builder's arguments plus the knobs in user_config are the sections of the
    file."""
    document, path = rendered(), tmp_path / "plait.yaml"
    assert ServeDeploySchema.model_validate(document).applications[0].import_path == "plait.app:build"
    assert document["http_options"] == {"host": "0.0.0.0", "port": 9000}
    application = document["applications"][0]
    config = load_config(path)
    args = AppArgs.model_validate(application["args"])
    assert args.server == config.server
    knobs = application["deployments"][0]["user_config"]
    assert args.images.model_copy(update={"knobs": type(config.images.knobs)(**knobs)}) == config.images
    assert args.ranking_models["cut"].cn.replicas == 2
    assert args.ranking_models["small"].folder == path.parent / "models/small"
    tuned = {deployment["name"]: deployment.get("user_config") for deployment in application["deployments"]}
    assert (tuned["cn-cut"]["wire"], tuned["hn-cut"]["threads"]) == ("float16", 3)
    assert tuned["whole-small"]["largest_waiting"] == 5


def test_deploy_render_puts_knobs_only_where_a_change_is_a_reconfigure(rendered):
    """Knobs inside args would restart every replica when they change."""
    (application,) = rendered()["applications"]
    assert "knobs" not in application["args"]["images"]
    assert application["args"]["recommend"]["models"]["cut"]["cn"] == {"replicas": 2}
    names = [deployment["name"] for deployment in application["deployments"] if "user_config" in deployment]
    assert names == ["engine", "controlnet-edges", *WORKERS]


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("", (0, 33, 50, 25, 100)),
        ("start_new_first: true", (50, 33, 50, 25, 100)),
        ("start_new_first: false", (0, 0, 0, 0, 0)),
    ],
)
def test_deploy_render_writes_out_how_an_update_replaces_replicas(rendered, server, expected):
    """One more of each deployment starts first; with GPUs, of which none may be free, only if that is wanted."""
    text = CONFIG.replace("drain_s: 5", server or "drain_s: 5").replace("./base", "./base\n  num_gpus: 1")
    (application,) = rendered(text)["applications"]
    found = {it["name"]: it["max_surge_percent"] for it in application["deployments"]}
    assert tuple(found[name] for name in ("engine", "controlnet-edges", "cn-cut", "hn-cut", "ingress")) == expected
    built = build_app(build(AppArgs.model_validate(application["args"])), name="plait").deployments
    assert found == {it.name: it._deployment_config.max_surge_percent for it in built}


def test_a_ray_of_its_own_has_room_for_one_more_replica(monkeypatch):
    """Of any deployment: with the CPUs that the replicas use alone, each update would have to stop old ones first."""
    from plait.server import supervise

    asked = []
    monkeypatch.setattr(supervise, "serve", lambda config, **how: asked.append(how["num_cpus"]) or 0)
    for more in ([], ["--set", "server.start_new_first=false"]):
        assert root.main(["serve", "--set", "images.num_cpus=2.5", *more]) == 0
    used = logical_cpus(load_config(overrides=["images.num_cpus=2.5"]))
    assert asked == [used + 3, used]


def test_deploy_render_of_local_controlnets_has_no_deployments_for_them(rendered):
    """The placement decides which deployments there are, so it is in the arguments, too; nothing else is."""
    (application,) = rendered(CONFIG.replace("threads: 2", "threads: 2, controlnet_placement: local"))["applications"]
    assert application["args"]["images"]["knobs"] == {"controlnet_placement": "local"}
    assert [deployment["name"] for deployment in application["deployments"]] == ["engine", *WORKERS, "ingress"]


@pytest.mark.parametrize("options", [("serve",), ("kuberay", "--allow-tag", "--image", "plait:dev")])
def test_deploy_render_refuses_any_free_port(render, options):
    """Nobody would learn which one Serve takes, and a pod's is a fixed one."""
    code, printed = render("server: {port: 0}", "--target", *options)
    assert (code, printed.out) == (1, "")
    assert "server.port: 0 is any free port" in printed.err


def test_deploy_render_refuses_what_serve_would_ignore():
    """Serve drops keys it does not know; the renderer says so instead."""
    application = {"name": "plait", "import_path": "a:b"}
    render_serve(application, host="127.0.0.1", port=1)
    wrong = {**application, "deployments": [{"name": "engine", "ray_actor_options": {"num_cpu": 1}}]}
    with pytest.raises(ValueError, match=r"deployments\.0\.ray_actor_options\.num_cpu$"):
        render_serve(wrong, host="127.0.0.1", port=1)
