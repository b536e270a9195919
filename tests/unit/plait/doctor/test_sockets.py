"""Which addresses Ray listens on: loopback is fine, anything else wants a token."""

from __future__ import annotations

import subprocess
import sys

import pytest

from plait.doctor.findings import CheckStatus
from plait.doctor.machine import RaySocket, ray_listeners, sockets_findings
from plait.server.processes import RUN_ID_VARIABLE

LISTEN = (
    "import socket, sys, time; s = socket.create_server((sys.argv[1], 0)); print(s.getsockname()[1], flush=True);"
    "time.sleep(60)"
)


def listener(address="127.0.0.1", *, has_token=True, is_ours=True):
    return RaySocket(pid=1, program="raylet", address=address, port=6379, has_token=has_token, is_ours=is_ours)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([], "ok"),
        ([listener(), listener("::1", has_token=False)], "ok"),
        ([listener("::ffff:127.0.0.1", has_token=False)], "ok"),
        ([listener("::ffff:10.0.0.1", has_token=False)], "fail"),
        ([listener("0.0.0.0")], "warn"),
        ([listener("10.0.0.7", has_token=None)], "warn"),
        ([listener(), listener("::", has_token=False)], "fail"),
        ([listener("::", has_token=False, is_ours=False)], "warn"),
    ],
)
def test_sockets_beyond_loopback_want_a_token(found, verdict):
    """Without one, whoever reaches them runs code."""
    (finding,) = sockets_findings(found)
    assert finding.verdict == verdict
    assert bool(finding.advice) == (verdict != "ok")


@pytest.mark.parametrize(("address", "mode"), [("127.0.0.1", "token"), ("0.0.0.0", None)])
def test_listeners_are_read_from_the_processes(address, mode):
    """A process that is called like Ray's, with a real socket, and its environment."""
    environ = {RUN_ID_VARIABLE: "r1"} if mode is None else {"RAY_AUTH_MODE": mode}
    with subprocess.Popen(
        [sys.executable, "-c", LISTEN, address, "gcs_server"], stdout=subprocess.PIPE, env=environ
    ) as process:
        try:
            port = int(process.stdout.readline())
            (found,) = [it for it in ray_listeners() if it.pid == process.pid]
        finally:
            process.kill()
    assert (found.address, found.port, found.has_token) == (address, port, mode == "token")
    assert found.is_ours == (mode is None)
    (finding,) = sockets_findings([found])
    assert finding.verdict is (CheckStatus.OK if mode else CheckStatus.FAIL)
    assert ("RAY_AUTH_MODE=token" in finding.advice) == (mode is None)


def test_on_a_cluster_every_ray_is_what_plait_runs_on():
    """With an address, a Ray that somebody else started must ask for a token, too."""
    (finding,) = sockets_findings([listener("::", has_token=False, is_ours=False)], all_rays=True)
    assert finding.verdict is CheckStatus.FAIL
