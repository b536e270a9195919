"""A scenario played on a Ray of several nodes on this machine, with logical GPUs and replicas that do nothing: with
plait's planner, and with each of Serve's own ways of placing replicas. What is stranded after each step?"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from plait_bench.benchmark import Reading, Say, Workload, readings
from plait_bench.placement.cluster import LocalNodes, NodeSize, attached, deploy, local_nodes
from plait_deploy.on_ray.gauges import occupied
from plait_deploy.on_ray.nodes import LABEL, NODE, living_nodes, node_number, ray_nodes, split_name, whereabouts
from plait_deploy.on_ray.policy import placed_deployments, policy_options
from plait_deploy.placement.plan import use_of
from plait_deploy.placement.values import WHOLE, Demand, task_of

if TYPE_CHECKING:
    from ray import serve

PLAIT, PACK = "plait", "ray-pack"
SYSTEMS = (PLAIT, "ray-spread", PACK)
_CPUS = 0.05
"""Of a replica; what is scarce here is GPUs."""
_ENVIRONMENT = {PACK: {"RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY": "1"}}
_APP = "placed"
_PATIENCE_S = 90.0
"""When no replica has started or ended for so long, those that do not run have no place. A start takes seconds."""
_POLL_S = 1.0
_ANSWER_S = 10.0
_ASKED_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChange:
    """One change. `lost`, `added`: names of nodes; `replicas`: new numbers by deployment."""

    name: str
    lost: str = ""
    added: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterScenario:
    """Nodes by name, which is their class, deployments, and what happens after the start."""

    nodes: Mapping[str, NodeSize]
    demands: tuple[Demand, ...]
    steps: tuple[ClusterChange, ...]


def _nodes(names: str, gpus: int) -> dict[str, NodeSize]:
    return {name: NodeSize(cpus=16, gpus=gpus, labels={LABEL: name}) for name in names}


def _demands(wanted: Mapping[float, tuple[int, ...]]) -> tuple[Demand, ...]:
    """Return deployments by the GPUs of a replica, each with as many replicas as its entry says."""
    return tuple(
        Demand(
            name=f"g{round(1000 * gpus)}-{number}",
            task=task_of("a replica", num_cpus=_CPUS, num_gpus=gpus),
            replicas=replicas,
        )
        for gpus, counts in wanted.items()
        for number, replicas in enumerate(counts, 1)
    )


SMALL = ClusterScenario(
    nodes=_nodes("abc", 4),
    demands=_demands({0.3: (2,), 0.4: (2,), 0.5: (2,), 0.6: (1,), 1: (1,), 2: (1,)}),
    steps=(
        ClusterChange(name="more", replicas={"g300-1": 3, "g600-1": 2}),
        ClusterChange(name="lost", lost="b"),
        ClusterChange(name="added", added="b"),
        ClusterChange(name="fewer", replicas={"g400-1": 1, "g500-1": 1}),
        ClusterChange(name="large", replicas={"g2000-1": 3}),
    ),
)

LARGE = ClusterScenario(
    nodes=_nodes("abcdef", 8),
    demands=_demands(
        {
            0.2: (3, 2, 2), 0.25: (2, 2), 0.3: (3, 2, 2), 0.4: (2, 2, 1), 0.45: (2, 1), 0.5: (2, 2), 0.6: (2, 2, 1),
            0.7: (1, 1), 0.8: (1,), 1: (3, 2), 2: (2,), 4: (2,),
        }
    ),
    steps=(
        ClusterChange(name="more", replicas={"g250-1": 4, "g300-1": 6, "g450-1": 4, "g600-1": 4}),
        ClusterChange(name="lost", lost="c"),
        ClusterChange(name="added", added="c"),
        ClusterChange(name="fewer", replicas={"g200-1": 1, "g300-1": 2, "g450-1": 2, "g500-1": 1, "g600-1": 1}),
        ClusterChange(name="large", replicas={"g4000-1": 5}),
    ),
)  # fmt: skip


class OnRay(Workload):
    """A scenario, played by each system on a fresh cluster; a row for each step."""

    systems = SYSTEMS
    pairs = ()
    most_rounds = 1
    metrics: Mapping[str, str] = {"stranded_pct": "% of GPUs", "without_place": "replicas"}
    untimed = metrics

    def __init__(self, name: str, scenario: ClusterScenario) -> None:
        self.name, self.scenario = name, scenario
        self._say: Say = lambda _: None

    def prepare(self, say: Say) -> None:
        """Keep where progress goes."""
        self._say = say

    def take(self, system: str, number: int) -> Sequence[Reading]:
        """Play the scenario on a cluster of its own."""
        found: list[Reading] = []
        with local_nodes() as nodes:
            for step, values in play(system, self.scenario, nodes):
                self._say(f"{system}, {step}: {values}")
                found += readings(values, workload=f"{self.name}-{step}")
        return found


def play(system: str, scenario: ClusterScenario, nodes: LocalNodes) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield how the cluster, whose nodes are started here, stands after each step."""
    for name, node in scenario.nodes.items():
        nodes.add(name, node)
    with attached(nodes, environ=_ENVIRONMENT.get(system)) as serve:
        replicas, demands = _Replicas(serve), scenario.demands
        for step in (ClusterChange(name="start"), *scenario.steps):
            gone = {node_number(nodes.id_of(step.lost))} if step.lost else set()
            if step.lost:
                nodes.lose(step.lost)
            elif step.added:
                nodes.add(step.added, scenario.nodes[step.added])
            else:
                demands = tuple(replace(each, replicas=step.replicas.get(each.name, each.replicas)) for each in demands)
                deploy(serve, _application(system, demands, tuple(scenario.nodes)))
            yield step.name, _standing(demands, replicas.settled(sum(each.replicas for each in demands), gone))


def _standing(demands: Sequence[Demand], found: Collection[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return what is stranded, and how many replicas have no place, by what those that run say of themselves."""
    reports: dict[str, list[Mapping[str, Any]]] = {}
    for said in found:
        reports.setdefault(said["name"], []).append(said)
    running = [(each.task, said) for each in demands for said in reports.get(each.name, ())]
    state = occupied([each for each in living_nodes(ray_nodes()) if each.node.gpus], running)
    use = use_of(state, demands)
    taken = sum(task.total_milli for task, _ in running)
    assert use.gpus * WHOLE - taken == int(state.gpu_free.sum()), "two replicas say that they have the same GPU"
    without = sum(each.replicas for each in demands) - len(found)
    return {"stranded_pct": 100 * use.stranded / use.gpus, "without_place": without}


class _Replicas:
    """The replicas of the application, as Serve and they themselves know them."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve
        self._handle = cache(lambda name: serve.get_deployment_handle(name, _APP))

    def settled(self, wanted: int, gone: Collection[float]) -> Collection[Mapping[str, Any]]:
        """Wait until as many as wanted run, or nothing has changed for long; return what each says.

        Replicas on a lost node are found by asking: Serve takes some seconds to notice.
        """
        seen: dict[str, int] = {}
        changed_s = time.monotonic()
        while True:
            counts = self._counts()
            if counts != seen:
                seen, changed_s = counts, time.monotonic()
            waited_long = time.monotonic() - changed_s > _PATIENCE_S
            if sum(counts.values()) == wanted or waited_long:
                names = [name for name, count in counts.items() if count]
                with ThreadPoolExecutor(_ASKED_AT_ONCE) as threads:
                    found = [said for of in threads.map(self._ask, names) for said in of if said[NODE] not in gone]
                if len(found) == wanted or waited_long:
                    return found
            time.sleep(_POLL_S)

    def _counts(self) -> dict[str, int]:
        """Return the number of running replicas of each deployment, as Serve's controller knows it."""
        app = self._serve.status().applications.get(_APP)
        return {
            name: sum(count for state, count in it.replica_states.items() if str(state) == "RUNNING")
            for name, it in (app.deployments if app else {}).items()
            if name != "root"
        }

    def _ask(self, name: str) -> list[Mapping[str, Any]]:
        """Return what each replica of a deployment says of itself, with the demand's name."""
        try:
            answers = self._handle(name).broadcast("whereabouts").results(timeout_s=_ANSWER_S, return_exceptions=True)
        except Exception:  # its last replica has ended; Ray's and Serve's errors have no common base
            return []
        demand = (split_name(name) or (name,))[0]
        return [{**said, "name": demand} for said in answers if isinstance(said, Mapping)]


def _application(system: str, demands: tuple[Demand, ...], classes: tuple[str, ...]) -> dict[str, Any]:
    """Return the application as a Serve configuration has it."""
    if system == PLAIT:
        options = placed_deployments(demands, classes)
        more = {"autoscaling_policy": policy_options(demands, classes)}
    else:
        options = {each.name: _plain(each) for each in demands}
        more = {}
    return {
        "name": _APP,
        "route_prefix": None,
        "import_path": f"{__name__}:build",
        "args": {"deployments": list(options)},
        "deployments": [{"name": name, **said} for name, said in options.items()],
        **more,
    }


def _plain(demand: Demand) -> dict[str, Any]:
    needs = {"num_cpus": demand.task.cpu_milli / WHOLE, "num_gpus": demand.task.total_milli / WHOLE}
    return {"num_replicas": demand.replicas, "ray_actor_options": needs}


class Tiny:
    """A replica that does nothing but hold its resources and say where it is."""

    async def whereabouts(self) -> dict[str, float]:
        """Return where it is."""
        return whereabouts()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return where it is; Serve calls this for the policy."""
        return whereabouts()


class Root:
    """The application's entry; nobody calls it."""

    def __init__(self, *handles: Any) -> None:
        self._handles = handles


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application with the deployments that `args` names."""
    from ray import serve

    tiny = [
        serve.deployment(Tiny).options(name=name, health_check_period_s=2.0, graceful_shutdown_timeout_s=1.0).bind()
        for name in args["deployments"]
    ]
    root = serve.deployment(Root).options(name="root", ray_actor_options={"num_cpus": 0})
    return root.bind(*tiny)
