"""`plait deploy render --target kuberay`: complete manifests that Kubernetes and KubeRay accept, of the same file that
runs locally."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from plait.app import AppArgs
from plait.config import load_config

CRD_VARIABLE = "PLAIT_KUBERAY_CRD"
KUBERNETES = "1.33"
NOT_OF_KUBERNETES = {"RayService", "PodMonitor"}


def crd_schema() -> Mapping[str, Any]:
    """The schema of ``ray.io/v1`` RayService, with unknown fields refused; skips without the file."""
    path = os.environ.get(CRD_VARIABLE, "")
    if not path:
        pytest.skip(f"{CRD_VARIABLE} names no CRD of RayService")
    return _crd_schema(Path(path))


@cache
def _crd_schema(path: Path) -> Mapping[str, Any]:
    document = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [it for it in document["spec"]["versions"] if it["name"] == "v1"]
    return _strict(version["schema"]["openAPIV3Schema"])


def _strict(schema: Any) -> Any:
    """An object whose properties are listed has no others: what the API server would prune, silently."""
    if isinstance(schema, list):
        return [_strict(it) for it in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    if isinstance(found.get("properties"), dict) and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found


def crd_problems(document: Mapping[str, Any]) -> list[str]:
    """What the CRD says against a RayService."""
    body = {key: value for key, value in document.items() if key not in ("apiVersion", "kind", "metadata")}
    schema = {**crd_schema()["properties"]["spec"]}
    found = jsonschema.Draft202012Validator(schema).iter_errors(body["spec"])
    return [f"{error.json_path}: {error.message[:200]}" for error in found]


def kubernetes_problems(document: Mapping[str, Any]) -> list[str]:
    """What Kubernetes' schemas say against an object, or against the pods of a RayService."""
    if document["kind"] == "RayService":
        cluster = document["spec"]["rayClusterConfig"]
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        return [
            problem
            for group in groups
            for problem in kubernetes_problems({"apiVersion": "v1", "kind": "Pod", **group["template"]})
        ]
    if document["kind"] in NOT_OF_KUBERNETES:
        return []
    try:
        kubernetes_validate.validate(dict(document), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{document['kind']}: {error.message[:200]}"]
    return []


GOLDEN = Path(__file__).parent / "golden"
DIGEST = "registry.example/plait@sha256:" + "0123456789abcdef" * 4

STARTER = "server: {drain_s: 90}\n"
SPLIT = """
server:
  drain_s: 300
  api_keys: [{sha256: %s, tenant: shop, role: admin}]
  allowed_hosts: [plait.example]
images:
  model: ./models/base
  num_gpus: 1
  num_cpus: 4
  replicas: 2
  controlnets: {edges: {folder: models/edges, num_gpus: 0.5}}
  loras: {folder: models/loras}
recommend:
  models:
    shop: {folder: models/shop, cn: {replicas: {min: 2, max: 8}, num_cpus: 3}, hn: {num_gpus: 0.5, num_cpus: 1}}
deploy:
  name: shop
  namespace: serving
  token_secret: ray-token
  pull_secret: registry
  metrics_secret: plait-metrics
  autoscaling: true
  queue: team
  cpu: {cpus: 8, memory: 64Gi, max_pods: 6, node_selector: {pool: memory}}
  gpu: {cpus: 16, memory: 128Gi, gpus: 2}
  volumes: {models_from: models, models: {path: /srv/models, claim: weights}, cache: {path: /cache, storage_class: nfs}}
  network: {client_namespaces: [edge]}
  upgrade: {gateway_class: istio, step_percent: 10, max_surge_percent: 50}
""" % ("ab" * 32)
SHARDS = """
images: null
recommend: {models: {shop: {folder: models/shop, cn: {shards: {count: 3, replicas: 2, memory_gb: %s}}}}}
deploy: {shard: {memory: 32Gi}, volumes: {models_from: models}}
"""
FILES = {"starter": STARTER, "split": SPLIT}


@pytest.fixture
def render(render):
    """The exit code and what is printed for a plait.yaml."""

    def run(text: str, *arguments: str, image: str | None = DIGEST):
        given = [] if image is None else ["--image", image]
        return render(text, "--target", "kuberay", *given, *arguments)

    return run


def documents(text: str, kind: str | None = None) -> list[dict]:
    return [it for it in yaml.safe_load_all(text) if kind in (None, it["kind"])]


@pytest.mark.parametrize("name", FILES)
def test_manifests_are_the_golden_ones(render, monkeypatch, name):
    """Every change of what is rendered is seen in review; PLAIT_GOLDEN=write writes the files anew."""
    monkeypatch.setattr("plait.offline.deploying.version", lambda _: "2.60.0")
    code, printed = render(FILES[name])
    assert code == 0, printed.err
    if os.environ.get("PLAIT_GOLDEN") == "write":
        (GOLDEN / f"{name}.yaml").write_text(printed.out)
    assert printed.out == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", FILES)
def test_kubernetes_accepts_every_object_and_every_pod(render, name):
    """Claims, policies and budgets, and the pods inside the RayService, by Kubernetes' strict schemas."""
    objects = documents(render(FILES[name])[1].out)
    assert [problem for it in objects for problem in kubernetes_problems(it)] == []


@pytest.mark.parametrize("name", FILES)
def test_kuberay_accepts_the_service(render, name):
    """The CRD's schema, which knows every field; and it does refuse one that it does not know."""
    (service,) = documents(render(FILES[name])[1].out, "RayService")
    assert crd_problems(service) == []
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    service["spec"]["rayClusterConfig"]["authOptions"]["mode"] = "none"
    assert len(crd_problems(service)) == 2


def test_serve_config_means_the_same_plait_yaml(render, tmp_path):
    """Ray's schema accepts it; the builder's arguments are those of the file, with folders where pods have them."""
    more = "images:\n  models_folder: models/more\n  results: {folder: /cache/results}\n"
    _, printed = render(SPLIT.replace("images:\n", more))
    (service,) = documents(printed.out, "RayService")
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    application = ServeDeploySchema.model_validate(serve).applications[0]
    args = AppArgs.model_validate(application.args)
    config = load_config(tmp_path / "plait.yaml")
    assert args.server.api_keys == config.server.api_keys
    assert args.server.drain_s == 300
    assert args.images.model == "/srv/models/base"
    assert str(args.images.models_folder) == "/srv/models/more"
    assert str(args.images.results.folder) == "/cache/results"
    assert str(args.images.controlnets["edges"].folder) == "/srv/models/edges"
    assert str(args.ranking_models["shop"].folder) == "/srv/models/shop"
    asked = {it.name: it.ray_actor_options for it in application.deployments}
    nodes = {name: it.label_selector["plait-node"] for name, it in asked.items()}
    assert nodes == {"ingress": "cn", "engine": "hn", "controlnet-edges": "hn", "cn-shop": "cn", "hn-shop": "hn"}
    assert (asked["engine"].num_gpus, asked["engine"].num_cpus, asked["hn-shop"].num_gpus) == (1, 4, 0.5)


def test_pods_of_one_workload_are_ready_by_it_alone(render):
    """A ranker that is down takes no image pods off the list; where both run, `split.yaml` shows it."""
    (service,) = documents(render("recommend: null\n")[1].out, "RayService")
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health?workload=images"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("deploy: {gpu: {gpu: 2}}", "deploy.gpu.gpu: unknown key"),
        ("deploy: {name: %s}" % ("a" * 48), "deploy.name"),
        ("images: {num_gpus: 4}", "engine wants 0.4 cores and 4 GPUs, and a pod of deploy.gpu has 8 and 1"),
        ("images: {num_cpus: 6}", "engine wants 6 cores, and a pod of deploy.cpu has 4: it fits no node"),
        ("images: {num_cpus: 4, replicas: 3}\ndeploy: {cpu: {max_pods: 2}}", "the replicas need 4 pods"),
        ("images: {num_cpus: 4}\ndeploy: {cpu: {min_pods: 1}}", "nothing adds them without autoscaling"),
        ("deploy: {cpu: {min_pods: 3, max_pods: 2}}", "min_pods 3 is more than max_pods 2"),
        ("deploy: {upgrade: {gateway_class: istio}}", "upgrade needs autoscaling"),
        (
            "deploy: {autoscaling: true, upgrade: {gateway_class: i, step_percent: 50, max_surge_percent: 20}}",
            "step_percent 50 is more than max_surge_percent 20",
        ),
        ("images: {model: ./base}", "images.model: "),
        ("images: {models: {a: ./base}}", "images.models.a: "),
        ("images: {models_folder: /srv/base}", "images.models_folder: /srv/base is not below /models"),
        ("images: {results: {folder: /models/r}}", "images.results.folder: /models/r is written to"),
        ("tuning: {enabled: true, folder: /models/t}", "tuning.folder: /models/t is written to"),
        ("server: {api_keys: [{sha256: %s}]}" % ("ab" * 32), "deploy.metrics_secret"),
        ("deploy: {volumes: {cache: {path: /models}}}", "models and cache are both at /models"),
        ("deploy: {volumes: {cache: {path: cache}}}", "not an absolute path"),
        (r'deploy: {volumes: {cache: {path: "/c\ud800"}}}', "deploy.volumes.cache.path: not valid Unicode"),
        (r'deploy: {volumes: {cache: {path: "c\ud800"}}}', "deploy.volumes.cache.path: not valid Unicode"),
        (SHARDS % 40, "holds 40 GB of tables, and a pod of deploy.shard has 34.4 GB: it fits no node"),
    ],
)
def test_what_cannot_be_deployed_is_refused_in_one_sentence(render, text, said):
    """A contradiction is exit code 1, one line that names the key, and no document at all."""
    code, printed = render(text)
    assert (code, printed.out) == (1, "")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_an_image_has_a_digest_unless_one_says_so(render):
    """--allow-tag, for a registry on this machine."""
    for image, said in ((None, "no image"), ("plait:latest", "has no digest")):
        code, printed = render(STARTER, image=image)
        assert (code, printed.out, said in printed.err) == (1, "", True)
    code, printed = render(STARTER, "--allow-tag", image="localhost:5000/plait:dev")
    assert code == 0, printed.err
    assert "localhost:5000/plait:dev" in printed.out


def test_shards_have_pods_of_their_own(render):
    """A group with its label and memory for what they hold; every shard is a deployment that is bound to it."""
    code, printed = render(SHARDS % 12)
    assert code == 0, printed.err
    (service,) = documents(printed.out, "RayService")
    groups = {it["groupName"]: it for it in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    assert groups["shard"]["labels"] == {"plait-node": "shard"}
    assert groups["shard"]["replicas"] == 3  # two shards of 12 GB in a pod of 34
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    selectors = {it["name"]: it["ray_actor_options"]["label_selector"] for it in application["deployments"]}
    assert [selectors[f"shard{number}-shop"] for number in range(3)] == [{"plait-node": "shard"}] * 3
    assert selectors["cn-shop"] == {"plait-node": "cn"}
    AppArgs.model_validate(application["args"])
