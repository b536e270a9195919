"""All private names of Ray and Serve that plait uses (Ray 2.60), each with what no public name gives.

They are imported where they are needed: Ray reads its environment when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MANY_NODES = 256


def set_version(deployment: Any, version: str) -> None:
    """Set Serve's version of a deployment. `options(version=...)` was removed, but versions are still honoured
    (`ServeControllerClient.deploy_applications`). Without one, a deployment restarts in every change."""
    deployment._version = version


def given_knobs() -> Mapping[str, Any]:
    """Return the `user_config` of this replica, empty without one and outside of a replica. Serve passes it to
    `reconfigure` only once the replica is made; bound as an argument, a changed knob would be a restart."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return serve.get_replica_context()._deployment_config.user_config or {}
    except RayServeException:
        return {}


def known_replicas(handle: Any) -> frozenset[str]:
    """Return the names of the replicas that Serve has reported to this process, which costs no call; none if it has
    not, or `handle` is not Serve's own. Serve's status only has numbers."""
    router = getattr(getattr(handle, "_router", None), "_asyncio_router", None)
    known = getattr(getattr(router, "_request_router", None), "curr_replicas", None) or ()
    return frozenset(replica.to_full_id_str() for replica in list(known))


def proxy_queue() -> type:
    """Return the queue in which Serve's proxy keeps what the ingress has not fetched yet: it has no bound."""
    from ray.serve._private.http_util import MessageQueue

    return MessageQueue  # type: ignore[no-any-return]


def replace_proxy_queue(queue: type) -> None:
    """Have the proxy that is made in this process use another queue; a callback may only add middlewares."""
    from ray.serve._private import proxy

    proxy.MessageQueue = queue


def serve_http_config() -> Any:
    """Return where the running Serve listens, `host` and `port`; its status does not say."""
    from ray import serve

    return serve.context._get_global_client().http_config


def is_declared(application: str) -> bool:
    """Return whether an application came by `serve deploy`; Serve's status does not say."""
    from ray import serve

    found = serve.context._get_global_client().get_serve_details()["applications"].get(application)
    return found is not None and found["source"] == "declarative"


def drivers() -> Sequence[Mapping[str, Any]]:
    """Return the jobs of this Ray; the public list asks the dashboard, which we do not start."""
    import ray

    return ray._private.state.jobs()  # type: ignore[no-any-return]


def noted(key: str) -> str:
    """Return what `note` has kept in this Ray under a key, or nothing. Ray has no public store without an actor."""
    from ray.experimental import internal_kv

    return (internal_kv._internal_kv_get(key.encode()) or b"").decode()


def note(key: str, value: bytes) -> None:
    """Keep a text for all drivers of this Ray until it ends."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key.encode(), value)


def dead_processes() -> Sequence[str] | None:
    """Return the names of the processes of this process's own Ray that have died; None if it is not connected."""
    import ray

    node = ray._private.worker._global_node
    return None if node is None or not ray.is_initialized() else [name for name, _ in node.dead_processes()]


def node_groups() -> Sequence[tuple[str, int, int]]:
    """Return the kinds of nodes that this Ray's autoscaler may add, each with its GPUs and how many there may be, and
    none without an autoscaler. No public name has them."""
    import ray

    found = ray._private.state.state.get_cluster_config()
    groups = [] if found is None else found.node_group_configs
    most = {-1: _MANY_NODES}  # no bound
    return [(it.name, int(it.resources.get("GPU", 0)), most.get(it.max_count, it.max_count)) for it in groups]


def gpus_here() -> tuple[int, str]:
    """Return how many GPUs a Ray that is started on this machine will have, and what it calls them."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    gpus = get_accelerator_manager_for_resource("GPU")
    visible = gpus.get_current_process_visible_accelerator_ids()
    there = gpus.get_current_node_num_accelerators()
    count = there if visible is None else min(there, len(visible))
    return count, (gpus.get_current_node_accelerator_type() or "") if count else ""


def node_services() -> Any:
    """Return the module that `ray.init` starts a node's processes with; some of its limits are constants."""
    from ray._private import services

    return services


def head_node() -> type:
    """Return the class whose `start_*` methods start a head's processes; `ray.init` cannot be told to leave any out."""
    from ray._private.node import Node

    return Node  # type: ignore[no-any-return]


def signal_utils() -> Any:
    """Return the module with the function that `ray.init` replaces the handler of SIGTERM with."""
    from ray._private import utils

    return utils


def raylet_module() -> Any:
    """Return the module with the class of a process's core worker, which `ray.init` makes last."""
    from ray import _raylet

    return _raylet
