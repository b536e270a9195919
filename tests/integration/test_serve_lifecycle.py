"""`plait serve` from start to the last process gone: real Ray, Serve, HTTP and signals around the fake engine."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plait.server import processes
from plait_serving.cores import socket_folder
from support.prometheus import total
from support.server import FAKE, PlaitServer, free_port
from support.waiting import wait_for

pytestmark = pytest.mark.cluster

SLOW = {"prompt": "slow", "num_inference_steps": 40}
SLOWLY = {"FAKE_STEP_S": "0.2"}  # so that nothing ends before a busy machine has looked


@pytest.fixture
def launch(tmp_path):
    servers = []

    def start(port, *arguments, module=FAKE, name="run", **environ):
        first = [str(port)] if module is FAKE else ["--port", str(port)]
        server = PlaitServer.launch(module, [*first, *arguments], port=port, root=tmp_path / name, environ=environ)
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill_and_clean()


def sockets_of(pid):
    """A socket as a replica with that process leaves it when Ray kills it (finding 12)."""
    path = socket_folder() / f"rank-{pid}-0a1b2c3d"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return path


def in_background(server, **body):
    """Asks in a thread; the list gets (status, body) when the answer is there."""
    answers = []

    def ask():
        try:
            answers.append(server.generate(**body)[:2])
        except OSError as error:
            answers.append((0, repr(error)))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def late(server, timeout_s=60):
    """What a request gets that comes when the server has begun to drain; those before are answered."""
    until_s = time.monotonic() + timeout_s
    while True:
        status, body, _ = server.generate(prompt="late", num_inference_steps=1)
        if status != 200 or time.monotonic() > until_s:
            return status, body
        time.sleep(0.05)


def steps_when_still(server):
    """How many steps there are when none has been made for as long as three of them."""
    steps = -1
    while (now := steps_so_far(server)) != steps:
        steps = now
        time.sleep(1.5)
    return steps


def steps_so_far(server):
    return total(server.metrics(), "fake_steps_total")


def test_serve_survives_kill_minus_9_and_drains_on_a_signal(launch, tmp_path):
    """Answers, without the proxy too; refuses a second plait; is cleaned up after kill -9; on Ctrl-C finishes what runs
    and leaves nothing."""
    port = free_port()
    home = {"HOME": str(tmp_path / "no-home")}
    first = launch(port, **home).wait_ready()
    status, body, headers = first.generate(prompt="x", headers={"x-request-id": "abc"})
    assert status == 200
    assert body["data"]
    assert [value for name, value in headers.items() if name.lower() == "x-request-id"] == ["abc"]
    assert first.generate(prompt="nan")[0] == 500
    assert first.generate(prompt="x", headers={"host": "evil.example"})[0] == 403
    assert first.generate(prompt="x", loras=[{"name": "nobody"}])[0] == 404

    second = launch(port, name="run", **home)
    assert second.wait(300) == 1
    assert f"plait already serves on port {port} (process {first.process.pid})" in second.errors()

    old = first.members()
    assert len(old) > 5
    first.process.kill()
    first.wait()
    direct = f"http://127.0.0.1:{(direct_port := free_port())}"
    again = launch(port, f"server.direct_port={direct_port}", **home, **SLOWLY).wait_ready()
    assert processes.wait_until_gone(old, timeout_s=0) == []
    assert again.generate(prompt="x", num_inference_steps=1)[0] == 200
    assert direct in again.errors()
    status, _, headers = again.generate(prompt="x", num_inference_steps=1, headers={"x-request-id": "abc"}, url=direct)
    assert status == 200
    assert [value for name, value in headers.items() if name.lower() == "x-request-id"] == ["abc"]

    left, ray_folder = again.members(), Path(again.record().ray_folder)
    replica, own = sockets_of(again.replica_pids("engine")[0]), sockets_of(os.getpid())
    asking, answers = in_background(again, url=direct, **SLOW)
    wait_for(lambda: steps_so_far(again))
    os.killpg(again.process.pid, signal.SIGINT)  # as a terminal does: Ray's processes get it too
    status, body = late(again)
    assert (status, body["error"]["type"]) == (503, "server_error")
    assert asking.is_alive()
    asking.join(60)
    assert answers[0][0] == 200
    assert again.wait() == 0
    assert processes.wait_until_gone(left, timeout_s=0) == []
    assert not (again.state_folder / "run.json").exists()
    assert not ray_folder.exists()
    for freed in (port, direct_port):
        socket.create_server(("127.0.0.1", freed)).close()
    assert not (tmp_path / "no-home").exists()
    assert (replica.exists(), own.exists()) == (False, True)
    own.unlink()


@pytest.mark.slow
def test_serve_killed_leaves_nothing_after_15_seconds(launch):
    """Neither Ray's agents nor its folder, although nobody starts the next one."""
    server = launch(free_port()).wait_ready()
    left, folder = server.members(), Path(server.record().ray_folder)
    assert folder.exists()
    server.process.kill()
    server.wait()
    assert processes.wait_until_gone(left, timeout_s=15) == []
    assert not folder.exists()


def test_serve_disconnect_cancels_and_a_second_signal_hurries(launch):
    """A client that hangs up stops its request long before its end; a second SIGTERM does not wait for anybody."""
    server = launch(free_port(), "server.drain_s=300", FAKE_STEP_S="0.5").wait_ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": "slow", "num_inference_steps": 50})
    connection.request("POST", "/v1/images/generations", body, {"content-type": "application/json"})
    wait_for(lambda: steps_so_far(server))
    connection.close()
    steps = steps_when_still(server)
    assert steps < 40

    left = server.members()
    asking, answers = in_background(server, prompt="slow", num_inference_steps=50)
    wait_for(lambda: steps_so_far(server) > steps + 1)
    server.signal(signal.SIGTERM)
    assert late(server)[0] == 503
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    asking.join(60)
    assert answers, "the client was told nothing"
    assert answers[0][0] != 200, "it waited for all 50 steps"
    assert processes.wait_until_gone(left, timeout_s=0) == []


def test_serve_busy_port_is_one_sentence_and_exit_1(launch):
    """The real command on a busy port: exit 1, one sentence on stderr, nothing on stdout, and no Ray was started."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = launch(port, module=("plait.cli.main", "serve"))
        output = server.process.stdout.read()
        assert server.wait(60) == 1
    assert output == ""
    assert (
        server.errors()
        == f"plait serve: port {port} on 127.0.0.1 is in use by another program; choose another with --port\n"
    )
    assert not (server.state_folder / "run.json").exists()


HOST_RAY = """
import os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # a busy machine needs longer than Serve's 15 s
os.environ["RAY_worker_niceness"] = "0"  # at Ray's own 15 the other tests would leave its workers no core
import ray
from plait.server.environment import patient_start
with patient_start(240):
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False,
                       object_store_memory=100 << 20, _temp_dir=sys.argv[1], _node_ip_address="127.0.0.1")
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


def test_serve_attached_stops_only_what_it_brought(launch):
    """Attached to somebody's Ray, a stop takes our application away and leaves their Ray running."""
    from plait.server.state import scratch_root

    folder = scratch_root() / "host-ray"
    host = subprocess.Popen(
        [sys.executable, "-c", HOST_RAY, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = host.stdout.readline().strip()
        assert address
        environ = {"RAY_AUTH_MODE": "disabled"}
        server = launch(free_port(), f"ray.address='{address}'", **environ).wait_ready()
        assert server.generate(prompt="x")[0] == 200
        theirs = processes.members("none", host.pid)
        assert server.record().processes == ()
        assert server.stop() == 0
        assert host.poll() is None
        alive = {process for process in theirs if processes.is_running(process)}
        names = {Path(f"/proc/{process.pid}/comm").read_text().strip() for process in alive}
        assert {"gcs_server", "raylet"} <= names
        assert not any(name.startswith("ray::ServeRepl") for name in names)
    finally:
        host.stdin.close()
        host.wait(120)
        host.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)
