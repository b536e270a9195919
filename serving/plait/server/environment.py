"""The environment that a Ray of ours is started in, how long its start may take, and how a command attaches to a Ray.

Ray is imported after this: it reads its environment when it is imported.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.config import PlaitConfig
from plait.errors import ServeError
from plait.server import processes
from plait.server.ports import free_port
from plait.server.state import read_record, state_root
from plait_serving.deployments.ray_internals import head_node, node_services, raylet_module, signal_utils

_NODE_POLL_S, _CONNECT_S = 0.1, 5.0
_LEFT_OUT = ("start_monitor", "start_log_monitor")
"""An autoscaler for nodes that nobody adds, and what would bring workers' lines to our terminal."""
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_UNTOLD = "dashboard_agent_listen_port"
"""The one that Ray tells the agent and not the raylet."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray runs workers at nice 15, for machines that people work at; ours are the server.
    "RAY_worker_niceness": "0",
    # Serve ends a proxy that fails three checks of 5 s, and starts another: a busy machine may need longer for one.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # And it notices that the proxy is dead when its third check fails. Nothing listens until then.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # The controller looks after everything ten times a second, with a thirtieth of a core. What computes on all cores
    # waits at every operation for the thread that was interrupted: an idle server cost 8 % of a UNet's steps on two.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
}
"""What a Ray that serves plait is started with, on whatever machines."""


@contextmanager
def patient_start(limit_s: float) -> Iterator[None]:
    """Let `ray.init` take as long for its node as a start may take, and start no more than plait needs.

    A busy machine exceeds Ray's own limits. Those that are read from the environment: its GCS has 30 s to say its port,
    an agent 100 s to answer. Those that are not (Ray 2.60): a raylet ends if its agents have not said their ports after
    15 s (ray-project/ray#65983), so it is told them; and `Node.__init__` asks `get_node` for 30 s whether the raylet
    has joined. Raises `ServeError` when the raylet ends meanwhile.
    """
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(max(30, round(limit_s))))
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(max(100, round(limit_s)) * 1000))
    services = node_services()
    ask, start, run = services.get_node, services.start_raylet, services.start_ray_process
    until_s = time.monotonic() + limit_s

    def get_node(gcs_address: str, node_id: str) -> Any:
        while True:
            try:
                return ask(gcs_address, node_id)
            except RuntimeError:
                if not processes.has_child("raylet"):
                    raise ServeError("Ray's raylet ended while it started") from None
                if time.monotonic() > until_s:
                    raise
            time.sleep(_NODE_POLL_S)

    def start_raylet(*arguments: Any, **named: Any) -> Any:
        ports = (free_port("127.0.0.1") for _ in _AGENT_PORTS)
        named |= {name: named.get(name) or port for name, port in zip(_AGENT_PORTS, ports, strict=True)}
        stated = f"--{_UNTOLD}={named[_UNTOLD]}"

        def start_ray_process(command: Sequence[str], *more: Any, **options: Any) -> Any:
            return run([*command, stated], *more, **options)

        with _replaced(services, start_ray_process=start_ray_process):
            return start(*arguments, **named)

    left_out = dict.fromkeys(_LEFT_OUT, lambda _: None)
    with _replaced(services, get_node=get_node, start_raylet=start_raylet), _replaced(head_node(), **left_out):
        yield


@contextmanager
def own_signals(install: Callable[[], None] | None) -> Iterator[None]:
    """Keep our handler of SIGTERM while this process connects to Ray, and `install` it again then, if that is given.

    Ray's handler raises SystemExit, past what stops an unfinished start. That of its C++ part, which replaces ours
    (Ray 2.60), aborts the process; it comes with the core worker.
    """
    if install is None:
        yield
        return
    module = raylet_module()
    core_worker = module.CoreWorker

    def connected(*arguments: Any, **named: Any) -> Any:
        made = core_worker(*arguments, **named)
        install()
        return made

    with _replaced(signal_utils(), set_sigterm_handler=lambda _: None), _replaced(module, CoreWorker=connected):
        yield


@contextmanager
def _replaced(owner: Any, **by: Any) -> Iterator[None]:
    """Have other attributes for the duration of the block."""
    before = {name: getattr(owner, name) for name in by}
    for name, value in by.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def prepare_environment(token_path: Path) -> None:
    """Set Ray's environment for our own cluster: authenticated with our token, quiet, no usage reports."""
    if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(token_path):
        return
    # Ray reads its environment when it is imported.
    assert "ray" not in sys.modules, "the environment of a local Ray must be set before Ray is imported"
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token" and not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # Ray would write ~/.ray/auth_token; a home may be missing or read-only.
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path)
    os.environ["RAY_USAGE_STATS_ENABLED"] = RAY_ENVIRONMENT["RAY_USAGE_STATS_ENABLED"]
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Ray takes 127.0.0.1 for a mistake and listens on all interfaces, except where no other machines are to take part:
    # the switch is named after the systems on which that is the default.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.pop("RAY_ADDRESS", None)


def prepare_proxies(config: PlaitConfig) -> None:
    """Set what Serve's proxies need to check requests as the ingress does; a callback of the user's own stays."""
    from plait_serving.deployments.proxy import CALLBACK_VARIABLE, HOSTS_VARIABLE, proxy_environment

    ours = proxy_environment(config.server.answered_hosts)
    os.environ.setdefault(CALLBACK_VARIABLE, ours[CALLBACK_VARIABLE])
    os.environ[HOSTS_VARIABLE] = ours[HOSTS_VARIABLE]


@contextmanager
def attached(address: str | None, port: int) -> Iterator[Any]:
    """Attach to a Ray, by default to that of `plait serve` on this port, or else to the one of this machine; yields the
    module `ray`. Raises `ServeError`."""
    where, token = _where(address, port)
    if token is not None and token.is_file():
        prepare_environment(token)  # as the server did: else Ray takes its address on loopback for a mistake
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    _reach(where)  # Ray would try for minutes
    connect(where, logging_level=logging.ERROR)
    try:
        yield ray
    finally:
        ray.shutdown()


def connect(address: str, *, logging_level: int = logging.WARNING) -> None:
    """Make this process a driver of a Ray. Raises `ServeError`."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging_level, namespace="plait")
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ServeError(f"no Ray answers at {address}: {' '.join(str(error).split())[:200]}") from error


def _where(address: str | None, port: int) -> tuple[str, Path | None]:
    """Return the address, and the file with Ray's token if it is the Ray of a `plait serve`."""
    if address is not None:
        return address, None
    folder = state_root(os.environ) / f"port-{port}"
    record = read_record(folder)
    return ("auto", None) if record is None else (record.gcs_address or "auto", folder / "auth_token")


def _reach(address: str) -> None:
    """Connect once to an address of the form host:port. Raises `ServeError` if nobody answers there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ServeError(f"no Ray answers at {address}: {error.strerror or error}") from error
