"""Waiting for Serve: for an HTTP proxy that takes longer than Serve waits for it, and for the application."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import _raylet, exceptions, serve
from ray._private import utils
from ray.experimental import internal_kv
from ray.serve._private.build_app import build_app

from plait.app import AppArgs
from plait.config import PlaitConfig, ServerSection
from plait.deployments import deployments
from plait.errors import ServeError
from plait.server import cluster
from plait.server.cluster import Cluster, DeploymentState
from plait_serving.images.config import ImagesSection
from plait_serving.ranking.config import RankingSection


def proxies(monkeypatch: pytest.MonkeyPatch, states: Iterator[Mapping[str, str]]) -> list[Mapping[str, Any]]:
    """Serve ends the first proxy, which its caller hears of, and these are seen then. What it was started with."""
    started: list[Mapping[str, Any]] = []

    def start(**options: Any) -> None:
        started.append(options)
        raise exceptions.RayActorError

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(proxies=next(states)))
    monkeypatch.setattr(cluster, "time", Clock())
    monkeypatch.setattr(ray, "init", lambda **_: None)
    for prepared in ("prepare_environment", "prepare_proxies", "patient_start"):
        monkeypatch.setattr(cluster, prepared, lambda _: contextlib.nullcontext())
    return started


def start(config: PlaitConfig, folder: Path) -> Cluster:
    """Ray of its own, on port 8123."""
    return Cluster.start_local(config, port=8123, num_cpus=1, folder=folder / "ray", token_path=folder / "token")


def test_the_next_proxy_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve starts another by itself: starting it again would start nothing."""
    states: list[Mapping[str, str]] = [{}, {"node": "STARTING"}, {"node": "UNHEALTHY"}, {"node": "HEALTHY"}]
    left = iter(states)
    started = proxies(monkeypatch, left)
    assert start(PlaitConfig(), tmp_path).url == "http://127.0.0.1:8123"
    assert list(left) == []
    (options,) = started
    assert options["http_options"]["port"] == 8123


def test_a_proxy_that_never_comes_is_told_with_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as long as a start may take."""
    proxies(monkeypatch, iter(lambda: {"node": "STARTING"}, None))
    with pytest.raises(ServeError, match=r"HTTP proxy was not ready after 60 s \(starting\)"):
        start(PlaitConfig(server=ServerSection(ready_timeout_s=60.0)), tmp_path)


def test_a_start_is_stopped_in_our_own_way_as_soon_as_ray_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while Serve starts, which takes seconds: Ray's handler of SIGTERM would raise SystemExit, and that of its
    C++ part abort."""
    proxies(monkeypatch, iter(()))
    seen: list[Any] = []

    def core_worker() -> None:  # as its C++ part does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def init(**_: Any) -> None:
        utils.set_sigterm_handler(signal.SIG_DFL)
        seen.append(signal.getsignal(signal.SIGTERM))
        _raylet.CoreWorker()
        seen.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(_raylet, "CoreWorker", core_worker)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(serve, "start", lambda **_: seen.append(signal.getsignal(signal.SIGTERM)))
    before, replaces = signal.signal(signal.SIGTERM, signal.SIG_IGN), utils.set_sigterm_handler
    try:
        paths = {"folder": tmp_path / "ray", "token_path": tmp_path / "token"}
        ours = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # noqa: E731
        Cluster.start_local(PlaitConfig(), port=8123, num_cpus=1, **paths, signals=ours)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIG_IGN, signal.SIG_IGN, signal.SIG_IGN]
    assert (utils.set_sigterm_handler, _raylet.CoreWorker) == (replaces, core_worker)


def started() -> Cluster:
    """A cluster that nobody asked anything yet."""
    return Cluster(local=True, started_serve=True, host="127.0.0.1", port=1)


MODELS = RankingSection.model_validate(
    {"models": {"cut": {"folder": "./cut", "cn": {"shards": 2}}, "whole": {"folder": "./whole", "mode": "whole"}}}
)
IMAGES = ImagesSection.model_validate({"controlnets": {"edges": {"folder": "./edges"}}})


class Clock:
    """Time that passes only while one sleeps, and as long as an answer takes."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def asking(monkeypatch: pytest.MonkeyPatch, *, answer_s: float = 0.02) -> tuple[Clock, list[float], Cluster]:
    """A cluster whose state takes that long, and when it was asked for."""
    clock, asked_s = Clock(), []
    monkeypatch.setattr(cluster, "time", clock)

    def state(self: Cluster) -> DeploymentState:
        asked_s.append(clock.now_s - 100.0)
        clock.sleep(answer_s)
        return DeploymentState(running=False)

    monkeypatch.setattr(Cluster, "state", state)
    return clock, asked_s, started()


WAITING = "Deployment 'engine' in application 'app' has 1 replicas that have taken more than 30s to be scheduled."
"""What Serve's controller says (Ray 2.60)."""


def test_an_update_without_room_goes_on_in_place_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """New replicas wait for CPUs that the old ones have: Ray would wait for ever."""
    clock, handed_s, said = Clock(), list[tuple[float, set[int]]](), list[str]()

    def hand_over(targets: Any, **_: Any) -> None:
        made = build_app(targets[0].target, name="app").deployments
        handed_s.append((clock.now_s - 100.0, {it._deployment_config.max_surge_percent for it in made}))

    def status() -> Any:
        clock.sleep(0.02)
        stuck = clock.now_s > 130.0 and len(handed_s) < 2
        done = len(handed_s) > 1 and clock.now_s > 140.0
        engine = SimpleNamespace(
            status="HEALTHY" if done else "UPDATING",
            message=WAITING if stuck else "",
            replica_states={"RUNNING": 1, "STARTING": 1},
        )
        app = SimpleNamespace(status="RUNNING" if done else "DEPLOYING", message="", deployments={"engine": engine})
        return SimpleNamespace(applications={"app": app})

    monkeypatch.setattr(cluster, "time", clock)
    monkeypatch.setattr(serve, "run_many", hand_over)
    monkeypatch.setattr(serve, "status", status)
    updating = started()
    updating.deploy(deployments(AppArgs(images=IMAGES, recommend=MODELS)), name="app", salt="run")
    assert any(state.running for state in updating.states(60.0, say=said.append))
    assert [percents for _, percents in handed_s] == [{100}, {0}]
    assert handed_s[1][0] < 60.0
    assert said == ["plait: no room for one more replica of engine: the old ones stop before new ones start"]


def test_a_failure_is_that_of_the_deployment_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what another one was told meanwhile, and by its last error."""
    waits = "Deployment 'controlnet-colors' in application 'app' has 1 replicas that have taken more than 30s to init"
    broken = "It failed to start 3 times in a row.\nTraceback:\nplait_disagg.package.PackageError: no such folder"
    told = {"controlnet-colors": ("UPDATING", waits), "engine": ("HEALTHY", ""), "hn-shop": ("DEPLOY_FAILED", broken)}
    rows = {name: SimpleNamespace(status=status, message=said) for name, (status, said) in told.items()}
    app = SimpleNamespace(status="DEPLOY_FAILED", message="it failed", deployments=rows)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": app}))
    monkeypatch.setattr(serve, "run_many", lambda *_, **__: None)
    failed = started()
    failed.deploy(deployments(AppArgs(images=IMAGES, recommend=MODELS)), name="app", salt="run")
    assert failed.state().failure == "hn-shop: no such folder"
    app.deployments = {}
    assert failed.state().failure == "it failed"


def test_who_waits_long_asks_seldom_and_hears_soon_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """New knobs take a tenth of a second and models most of a minute: neither should be told late."""
    _, asked_s, waiting = asking(monkeypatch)
    assert len(list(waiting.states(60.0))) == len(asked_s)
    assert asked_s[-1] < 60.0
    gaps = [(before, after - before) for before, after in itertools.pairwise(asked_s)]
    assert all(gap <= max(0.15, 0.1 * waited + 0.1) and gap <= 1.1 for waited, gap in gaps)
    assert sum(at <= 1.0 for at in asked_s) >= 8
    assert len(asked_s) < 90  # at the first pace: 850


def test_who_gives_up_waits_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between two questions."""
    clock, asked_s, waiting = asking(monkeypatch)
    for _ in waiting.states(60.0, give_up=lambda: clock.now_s >= 130.5):
        pass
    assert 29.0 <= asked_s[-1] <= 30.5
    assert clock.now_s <= 130.6


def test_a_signal_handler_outlives_rays_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its C++ half gives SIGTERM the default action when it ends, and goes on for seconds: one more would kill us."""
    heard: list[int] = []
    found: list[bool] = []

    def install() -> None:
        signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))

    def is_caught() -> bool:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
        return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def shut_down() -> None:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        until_s = time.monotonic() + 60
        while not is_caught() and time.monotonic() < until_s:
            time.sleep(0.001)
        found.append(is_caught())

    monkeypatch.setattr(ray, "shutdown", shut_down)
    before = signal.getsignal(signal.SIGTERM)
    try:
        install()
        ending = Cluster(local=True, started_serve=True, host="127.0.0.1", port=1)
        ending.stop(hurry=False, meanwhile=install)
        assert found == [True]
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def on_node(
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    *,
    proxies: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    jobs: Sequence[Mapping[str, Any]] = (),
    running: Mapping[str, Any] | None = None,
) -> None:
    """This process is on one of three nodes; the first is the head. What Serve there has, and where it listens."""
    addresses = {"head": "10.0.0.1", "beside": "10.0.0.1", "worker": "10.0.0.2"}
    nodes = [
        {
            "NodeID": name,
            "Alive": True,
            "NodeManagerAddress": address,
            "Resources": {"node:__internal_head__": 1.0} if name == "head" else {},
        }
        for name, address in addresses.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    context = SimpleNamespace(get_node_id=lambda: here, get_job_id=lambda: "02")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(serve, "start", lambda **_: None)
    status = SimpleNamespace(proxies=dict.fromkeys(proxies), applications=running or {})
    monkeypatch.setattr(serve, "status", lambda: status)
    http = SimpleNamespace(host=host, port=8000)
    client = SimpleNamespace(http_config=http, get_serve_details=lambda: {"applications": running or {}})
    monkeypatch.setattr(serve.context, "_get_global_client", lambda: client)
    monkeypatch.setattr("ray._private.state.jobs", lambda: list(jobs))


@pytest.mark.parametrize(
    ("here", "proxies", "host", "at"),
    [
        ("head", (), "127.0.0.1", "127.0.0.1"),
        ("beside", ("head",), "127.0.0.1", "127.0.0.1"),
        ("worker", (), "0.0.0.0", "10.0.0.1"),
        ("worker", ("head",), "::", "10.0.0.1"),
        ("worker", ("head",), "10.0.0.1", "10.0.0.1"),
        ("worker", ("head", "worker"), "127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_proxy_is_asked_where_it_is(
    monkeypatch: pytest.MonkeyPatch, here: str, proxies: tuple[str, ...], host: str, at: str
) -> None:
    """On the head, or wherever Serve has one already; a node reaches what listens on all of another one's addresses."""
    on_node(monkeypatch, here, proxies=proxies, host=host)
    attached = Cluster.attach(PlaitConfig(server=ServerSection(host=host)), port=8000)
    assert attached.url == f"http://{at}:8000"


@pytest.mark.parametrize("proxies", [(), ("head",)])
def test_a_proxy_on_another_nodes_loopback_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, proxies: tuple[str, ...]
) -> None:
    """Nothing was started or deployed by then."""
    on_node(monkeypatch, "worker", proxies=proxies)
    monkeypatch.setattr(serve, "start", pytest.fail)
    with pytest.raises(ServeError, match=r"on 10\.0\.0\.1 and listens on 127\.0\.0\.1 there, out of this node's reach"):
        Cluster.attach(PlaitConfig(), port=8000)


JOB = {"JobID": "01", "DriverIPAddress": "10.0.0.1", "DriverPid": 7}


@pytest.mark.parametrize(
    ("noted", "dead", "source", "holder"),
    [
        (b"01", False, "imperative", "the plait serve on 10.0.0.1 (process 7)"),
        (b"01", False, None, "the plait serve on 10.0.0.1 (process 7)"),
        (b"01", True, "imperative", None),
        (b"01", True, None, None),
        (b"09", False, None, None),
        (None, False, "declarative", "serve deploy"),
        (None, False, None, None),
    ],
)
def test_an_application_that_somebody_runs_is_left_to_him(
    monkeypatch: pytest.MonkeyPatch, noted: bytes | None, dead: bool, source: str | None, holder: str | None
) -> None:
    """A `plait serve` that lives, or what `serve deploy` gave; what a dead one left is taken over, and noted."""
    running = {"app": {"source": source}} if source else {}
    on_node(monkeypatch, "worker", jobs=[{**JOB, "IsDead": dead}], running=running)
    kept = {b"plait serve app": noted} if noted else {}
    monkeypatch.setattr(internal_kv, "_internal_kv_get", kept.get)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", kept.__setitem__)
    asking = Cluster(local=False, started_serve=False, host="127.0.0.1", port=1)
    if holder is None:
        asking.claim("app")
        assert kept == {b"plait serve app": b"02"}
    else:
        with pytest.raises(ServeError, match=re.escape(f"an application app, of {holder}: stop that first")):
            asking.claim("app")
        assert kept == ({b"plait serve app": noted} if noted else {})


def test_what_a_dead_process_left_for_itself_alone_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a living one, nor what has another name; nobody can say whose a number is that Ray does not know."""
    jobs = [{**JOB, "IsDead": True}, {**JOB, "JobID": "03", "IsDead": False}]
    on_node(monkeypatch, "worker", jobs=jobs, running=dict.fromkeys(("trial-01", "trial-03", "trial-04", "app", "01")))
    deleted: list[str] = []
    monkeypatch.setattr(serve, "delete", deleted.append)
    asking = Cluster(local=False, started_serve=False, host="127.0.0.1", port=1)
    assert asking.own_name("trial") == "trial-02"
    assert deleted == ["trial-01"]
