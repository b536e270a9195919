"""The checks of the machine tell what will not work, and only that."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from plait.doctor import machine
from plait.doctor.findings import CheckStatus
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
