"""The checks of the machine tell what will not work, and only that."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from plait.doctor import machine
from plait.doctor.findings import CheckStatus
from plait.doctor.machine import RaySocket, ray_listeners, sockets_findings
from plait.server.processes import RUN_ID_VARIABLE
from plait_kernels.cores import instruction_set
from plait_kernels.registry import ImplInfo


def test_cli_doctor_compares_versions_with_the_floors(monkeypatch):
    """A package below its security floor is a failure that says which and what is required."""
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["starlette>=1.0.1", "nothing-like-this>=1", 'x; extra == "dev"']
    )
    monkeypatch.setattr(importlib.metadata, "version", fake_version)
    (finding,) = machine.check_packages()
    assert finding.verdict is CheckStatus.FAIL
    assert finding.detail == "starlette 0.40.0 is not >=1.0.1; nothing-like-this is missing"
    assert "with pip" in finding.advice


def fake_version(name):
    if name != "starlette":
        raise importlib.metadata.PackageNotFoundError(name)
    return "0.40.0"


def test_cli_doctor_unusable_home_is_no_failure(tmp_path):
    """Without a home the state goes elsewhere, and doctor says where."""
    (finding,) = machine.check_home({"HOME": "/proc/nothing"})
    assert finding.verdict is CheckStatus.OK
    assert "/proc/nothing is not writable" in finding.detail
    (finding,) = machine.check_home({"PLAIT_STATE_DIR": "/proc/nothing"})
    assert finding.verdict is CheckStatus.FAIL
    assert "PLAIT_STATE_DIR" in finding.advice


def test_cli_doctor_finds_missing_vector_instructions():
    """Without AVX2 images take long; it says which set is used."""
    (finding,) = machine.check_cpu("none")
    assert finding.verdict is CheckStatus.WARN
    (finding,) = machine.check_cpu("avx512_bf16")
    assert (finding.verdict, "avx512_bf16" in finding.detail) == (CheckStatus.OK, True)
    (finding,) = machine.check_cpu()
    assert instruction_set() in finding.detail


def test_cli_doctor_finds_caches_that_keep_nothing(tmp_path):
    """A cache that cannot be written to is named by its variable."""
    (finding,) = machine.check_caches({"HOME": str(tmp_path)})
    assert finding.verdict is CheckStatus.OK
    (finding,) = machine.check_caches({"HOME": str(tmp_path), "XDG_CACHE_HOME": "/proc/nothing"})
    assert finding.verdict is CheckStatus.WARN
    assert "/proc/nothing (XDG_CACHE_HOME)" in finding.detail


def test_cli_doctor_survives_a_home_that_it_may_not_look_into(tmp_path, monkeypatch):
    """As of a container that runs as a user of its own and kept root's HOME."""
    exists = Path.exists

    def refused(path):
        if tmp_path / "root" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    (finding,) = machine.check_caches({"HOME": str(tmp_path / "root")})
    assert (finding.verdict, "cannot be written to" in finding.detail) == (CheckStatus.WARN, True)


def test_cli_doctor_finds_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    """A CPU build of torch beside GPUs, and a CUDA build without any, are warnings that say what to install."""
    import torch

    monkeypatch.setattr(torch.version, "cuda", None)
    (finding,) = machine.check_torch(tmp_path)
    assert finding.verdict is CheckStatus.OK
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    (finding,) = machine.check_torch(tmp_path)
    assert finding.verdict is CheckStatus.WARN
    assert "nvidia0" in finding.detail
    assert "nvidiactl" not in finding.detail
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (finding,) = machine.check_torch(tmp_path)
    assert "driver" in finding.advice


def test_cli_doctor_tries_what_is_compiled_on_a_gpu():
    """An operator that does not compile is a caveat with its reason."""
    broken = ImplInfo(
        op="op",
        name="n",
        entry="no_such_kernel:f",
        devices=frozenset({"cuda"}),
        dtypes=frozenset(),
        compiled=True,
    )
    (finding,) = machine.check_operators("cuda", [broken])
    assert finding.verdict is CheckStatus.WARN
    assert "op does not run here (ModuleNotFoundError" in finding.detail
    assert "gcc" in finding.advice


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
    """Without one, whoever reaches them runs code. With the address of a cluster, another's Ray is ours as well."""
    (finding,) = sockets_findings(found)
    (there,) = sockets_findings(found, all_rays=True)
    assert (there.verdict == "fail") == any(it.has_token is False and not it.is_loopback for it in found)
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
