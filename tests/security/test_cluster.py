"""A running `plait serve` and the Ray that it started: which doors are open, and to whom."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from ray.serve.generated.serve_pb2 import ASGIRequest
from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

from fakes.trap import Payload
from plait.doctor.machine import ray_listeners
from support.server import FAKE, PlaitServer, free_port

pytestmark = pytest.mark.cluster

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
CLOSED_BY_S = 120.0  # the patience of the listeners is 10 s; this machine may be busy


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


def get(port: int, path: str, *, timeout_s: float = 60, **headers: str) -> tuple[int, bytes]:
    """Status and body; 0 for whoever speaks no HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def replica_ports(server: PlaitServer) -> dict[int, set[str]]:
    """The ports on which Serve's replicas listen for each other on every interface, which Serve leaves no choice of."""
    pids = [pid for name in ("engine", "ingress") for pid in server.replica_pids(name)]
    found = {}
    for pid in pids:
        for each in psutil.Process(pid).net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr.ip == "::":
                found[each.laddr.port] = {each.laddr.ip}
    return found


def test_cve_2023_48022_shadowray_no_door_to_others(server: PlaitServer) -> None:
    """Ray's dashboard took jobs from anybody who reached it: nothing of ours listens on an address that another machine
    reaches, but for a port of each of Serve's replicas, and there is no dashboard at all."""
    found = listeners(server)
    assert {server.port, server.direct_port} <= found.keys()  # type: ignore[attr-defined]
    assert {port: where for port, where in found.items() if not where <= set(LOOPBACK)} == replica_ports(server)
    assert not {8265, 10001, 6379} & found.keys()


@pytest.mark.parametrize("method", ["HandleRequest", "HandleRequestWithRejection", "HandleRequestStreaming"])
def test_cve_2026_3059_pickle_to_the_port_of_a_replica(server: PlaitServer, tmp_path: Path, method: str) -> None:
    """Serve's replicas unpickle what they are sent there: only from who has Ray's token."""
    mark = tmp_path / "ran"
    payload = pickle.dumps(Payload(mark))
    request = ASGIRequest(pickled_request_metadata=payload, request_args=payload, request_kwargs=payload)
    ports = replica_ports(server)
    assert ports
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.RpcError) as caught:
                answer = getattr(ASGIServiceStub(channel), method)(request, timeout=60)
                list(answer if hasattr(answer, "__next__") else [answer])
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not mark.exists()


@pytest.mark.parametrize("path", ["/api/jobs/", "/api/version", "/api/v0/logs", "/log_proxy?url=http://127.0.0.1:1/"])
def test_cve_2023_48023_and_cve_2023_6019_nobody_answers_as_a_dashboard(server: PlaitServer, path: str) -> None:
    """Its job API ran commands, its log proxy fetched addresses, one of its parameters was a shell's: no port of any of
    the processes knows these routes. (One gives Ray's metrics whatever it is asked.)"""
    ports = sorted(listeners(server))
    with ThreadPoolExecutor(len(ports)) as threads:
        answers = dict(zip(ports, threads.map(lambda port: get(port, path, timeout_s=5), ports), strict=True))
    answered = {port: body for port, (status, body) in answers.items() if 200 <= status < 400}
    assert {port: body[:80] for port, body in answered.items() if not body.startswith(b"# HELP ")} == {}


def test_cve_2023_48022_ray_asks_for_a_token(server: PlaitServer) -> None:
    """Another user of the machine reaches Ray's ports: without the token, which is in a file of the owner's, Ray takes
    nothing from them."""
    address = server.record().gcs_address
    assert address is not None
    (token_path,) = server.state_folder.glob("*token*")
    assert token_path.stat().st_mode & 0o077 == 0
    with grpc.insecure_channel(address) as channel:
        nodes = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        for key in ({}, {"authorization": "Bearer guessed"}):
            with pytest.raises(grpc.RpcError) as caught:
                nodes(b"", timeout=60, metadata=tuple(key.items()))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        right = f"Bearer {token_path.read_text().strip()}"
        assert nodes(b"", timeout=60, metadata=(("authorization", right),))


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


def doctor(port: int, environ: dict[str, str], *arguments: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings of `plait doctor --cluster`."""
    command = [sys.executable, "-m", "plait.cli.main", "doctor", "--cluster", "--json", "--port", str(port), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=600, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_doctor_asks_the_cluster_of_a_server(server: PlaitServer, tmp_path: Path) -> None:
    """It finds Ray and its token in the state folder; nodes, versions and Serve are fine, every socket of that Ray
    wants the token, and those of its core are on loopback. Where there is no Ray, that is a failure with advice."""
    environ = {**os.environ, "PLAIT_STATE_DIR": str(server.state_folder.parent)}
    environ.pop("RAY_ADDRESS", None)
    _, found = doctor(server.port, environ)
    said = {it["name"]: it for it in found}
    assert {name: said[name]["verdict"] for name in ("nodes", "versions", "serve", "port")} == dict.fromkeys(
        ("nodes", "versions", "serve", "port"), "ok"
    ), found
    pids = {process.pid for process in server.members()}
    ours = [it for it in ray_listeners() if it.pid in pids]
    assert {it.program for it in ours} >= {"gcs_server", "raylet"}
    assert [it for it in ours if not it.has_token] == []
    # Serve's replicas listen for each other on all interfaces, whatever the address of the node.
    assert [it for it in ours if not it.is_loopback and it.program != "ray::"] == []
    code, found = doctor(free_port(), {**environ, "PLAIT_STATE_DIR": str(tmp_path)}, "--address", "127.0.0.1:1")
    (ray,) = [it for it in found if it["name"] == "ray"]
    assert (code, ray["verdict"]) == (1, "fail")
    assert "RAY_AUTH_TOKEN" in ray["advice"]
