"""A running `plait serve` and the Ray that it started: which doors are open, and to whom."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from support.server import FAKE, PlaitServer, free_port

pytestmark = pytest.mark.cluster

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
CLOSED_BY_S = 40.0  # the patience of the listeners is 10 s; this machine may be busy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaitServer]:
    """As it starts by default, with a direct port."""
    port, direct_port = free_port(), free_port()
    arguments = [str(port), f"server.direct_port={direct_port}"]
    made = PlaitServer.launch(FAKE, arguments, port=port, root=tmp_path_factory.mktemp("doors") / "run").wait_ready()
    made.direct_port = direct_port  # type: ignore[attr-defined]
    yield made
    if made.process.poll() is None:
        made.kill_and_clean()


def listeners(server: PlaitServer) -> dict[int, set[str]]:
    """The TCP ports that its processes listen on, with their addresses."""
    found: dict[int, set[str]] = {}
    for member in [server.process.pid, *(each.pid for each in server.members())]:
        try:
            connections = psutil.Process(member).net_connections(kind="tcp")
        except psutil.Error:
            continue
        for each in connections:
            if each.status == psutil.CONN_LISTEN:
                found.setdefault(each.laddr.port, set()).add(each.laddr.ip)
    return found


def get(port: int, path: str, **headers: str) -> tuple[int, bytes]:
    """Status and body; 0 for whoever speaks no HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def test_cve_2023_48022_shadowray_no_door_to_others(server: PlaitServer) -> None:
    """Ray's dashboard took jobs from anybody who reached it: nothing of ours listens on an address that another machine
    reaches, and there is no dashboard at all."""
    found = listeners(server)
    assert {server.port, server.direct_port} <= found.keys()  # type: ignore[attr-defined]
    assert {port: where for port, where in found.items() if not where <= set(LOOPBACK)} == {}
    assert not {8265, 10001, 6379} & found.keys()


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/version", "/api/v0/logs", "/log_proxy?url=http://127.0.0.1:1/"])
def test_cve_2023_48023_and_cve_2023_6019_nobody_answers_as_a_dashboard(server: PlaitServer, path: str) -> None:
    """Its job API ran commands, its log proxy fetched addresses, one of its parameters was a shell's: no port of any of
    the processes knows these routes."""
    ports = sorted(listeners(server))
    with ThreadPoolExecutor(len(ports)) as threads:
        answers = dict(zip(ports, threads.map(lambda port: get(port, path), ports), strict=True))
    assert {port: status for port, (status, _) in answers.items() if 200 <= status < 400} == {}


def test_cve_2023_48022_ray_asks_for_a_token(server: PlaitServer) -> None:
    """Another user of the machine reaches Ray's ports: without the token, which is in a file of the owner's, Ray takes
    nothing from them."""
    address = server.record().gcs_address
    assert address is not None
    code = f"import ray; ray.init(address={address!r}, log_to_driver=False); print('in')"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "disabled", "RAY_gcs_rpc_server_connect_timeout_s": "5"}
    stranger = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=180, check=False
    )
    assert "in" not in stranger.stdout.split()
    assert stranger.returncode != 0
    tokens = list(server.state_folder.parent.rglob("*token*"))
    assert tokens
    assert all(path.stat().st_mode & 0o077 == 0 for path in tokens)


@pytest.mark.parametrize("path", ["/-/routes", "/-/healthz", "/v1/models", "/metrics"])
def test_cve_2025_62593_dns_rebinding_of_the_proxy(server: PlaitServer, path: str) -> None:
    """The proxy's own routes answered to any host name (finding 12): they do so to the server's own only."""
    for port in (server.port, server.direct_port):  # type: ignore[attr-defined]
        if path.startswith("/-/") and port != server.port:
            continue
        assert get(port, path)[0] == 200
        status, body = get(port, path, host="evil.example")
        assert (status, json.loads(body)["error"]["code"]) == (403, "host_not_allowed")


def test_half_sent_requests_are_hung_up_on(server: PlaitServer) -> None:
    """Finding 12: a hundred connections with half a head each, to the proxy and past it, were never closed."""
    peers = []
    for port in (server.port, server.direct_port):  # type: ignore[attr-defined]
        for _ in range(100):
            peer = socket.create_connection(("127.0.0.1", port), timeout=CLOSED_BY_S)
            peer.sendall(b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
            peers.append(peer)
    until_s = time.monotonic() + CLOSED_BY_S
    for peer in peers:
        peer.settimeout(max(0.1, until_s - time.monotonic()))
        assert peer.recv(1) == b""
        peer.close()
    assert get(server.port, "/v1/models")[0] == 200
