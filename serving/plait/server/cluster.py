"""The command's side of Ray: start or attach, deploy, watch, drain, stop. All its Ray and Serve calls are made here.

Ray is imported when a cluster is created, because its environment (authentication, usage reports) is read at import.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config import PlaitConfig, ServerSection
from plait.deployments import Deployment
from plait.errors import ServeError
from plait.gpu_shares import running_cluster
from plait.server.environment import connect, own_signals, patient_start, prepare_environment, prepare_proxies
from plait.server.ports import WILDCARDS, url_of
from plait_deploy.placement.state import ClusterState
from plait_serving.deployments import ray_internals
from plait_serving.imports import importing

_log = logging.getLogger(__name__)

APP = "plait"
"""The name in Serve of the application that `plait serve` runs."""

_STOP_TIMEOUT_S = 10.0
"""Ray's own shutdown may hang when a part of it is already dead; whatever is left after this time is killed by
identity."""

_PROXY_POLL_S = 0.2

_HEAD = "node:__internal_head__"
"""A resource that only Ray's head node has."""

_STATE_PERIODS_S = (0.05, 1.0)
_STATE_SHARE = 0.1
"""The interval between polls, as a share of the time waited. Serve's answer about its deployments costs CPU time
here and in its controller (it pickles the request router of each), and models that are loading need the CPUs
more. So a waiting process polls often at first, then less and less often."""

_NO_ROOM = "to be scheduled"
"""What Serve says of a deployment whose replica Ray has not placed for half a minute (`SLOW_STARTUP_WARNING_S` in
ray/serve/_private/deployment_state.py, Ray 2.60)."""

_ERROR = re.compile(r"(?P<ours>plait)?[\w.]*(Error|Exception): *(?P<told>.+)")

_ANSWER_S = 5.0
"""Time for a replica that is ready to answer a question."""

_LAST_ANSWERS_S = 2.0
"""Time for the last answers: once the last image is finished, its answer still has to be encoded and sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """The progress of the application. `failure` is set once it can no longer come up; `no_room`: the deployments with
    replicas, but no room on the cluster for one more."""

    running: bool
    waiting_for: tuple[str, ...] = ()
    failure: str | None = None
    no_room: tuple[str, ...] = ()


class Cluster:
    """A Ray cluster that runs the application. `local`: we started it and stop all of it. `host`: where HTTP listens,
    which may be a wildcard; `url`: how this machine reaches it, at `reached_at` if that is another machine."""

    def __init__(
        self, *, local: bool, started_serve: bool, host: str, port: int, reached_at: str | None = None
    ) -> None:
        self.local, self.host, self.url = local, host, url_of(reached_at or host, port)
        self._started_serve = started_serve
        self._app_name: str | None = None
        self._hand_over: Callable[[], None] = lambda: None
        self._may_surge = False

    @classmethod
    def start_local(
        cls,
        config: PlaitConfig,
        *,
        port: int,
        num_cpus: int,
        folder: Path,
        token_path: Path,
        signals: Callable[[], None] | None = None,
    ) -> Cluster:
        """Start our own Ray, listening on the loopback interface only, with its files in `folder`, which is created;
        and Serve's HTTP proxy on `port`. `signals`: see `own_signals`. Raises `ServeError`."""
        prepare_environment(token_path)
        prepare_proxies(config)
        folder.mkdir(mode=0o700)
        import ray

        with patient_start(config.server.ready_timeout_s), own_signals(signals):
            ray.init(
                address="local",
                num_cpus=config.ray.num_cpus or num_cpus,
                num_gpus=config.ray.num_gpus,
                object_store_memory=config.ray.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.WARNING,
                namespace="plait",
                _temp_dir=str(folder),
                _node_ip_address="127.0.0.1",
            )
        cls._start_serve(config, port)
        return cls(local=True, started_serve=True, host=config.server.host, port=port)

    @classmethod
    def attach(cls, config: PlaitConfig, *, port: int, signals: Callable[[], None] | None = None) -> Cluster:
        """Attach to a running Ray. A Serve instance that already runs there keeps its own HTTP address. `signals`: see
        `own_signals`. Raises `ServeError`."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        from ray import serve

        with own_signals(signals):
            connect(config.ray.address)
        existing = bool(serve.status().proxies)
        http = ray_internals.serve_http_config() if existing else None
        host = config.server.host if http is None else http.host or config.server.host
        reached_at = _reached_at(config.server.model_copy(update={"host": host}))
        if not existing:
            try:
                cls._start_serve(config, port)
            except BaseException:
                _in_thread(serve.shutdown, "plait-stop", timeout_s=3 * _STOP_TIMEOUT_S)
                raise
        port = port if http is None else http.port
        return cls(local=False, started_serve=not existing, host=host, port=port, reached_at=reached_at)

    @staticmethod
    def _start_serve(config: PlaitConfig, port: int) -> None:
        """Start Serve and return when the HTTP proxy is ready. Raises `ServeError`.

        Serve kills a proxy that is not ready after 15 s, as happens on a busy machine, and starts another, but
        reports to the waiting caller that the first one died; so this waits for the next one.
        """
        from ray import exceptions, serve

        until_s = time.monotonic() + config.server.ready_timeout_s
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": config.server.host, "port": port, "request_timeout_s": None},
                logging_config={"enable_access_log": False},
            )
        except (exceptions.RayActorError, TimeoutError) as error:
            _log.warning("Serve's HTTP proxy did not start in time; waiting for the next: %s", error)
            while "HEALTHY" not in (states := [str(state) for state in serve.status().proxies.values()]):
                if time.monotonic() > until_s:
                    message = f"Serve's HTTP proxy was not ready after {config.server.ready_timeout_s:g} s"
                    raise ServeError(f"{message} ({', '.join(states).lower() or 'none there'})") from error
                time.sleep(_PROXY_POLL_S)

    @property
    def gcs_address(self) -> str:
        """The address at which other processes of this user can attach to this Ray."""
        import ray

        return str(ray.get_runtime_context().gcs_address)

    def nodes(self) -> ClusterState | None:
        """Return the nodes of this Ray, as if they were empty."""
        return running_cluster()

    def claim(self, name: str) -> None:
        """Note that this process runs the application of that name, and will take it down. One whose `plait serve` has
        died may be claimed. Raises `ServeError` that says who runs it."""
        import ray

        key = f"plait serve {name}"
        noted = ray_internals.noted(key)
        holder = "serve deploy" if ray_internals.is_declared(name) else None
        for job in ray_internals.drivers():
            if job["JobID"] == noted and not job["IsDead"]:
                holder = f"the plait serve on {job['DriverIPAddress']} (process {job['DriverPid']})"
        if holder is not None:
            raise ServeError(f"this Ray has an application {name}, of {holder}: stop that first")
        ray_internals.note(key, ray.get_runtime_context().get_job_id().encode())

    def own_name(self, prefix: str) -> str:
        """Return a name for an application that is of no use without this process, and delete what others of that
        prefix, which have ended, left here: the name has Ray's number of the process."""
        import ray
        from ray import serve

        ended = {f"{prefix}-{job['JobID']}" for job in ray_internals.drivers() if job["IsDead"]}
        for name in ended & serve.status().applications.keys():
            serve.delete(name)
        return f"{prefix}-{ray.get_runtime_context().get_job_id()}"

    def deploy(
        self, rows: Sequence[Deployment], *, name: str, salt: str, route_prefix: str = "/", in_place: bool = False
    ) -> None:
        """Hand the application of these rows to Serve and return at once; `state` reports its progress.

        Replicas of deployments that were deployed alike with this `salt` are kept, and only get new knobs. `in_place`:
        those that are replaced stop first, as if there were no room for others beside them.
        """
        with importing():
            from plait.app import bind
        from ray import serve

        def hand_over() -> None:
            target = bind(rows, salt=salt, surges=self._may_surge)
            run = serve.RunTarget(target=target, name=name, route_prefix=route_prefix)
            serve.run_many([run], wait_for_applications_running=False)

        self._app_name, self._may_surge, self._hand_over = name, not in_place, hand_over
        hand_over()

    def delete(self) -> None:
        """Delete the application, and wait until it is gone."""
        from ray import serve

        if self._app_name is not None:
            serve.delete(self._app_name)

    def detach(self) -> None:
        """Disconnect from a Ray that we attached to; whatever runs there continues."""
        self._app_name = None
        self.stop(hurry=False)

    def state(self) -> DeploymentState:
        """Return the progress of the application."""
        from ray import serve

        app = serve.status().applications.get(self._app_name or "")
        if app is None:
            return DeploymentState(running=False, failure="the application was deleted")
        waiting = tuple(sorted(name for name, it in app.deployments.items() if it.status != "HEALTHY"))
        if app.status in ("DEPLOY_FAILED", "UNHEALTHY", "NOT_STARTED"):
            told = {name: it.message for name, it in app.deployments.items() if it.status == "DEPLOY_FAILED"}
            failures = [f"{name}: {_reason(message)}" for name, message in told.items()] or [_reason(app.message)]
            failure = "; ".join(failures) if app.status == "DEPLOY_FAILED" else None
            return DeploymentState(running=False, waiting_for=waiting, failure=failure)
        stuck = [name for name, it in app.deployments.items() if _NO_ROOM in it.message]
        no_room = tuple(sorted(name for name in stuck if app.deployments[name].replica_states.get("RUNNING")))
        return DeploymentState(running=app.status == "RUNNING", waiting_for=waiting, no_room=no_room)

    def states(
        self,
        limit_s: float,
        *,
        give_up: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = _log.warning,
    ) -> Iterator[DeploymentState]:
        """Yield `state` until `limit_s` has passed or `give_up` returns true; it lags by a tenth of the time waited, at
        most 1 s. An update that finds no room for new replicas beside the old ones goes on without, and says so."""
        started_s = time.monotonic()
        while not give_up() and (waited_s := time.monotonic() - started_s) < limit_s:
            yield (state := self.state())
            if state.no_room and self._may_surge:
                self._may_surge = False
                say(no_room_for(state.no_room))
                self._hand_over()
            shortest_s, longest_s = _STATE_PERIODS_S
            next_s = time.monotonic() + min(max(_STATE_SHARE * waited_s, shortest_s), longest_s)
            while not give_up() and time.monotonic() < next_s:
                time.sleep(shortest_s)

    def lost(self) -> str | None:
        """Return why Ray itself is lost, or None while it is running."""
        dead = ray_internals.dead_processes()
        if dead is None:
            return "the connection to Ray was lost"
        return f"Ray's {', '.join(dead)} died" if dead and self.local else None

    def ask(self, deployment: str, method: str) -> Any:
        """Return what a method of one of a deployment's replicas returns."""
        from ray import serve

        handle = serve.get_deployment_handle(deployment, self._app_name)
        return handle.broadcast(method).results(timeout_s=_ANSWER_S)[0]

    def drain(self, deployments: Sequence[str], *, drain_s: float, hurry: Callable[[], bool]) -> bool:
        """Ask the replicas of each deployment, in this order, to finish their requests. Return False if that was cut
        short."""
        from ray import serve

        done = threading.Event()

        def ask() -> None:
            try:
                until_s = time.monotonic() + drain_s
                for deployment in deployments:
                    handle = serve.get_deployment_handle(deployment, self._app_name)
                    left_s = max(_LAST_ANSWERS_S, until_s - time.monotonic())
                    handle.broadcast("drain", left_s).results(timeout_s=left_s + _LAST_ANSWERS_S)
                done.set()
            except Exception:
                _log.exception("draining")

        _in_thread(ask, "plait-drain", timeout_s=drain_s + 4 * _LAST_ANSWERS_S, hurry=hurry)
        return done.is_set()

    def stop(self, *, hurry: bool, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Remove what we started: all of a local Ray; on another Ray only our application (and Serve, if we started
        it).

        `meanwhile` is called repeatedly, in this thread: Ray's shutdown begins by resetting SIGTERM to its default
        action, so a caller with a handler must install it again, or the next signal kills the process midway. With
        `hurry` a local Ray is left to be killed: its own shutdown takes seconds and must not be interrupted, because
        Ray ends the process that it runs in with exit code 1 if the raylet dies meanwhile.
        """
        if self.local and hurry:
            return
        timeout_s = _STOP_TIMEOUT_S if self.local else 3 * _STOP_TIMEOUT_S
        _in_thread(self._stop, "plait-stop", timeout_s=timeout_s, meanwhile=meanwhile)

    def _stop(self) -> None:
        import ray
        from ray import serve

        try:
            if not self.local and self._app_name is not None:
                serve.shutdown() if self._started_serve else serve.delete(self._app_name)
            ray.shutdown()
        except Exception:
            _log.exception("stopping Ray")


def _reached_at(server: ServerSection) -> str | None:
    """Return the address at which this machine reaches Serve's proxy, which listens, or will, on `server.host` of other
    nodes; None if it is on this one. Raises `ServeError` if it listens on loopback there."""
    import ray
    from ray import serve

    proxies, here = serve.status().proxies, ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    at = proxies or [name for name, node in nodes.items() if _HEAD in node["Resources"]]
    places = [nodes[name]["NodeManagerAddress"] for name in at if name in nodes]
    if not places or nodes[here]["NodeManagerAddress"] in places:
        return None
    if server.is_loopback:
        message = f"Serve's HTTP proxy is on {places[0]} and listens on {server.host} there, out of this node's reach"
        raise ServeError(f"{message}: run plait serve on that node, or start Serve with --host 0.0.0.0")
    return places[0] if server.host in WILDCARDS else server.host


def no_room_for(deployments: Sequence[str]) -> str:
    """Return the sentence that says how an update goes on without `server.start_new_first`."""
    return f"plait: no room for one more replica of {', '.join(deployments)}: the old ones stop before new ones start"


def _in_thread(
    work: Callable[[], None],
    name: str,
    *,
    timeout_s: float,
    hurry: Callable[[], bool] = lambda: False,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run `work` in a thread until it is done, times out, or `hurry` returns true; an unfinished thread is
    abandoned."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    until_s = time.monotonic() + timeout_s
    while thread.is_alive() and time.monotonic() < until_s and not hurry():
        thread.join(0.01)
        meanwhile()


def _reason(message: str) -> str:
    """Return the relevant line of Serve's message: the last error of the traceback, without the name of one of ours."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason was given"]
    errors = [found for line in lines if (found := _ERROR.fullmatch(line))]
    found = errors[-1] if errors else None
    return (lines[0] if found is None else found["told"] if found["ours"] else found[0])[:500]
