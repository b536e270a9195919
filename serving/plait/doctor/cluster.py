"""What a running Ray says: its nodes, what is installed on each, and whether Serve's applications answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plait.doctor.findings import CheckResult, finding, warning
from plait.errors import PlaitError
from plait.server.environment import attached
from plait_deploy.on_ray.nodes import LABEL, split_name

COMPARED = ("python", "plait", "ray", "torch", "diffusers", "transformers", "openvino", "safetensors", "numpy")
"""What must be the same on all nodes: replicas exchange pickles through Ray, and images must have the same bits."""
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node of the cluster. `versions` by package, None where it is missing; empty if the node did not answer.
    `node_class`: the value of its label, empty without one."""

    name: str
    alive: bool
    versions: Mapping[str, str | None]
    node_class: str = ""


def check_cluster(address: str | None, port: int) -> list[CheckResult]:
    """Attach to a Ray, by default to that of `plait serve` on this port, or else to the one of this machine; ask every
    node and Serve; detach."""
    try:
        with attached(address, port) as ray:
            from ray import serve

            nodes, status = _nodes(ray), asdict(serve.status())
    except PlaitError as error:
        advice = "start it, or name it with --address; Ray's token belongs in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        return [finding("ray", False, str(error), advice)]
    return [*node_findings(nodes), *serve_findings(status), *placement_findings(nodes, status)]


def node_findings(nodes: list[NodeFacts]) -> Iterator[CheckResult]:
    """Yield what differs between nodes, and which are lost."""
    lost = [node.name for node in nodes if not node.alive]
    alive = [node for node in nodes if node.alive]
    detail = f"{len(alive)} alive" + (f", lost: {', '.join(lost)}" if lost else "")
    yield warning(
        "nodes", not lost, detail, "see why they went (ray status, kubectl get pods); replicas move by themselves"
    )
    silent = [node.name for node in alive if not node.versions]
    if silent:
        detail = f"no answer from {', '.join(silent)}"
        yield finding("versions", False, detail, "look at those nodes: a task did not run there within a minute")
    asked = [node for node in alive if node.versions]
    differing = []
    for package in COMPARED:
        found: dict[str, list[str]] = {}
        for node in asked:
            found.setdefault(node.versions.get(package) or "missing", []).append(node.name)
        if len(found) > 1 or "missing" in found:
            differing.append(f"{package} " + ", ".join(f"{what} on {' '.join(on)}" for what, on in found.items()))
    detail = "; ".join(differing) or f"the same on {len(asked)} nodes"
    yield finding("versions", not differing, detail, "run one container image on all nodes")


def serve_findings(status: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Yield whether each application runs, and which deployments do not; `status` is what Serve says."""
    applications = status.get("applications") or {}
    if not applications:
        yield warning("serve", False, "no application is deployed", "serve deploy FILE, or plait serve --address")
    for name, app in applications.items():
        bad = [
            f"{deployment} {state['status'].lower()}" + (f" ({state['message'][:200]})" if state.get("message") else "")
            for deployment, state in (app.get("deployments") or {}).items()
            if state["status"] != "HEALTHY"
        ]
        detail = f"{name} {app['status'].lower()}" + (f": {'; '.join(bad)}" if bad else "")
        yield finding("serve", app["status"] == "RUNNING" and not bad, detail, "read the replicas' logs (serve status)")
    sick = [node for node, state in (status.get("proxies") or {}).items() if state != "HEALTHY"]
    if sick:
        detail = f"{len(sick)} HTTP proxies are not healthy"
        yield finding("serve", False, detail, "a node without its proxy takes no requests: look at its log")


def placement_findings(nodes: list[NodeFacts], status: Mapping[str, Any]) -> Iterator[CheckResult]:
    """Yield, for each application whose replicas are placed, whether its classes of nodes are there, which nodes are of
    no class that it knows, and what has no replica; nothing for others."""
    there = {node.node_class for node in nodes if node.alive and node.node_class}
    for app, state in (status.get("applications") or {}).items():
        placed: dict[str, int] = {}
        classes = set()
        for deployment, it in (state.get("deployments") or {}).items():
            if (where := split_name(deployment)) is not None:
                placed[where[0]] = placed.get(where[0], 0) + it["replica_states"].get("RUNNING", 0)
                classes.add(where[1])
        if not placed:
            continue
        wrong = []
        if missing := sorted(classes - there):
            wrong.append(f"no node with the label {LABEL}={', '.join(missing)}")
        if unknown := sorted(there - classes):
            wrong.append(f"{app} knows no class {', '.join(unknown)}")
        if idle := sorted(name for name, running in placed.items() if not running):
            wrong.append(f"no replica of {', '.join(idle)}")
        detail = "; ".join(wrong) or f"{app}: {len(placed)} models on classes {', '.join(sorted(classes))}"
        advice = f"start Ray there with --labels {LABEL}=CLASS, one of those that {app} was rendered with"
        yield warning("placement", not wrong, detail, advice)


def _nodes(ray: Any) -> list[NodeFacts]:
    """Run one task on each node that is alive."""
    task = ray.remote(num_cpus=0, max_retries=0)(_versions_task())
    listed = ray.nodes()
    asked = {
        node["NodeID"]: task.options(label_selector={"ray.io/node-id": node["NodeID"]}).remote()
        for node in listed
        if node["Alive"]
    }
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_S)
    answers = {}
    for node_id, reference in asked.items():
        try:
            answers[node_id] = json.loads(ray.get(reference)) if reference in ready else {}
        except ray.exceptions.RayError:
            answers[node_id] = {}
    return [
        NodeFacts(
            name=str(node.get("NodeManagerHostname") or node["NodeID"][:8]),
            alive=bool(node["Alive"]),
            versions=answers.get(node["NodeID"], {}),
            node_class=node.get("Labels", {}).get(LABEL, ""),
        )
        for node in listed
    ]


def _versions_task() -> Callable[[], str]:
    """Return what a node runs: what is installed there, as JSON. A function inside another one travels as its code, so
    it also runs where plait is missing."""
    packages = COMPARED[1:]

    def versions() -> str:
        import importlib.metadata
        import json as text
        import platform

        found: dict[str, str | None] = {"python": platform.python_version()}
        for name in packages:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                found[name] = None
        return text.dumps(found)

    return versions
