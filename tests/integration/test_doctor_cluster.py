"""`plait doctor --cluster` against the Ray of a running `plait serve`, and against none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from plait.doctor.sockets import ray_listeners
from support.server import FAKE, PlaitServer, free_port

pytestmark = pytest.mark.cluster


def doctor(port, environ, *arguments):
    command = [sys.executable, "-m", "plait.cli.main", "doctor", "--cluster", "--json", "--port", str(port), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=200, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_doctor_asks_the_cluster_of_a_server(tmp_path):
    """It finds Ray and its token in the state folder; nodes, versions and Serve are fine, every socket of that Ray
    wants the token, and those of its core are on loopback. Once the server is gone, that is a failure with advice."""
    port = free_port()
    server = PlaitServer.launch(FAKE, [str(port)], port=port, root=tmp_path / "run")
    try:
        server.wait_ready()
        environ = {**os.environ, "PLAIT_STATE_DIR": str(tmp_path / "run" / "state")}
        environ.pop("RAY_ADDRESS", None)
        _, found = doctor(port, environ)
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
    finally:
        server.stop()
    code, found = doctor(port, environ, "--address", "127.0.0.1:1")
    (ray,) = [it for it in found if it["name"] == "ray"]
    assert (code, ray["verdict"]) == (1, "fail")
    assert "RAY_AUTH_TOKEN" in ray["advice"]
