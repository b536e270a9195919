"""The Serve application: the rows of `plait.deployments`, bound to each other.

`build` is a Serve application builder: `import_path: plait.app:build` in a Serve YAML, with `AppArgs` as its `args`
(`plait deploy render` writes both).
"""

# No `from __future__ import annotations` here: Serve reads the class of `build`'s argument from its signature.
from collections.abc import Mapping, Sequence
from functools import cache
from pkgutil import resolve_name
from typing import Any

from ray import serve

from plait.config import ServedConfig
from plait.deployments import Deployment, HandleOf, deployments
from plait.gpu_shares import running_cluster, with_gpus
from plait_serving.deployments import INGRESS
from plait_serving.deployments.handles import PlacedHandle
from plait_serving.deployments.process import LazyReplica
from plait_serving.deployments.ray_internals import set_version
from plait_serving.deployments.scaling import autoscaling

_COMMON: dict[str, Any] = {
    # Serve must never queue in front of us: our queues are bounded and can tell clients when to retry.
    "max_ongoing_requests": 100_000,
    "max_queued_requests": -1,
    # A folder that does not load now will not load the 20th time either (Serve's default).
    "max_constructor_retry_count": 2,
    "graceful_shutdown_wait_loop_s": 0.2,
    # Serve learns that a replica died when it checks it next, and starts another only then. A check costs both
    # processes less than a millisecond.
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 30.0,
}


class AppArgs(ServedConfig):
    """The parts of a plait.yaml that the application needs. `node_classes`: with any, deployments are placed on nodes
    of these classes by the policy of `plait_deploy.on_ray`."""

    node_classes: tuple[str, ...] = ()


def build(args: AppArgs) -> serve.Application:
    """Build the application of a configuration. This is cheap: models are loaded in the replicas."""
    return bind(deployments(with_gpus(args, running_cluster())), node_classes=args.node_classes)


def bind(
    rows: Sequence[Deployment], *, node_classes: Sequence[str] = (), salt: str | None = None, surges: bool = True
) -> serve.Application:
    """Return the application of these rows. `salt`: Serve keeps the replicas of deployments that were bound alike with
    it; without one, all start anew. `surges=False`: old replicas stop before new ones start, whatever the rows say."""
    handles: dict[str, Any] = {}
    for row in reversed(rows):  # each calls only rows below it
        options = {**_COMMON, **row.options, "user_config": row.knobs}
        if not surges:
            options["max_surge_percent"] = 0
        made, arguments, places = _REPLICA, _with_handles(row.args, handles), node_classes
        if row.name == INGRESS:
            made, places = _ingress(row.target), ()
        else:
            arguments["target"] = row.target
        bound: dict[str, serve.Application] = {}
        for place in places or ("",):
            deployment = made.options(**options, **_placed(row, place))
            if salt is not None:
                set_version(deployment, row.version(salt))
            bound[place] = deployment.bind(**arguments)
        handles[row.name] = PlacedHandle(bound) if places else bound[""]
    return handles[rows[0].name]


def _placed(row: Deployment, node_class: str) -> dict[str, Any]:
    """Return the name, the number of replicas and what one reserves: anywhere, or on nodes of a class."""
    if node_class:
        from plait_deploy.on_ray.nodes import name_at
        from plait_deploy.on_ray.policy import placed_options

        return {"name": name_at(row.name, node_class), **placed_options(row.demand(), node_class)}
    fixed = {"num_replicas": row.max_replicas}
    count = fixed if row.scaling is None else {"autoscaling_config": autoscaling(row.scaling)}
    return {"name": row.name, "ray_actor_options": {"num_cpus": row.num_cpus, "num_gpus": row.num_gpus}, **count}


_REPLICA = serve.deployment(LazyReplica)


@cache
def _ingress(target: str) -> serve.Deployment:
    """Return the class as a deployment; Serve takes 20 ms to make one."""
    return serve.deployment(serve.ingress()(resolve_name(target)))


def _with_handles(value: Any, handles: Mapping[str, Any]) -> Any:
    """Return an argument with Serve's handles in their places."""
    if isinstance(value, HandleOf):
        return handles[value.name]
    if isinstance(value, Mapping):
        return {key: _with_handles(it, handles) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_handles(it, handles) for it in value)
    return value
