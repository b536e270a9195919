"""Starts and ends of `plait serve` that `test_serve_replicas` does not have."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.cluster import SharedServe
from support.server import FAKE, REAL, PlaitServer, free_port

pytestmark = pytest.mark.cluster


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., PlaitServer]]:
    """``launch(port, *arguments)`` starts one, which is gone at the end."""
    servers: list[PlaitServer] = []

    def start(port: int, *arguments: str, module: tuple[str, ...] = FAKE) -> PlaitServer:
        servers.append(PlaitServer.launch(module, arguments, port=port, root=tmp_path / "run"))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.kill_and_clean()


def test_serve_busy_port_is_one_sentence_and_exit_1(launch: Callable[..., PlaitServer]) -> None:
    """The real command on a busy port: exit 1, one sentence on stderr, nothing on stdout, and no Ray was started."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = launch(port, "--port", str(port), module=REAL)
        assert server.process.stdout is not None
        assert server.process.stdout.read() == ""
        assert server.wait(60) == 1
    told = f"plait serve: port {port} on 127.0.0.1 is in use by another program; choose another with --port\n"
    assert server.errors() == told
    assert not (server.state_folder / "run.json").exists()


def test_serve_attached_stops_only_what_it_brought(
    shared_serve: SharedServe, launch: Callable[..., PlaitServer]
) -> None:
    """On somebody's Ray its application answers where their Serve listens, and leaves; their Ray and Serve go on."""
    import ray

    port, address = free_port(), ray.get_runtime_context().gcs_address
    server = launch(port, str(port), f"ray.address='{address}'").wait_ready()
    assert server.url == f"http://127.0.0.1:{shared_serve.port}"
    assert server.generate(prompt="x")[0] == 200
    assert server.record().processes == ()
    assert server.stop() == 0
    status = shared_serve.serve.status()
    assert "plait" not in status.applications
    assert [*status.proxies.values()] == ["HEALTHY"]
