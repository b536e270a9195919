"""A Ray of several hosts over TCP, under load: one is cut off, one dies, one is added."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.config import PlaitConfig
from plait.deployments import deployments
from plait.offline.deploying import serve_application
from plait_deploy.kuberay.rayservice import CPU_NODE, GPU_NODE, NODE_LABEL
from plait_deploy.serve import render_serve
from plait_serving.deployments import INGRESS
from support import refresh as refresh_kit
from support.cluster import TESTS
from support.fabric_hosts import Hosts, hosts, said, tell
from support.http_rank import as_json
from support.waiting import wait_for

_PORT = 6379
_OBJECTS_BYTES = 80 << 20
_PATIENCE_S = 120.0
_ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # a server that a test started in this process may have said 0: one host
    # For busy machines: Serve gives its proxy 5 s to begin and 10 s to answer, Ray its processes 30 and 60.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_register_timeout_seconds": "240",
    # A dead host is given up after some seconds, one that is only slow not before half a minute.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "6",
}
_STARTED = "Ray runtime started"
_ENTER = 'mount --bind "$0" "$1" && mount --bind "$1/boot_id" /proc/sys/kernel/random/boot_id && shift && exec "$@"'
"""Its own folder at the path that all hosts know, and a boot id, by which plait tells hosts apart."""


class RayHosts:
    """Host 1 is Ray's head."""

    def __init__(self, made: Hosts, folder: Path) -> None:
        self.hosts = made
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex}
        (folder / "ray").mkdir()

    @property
    def address(self) -> str:
        """Where nodes and drivers attach."""
        return f"{self.hosts.address(1)}:{_PORT}"

    def join(self, host: int, *, cpus: int, gpus: int = 0, labels: Mapping[str, str]) -> None:
        """Starts a host's node and waits until it is there. Host 1 first; one at a time, since Ray gives a node 30 s to
        come up, and a second chance, since that may be too little on a very busy machine."""
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", "--no-monitor"]
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        command = [
            *ray,
            *([*head, f"--temp-dir={self._folder / 'ray'}"] if host == 1 else [f"--address={self.address}"]),
            f"--node-ip-address={self.hosts.address(host)}",
            f"--num-cpus={cpus}",
            f"--num-gpus={gpus}",
            f"--labels={','.join(f'{key}={value}' for key, value in labels.items())}",
            f"--object-store-memory={_OBJECTS_BYTES}",
            "--include-log-monitor=false",
        ]
        if not (self._comes_up(host, command) or self._comes_up(host, command)):
            raise AssertionError(f"Ray did not start on host {host}\n{self.log(host)}")

    def _comes_up(self, host: int, command: list[str]) -> bool:
        before = self.log(host, 1 << 30).count(_STARTED)
        node = self.run(host, *command)
        until_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s and node.poll() is None:
            if self.log(host, 1 << 30).count(_STARTED) > before:
                return True
            time.sleep(0.2)
        self.kill(host)
        return False

    def run(self, host: int, *command: str, pipes: bool = False) -> subprocess.Popen[str]:
        """Starts a program on a host."""
        own = self._folder / str(host)
        if not own.exists():
            (own / "tmp").mkdir(parents=True)
            (own / "boot_id").write_text(f"{uuid.uuid4()}\n")
        common = self._folder / "ray"
        enter = ["ip", "netns", "exec", self.hosts.name(host), "sh", "-c", _ENTER, str(own), str(common)]
        path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | _ENVIRONMENT | self._token | {"TMPDIR": str(common / "tmp"), "PYTHONPATH": path}
        with (own / "log").open("a") as log:
            pipe = subprocess.PIPE if pipes else subprocess.DEVNULL
            made = subprocess.Popen(
                [*enter, *command],
                stdin=pipe,
                stdout=pipe if pipes else log,
                stderr=log,
                env=environment,
                text=True,
                bufsize=1,
            )
        self._started.append(made)
        return made

    def log(self, host: int, characters: int = 4_000) -> str:
        """What the programs of a host printed last."""
        path = self._folder / str(host) / "log"
        return path.read_text(errors="replace")[-characters:] if path.exists() else ""

    def kill(self, host: int) -> None:
        """Kills all processes of a host, as a machine dies that loses power."""
        while found := self._processes(host):  # some may be starting others
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)

    def _processes(self, host: int) -> list[int]:
        command = ["ip", "netns", "pids", self.hosts.name(host)]
        return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]

    def stop(self, count: int) -> None:
        """Kills everything."""
        for host in range(1, count + 1):
            self.kill(host)
        for process in self._started:
            process.wait(_PATIENCE_S)


@contextmanager
def ray_hosts(count: int) -> Iterator[RayHosts]:
    """Hosts without a Ray yet; everything is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="rh-"))
    try:
        with hosts(count) as made:
            rays = RayHosts(made, folder)
            try:
                yield rays
            finally:
                rays.stop(count)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

PATIENCE_S = 240.0
FRONT, FIRST_CN, SECOND_CN, FIRST_HN, SECOND_HN = range(1, 6)

CONFIG = """
images: null
recommend:
  models:
    parts:
      folder: %s
      executor: torch
      cn: {replicas: 2, shards: {count: 2, replicas: 2}, knobs: {largest_batch_rows: 1}}
      hn: {replicas: 2, num_gpus: 0.3, knobs: {largest_batch_rows: 1}}
"""


class Driver:
    """The program on the head that starts Serve, deploys and asks."""

    def __init__(self, rays: RayHosts, application: str, requests: Path) -> None:
        self._rays = rays
        command = [sys.executable, "-m", "integration.hosts_driver", rays.address, application, str(requests)]
        self._process = rays.run(FRONT, *command, pipes=True)
        assert self._heard() == "there"

    def __call__(self, command: str) -> Any:
        """What it answers."""
        tell(self._process, command)
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        heard, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert heard, f"no word from the head\n{self._rays.log(FRONT)}"
        line = said(self._process)
        assert line, self._rays.log(FRONT)
        return json.loads(line)

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Waits."""
        wait_for(true, PATIENCE_S, what=lambda: f"{what}: {self('status')}\n{self._rays.log(FRONT)}")

    def recovered_s(self, event_s: float) -> float:
        """Waits until all that is asked is answered again; returns after how many seconds that was."""

        def settled() -> bool:
            asked = self(f"since {event_s}")
            return len(asked) >= 60 and all(one["outcome"] == "ok" for one in asked[-60:])

        self.until("recovery", settled)
        bad = [one["began_s"] + one["took_s"] for one in self(f"since {event_s}") if one["outcome"] != "ok"]
        return max(bad, default=event_s) - event_s


@pytest.fixture
def five() -> Iterator[RayHosts]:
    """Five hosts and their switch."""
    with ray_hosts(5) as made:
        yield made


def _application(folder: Path) -> str:
    """The application, bound to hosts by the labels that KubeRay's manifests use; one replica of each on a host."""
    config = PlaitConfig.model_validate(yaml.safe_load(CONFIG % folder))
    actors = {}
    for one in deployments(config):
        node = "front" if one.name == INGRESS else (GPU_NODE if one.num_gpus else CPU_NODE)
        gpus = {"num_gpus": one.num_gpus} if one.num_gpus else {}
        actors[one.name] = {"num_cpus": one.num_cpus, **gpus, "label_selector": {NODE_LABEL: node}}
    application = serve_application(config)
    for deployment in application["deployments"]:
        deployment["ray_actor_options"] = actors[deployment["name"]]
    (made,) = yaml.safe_load(render_serve(application, host="127.0.0.1", port=8000))["applications"]
    for deployment in made["deployments"]:
        deployment["max_replicas_per_node"] = 1
    return yaml.safe_dump(made)


def _requests(tmp_path: Path) -> tuple[Path, Path]:
    """The package's folder, and a file of requests with their scores."""
    parts = refresh_kit.packaged(tmp_path / "parts")
    made = []
    for seed in range(8):
        asked = refresh_kit.request(parts, seed)
        body = as_json(asked.tensors, parameters={"deadline_ms": 5_000})
        made.append((body, refresh_kit.scores(parts, asked).tolist()))
    file = tmp_path / "requests.json"
    file.write_text(json.dumps(made))
    return parts.folder, file


def test_hosts_that_are_lost_cost_no_more_than_what_was_there(
    five: RayHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is answered wrongly, errors are documented ones, and all is answered again after a host is lost; labels
    decide where halves and shards run, and a host that is added carries what the dead one did."""
    folder, requests = _requests(tmp_path)
    five.join(FRONT, cpus=2, labels={NODE_LABEL: "front"})
    driver = Driver(five, _application(folder), requests)
    for host in (FIRST_CN, SECOND_CN):
        five.join(host, cpus=4, labels={NODE_LABEL: CPU_NODE})
    for host in (FIRST_HN, SECOND_HN):
        five.join(host, cpus=4, gpus=2, labels={NODE_LABEL: GPU_NODE})
    driver("deploy")
    driver.until("the first answer", lambda: driver("probe") == "ok")
    cns, hns = ([five.hosts.address(host) for host in pair] for pair in ((FIRST_CN, SECOND_CN), (FIRST_HN, SECOND_HN)))
    places = {"cn-parts": cns, "shard0-parts": cns, "shard1-parts": cns, "hn-parts": hns}
    for deployment, wanted in places.items():
        driver.until(deployment, lambda of=deployment, at=wanted: driver(f"where {of}") == at)
    driver("load")
    start_s = driver("now")
    driver.recovered_s(start_s)

    told: dict[str, float] = {}
    cut_s = driver("now")
    five.hosts.plug(SECOND_HN, connected=False)
    told["one host is cut off"] = driver.recovered_s(cut_s)
    kill_s = driver("now")
    five.kill(SECOND_CN)
    told["one host dies"] = driver.recovered_s(kill_s)
    driver.until("its end", lambda: driver("where cn-parts") == cns[:1])
    add_s = driver("now")
    five.join(SECOND_CN, cpus=4, labels={NODE_LABEL: CPU_NODE})
    for deployment in ("cn-parts", "shard0-parts", "shard1-parts"):
        driver.until(deployment, lambda of=deployment: driver(f"where {of}") == cns)
    told["one host is added"] = driver.recovered_s(add_s)
    driver("stop")

    asked = driver(f"since {start_s}")
    bad = [one["outcome"] for one in asked if one["outcome"] != "ok"]
    with capsys.disabled():
        print(f"\n{len(asked)} requests, {len(bad)} not answered; seconds until all were answered again: {told}")
    assert not [one for one in bad if one[:3] not in ("503", "504")]


ASKING = """
import json, sys, threading, urllib.request
seen, ended = {}, threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
body, headers = json.dumps({"prompt": "x", "num_inference_steps": 1}).encode(), {"content-type": "application/json"}
while not ended.wait(0.02):
    try:
        asked = urllib.request.Request(sys.argv[1] + "/v1/images/generations", data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            how = str(answer.status)
    except Exception as error:
        how = repr(error)
    seen[how] = seen.get(how, 0) + 1
print(json.dumps(seen), flush=True)
"""


def test_serve_on_another_node_than_the_head_serves_or_says_at_once_what_holds(tmp_path: Path) -> None:
    """Before `server.ready_timeout_s`, and no request to the application that runs there fails, which one `plait
    serve` keeps."""
    with ray_hosts(2) as rays:
        for host in (1, 2):
            rays.join(host, cpus=4, labels={"host": str(host)})
        _two_servers(rays, tmp_path)


def _two_servers(rays: RayHosts, folder: Path) -> None:
    def serve(host: int, port: int, *settings: str) -> subprocess.Popen[str]:
        address = f"ray.address='{rays.address}'"
        program = sys.executable, "-m", "fakes.serve_on_node", rays.hosts.address(host), str(port), address, *settings
        return rays.run(host, "env", f"PLAIT_STATE_DIR={folder / str(host)}", *program, pipes=True)

    def url_of(server: subprocess.Popen[str], host: int) -> str:
        assert server.stdout is not None
        select.select([server.stdout], [], [], PATIENCE_S)
        url = server.stdout.readline().strip()
        assert url, rays.log(host)
        return url

    def asking(host: int, url: str) -> subprocess.Popen[str]:
        return rays.run(host, sys.executable, "-c", ASKING, url, pipes=True)

    def refused(host: int, port: int, why: str) -> None:
        assert serve(host, port).wait(PATIENCE_S) == 1, rays.log(host)
        assert why in rays.log(host)

    def answered(clients: subprocess.Popen[str]) -> None:
        out, _ = clients.communicate(timeout=PATIENCE_S)
        seen = json.loads(out)
        assert seen.keys() == {"200"}, seen

    def end(server: subprocess.Popen[str]) -> None:
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0

    first = serve(1, 8123)
    clients = asking(1, url_of(first, 1))
    refused(2, 8124, f"Serve's HTTP proxy is on {rays.hosts.address(1)} and listens on 127.0.0.1 there")
    answered(clients)
    end(first)
    second = serve(2, 8125, "server.host=0.0.0.0")
    url = url_of(second, 2)
    assert url == f"http://{rays.hosts.address(1)}:8125"
    clients = asking(2, url)
    refused(1, 8124, f"of the plait serve on {rays.hosts.address(2)} (process {second.pid}): stop that first")
    answered(clients)
    end(second)
