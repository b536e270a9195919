"""A Ray of several nodes on this machine (`ray.cluster_utils`): nodes are raylets, their CPUs and GPUs are numbers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

_OBJECTS_BYTES = 80 << 20
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Where replicas are is known a second after they run, not ten.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    # Idle workers started ahead for logical CPUs would fill this machine's memory.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes loopback for a mistake and listens on all interfaces
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSize:
    """What to start a node with; `labels` as for `ray start --labels`."""

    cpus: int
    gpus: int = 0
    labels: Mapping[str, str] | None = None


class LocalNodes:
    """The cluster. The head has no CPUs and GPUs of its own, so replicas go to the nodes that are added by name. All
    listen on `ip_address`."""

    def __init__(self, folder: Path) -> None:
        from ray._private.services import resolve_ip_for_localhost
        from ray.cluster_utils import Cluster

        # Loopback, unless Ray was imported with its default, by which it takes that for a mistake.
        self.ip_address = str(resolve_ip_for_localhost("127.0.0.1"))
        self._own: dict[str, Any] = {
            "object_store_memory": _OBJECTS_BYTES, "node_ip_address": self.ip_address, "temp_dir": str(folder)
        }  # fmt: skip
        head = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, **self._own}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Where drivers attach."""
        return str(self._cluster.address)

    def add(self, name: str, node: NodeSize) -> None:
        """Start a node and wait until it is there."""
        labels = dict(node.labels or {})
        self._nodes[name] = self._cluster.add_node(num_cpus=node.cpus, num_gpus=node.gpus, labels=labels, **self._own)

    def id_of(self, name: str) -> str:
        """Return Ray's id of a node."""
        return str(self._nodes[name].node_id)

    def lose(self, name: str) -> None:
        """Kill a node with all its processes, as a machine dies that loses power."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        """Stop the nodes and the head; nothing else of this machine's Rays."""
        self._cluster.shutdown()


@contextmanager
def local_nodes() -> Iterator[LocalNodes]:
    """Start a cluster without nodes; it is gone afterwards. The caller attaches with `attached`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory(prefix="rn-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        # Where it writes down which Ray is current; that of others stays theirs.
        with patch.dict(os.environ, RAY_TMPDIR=folder), closing(LocalNodes(Path(folder))) as nodes:
            yield nodes


@contextmanager
def attached(nodes: LocalNodes, *, environ: Mapping[str, str] | None = None, port: int | None = None) -> Iterator[Any]:
    """Attach this process and start Serve; yields `ray.serve`, which is shut down afterwards.

    `environ` is set in the controller and all replicas. `port`: where HTTP is answered on loopback, if it is.
    """
    import ray
    from ray import serve

    ray.init(
        address=nodes.address,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": dict(environ or {})},
        _node_ip_address=nodes.ip_address,
    )
    try:
        if port is None:
            serve.start(proxy_location="Disabled")
        else:
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield serve
    finally:
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()


def deploy(serve: Any, application: Mapping[str, Any]) -> None:
    """Hand an application to Serve's controller as a configuration, which is what `serve deploy` does.

    Ray's own way there is the REST API of its dashboard, which does not run here.
    """
    from ray.serve.schema import ServeDeploySchema

    serve.context._get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))
