"""`plait doctor` tells what will not work, and only that."""

from __future__ import annotations

import importlib.metadata
import json
import socket

import pytest

from plait import doctor
from plait.cli import main as root
from plait.doctor import CheckStatus
from plait_serving.starter.manifest import write_manifest


@pytest.fixture
def starter(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"weights")
    write_manifest(tmp_path)
    return tmp_path


def test_cli_doctor_accepts_intact_starter_files(starter):
    """Files that match their manifest are fine."""
    (finding,) = doctor.check_starter(starter)
    assert finding.verdict is CheckStatus.OK


@pytest.mark.parametrize("harm", ["changed", "missing", "no manifest", "broken manifest"])
def test_cli_doctor_finds_harmed_starter_files(starter, harm):
    """A changed or missing file, or no readable manifest, is a failure that names it."""
    if harm == "changed":
        (starter / "a.bin").write_bytes(b"other")
    elif harm == "missing":
        (starter / "a.bin").unlink()
    elif harm == "no manifest":
        (starter / "MANIFEST.json").unlink()
    else:
        (starter / "MANIFEST.json").write_text("[]")
    (finding,) = doctor.check_starter(starter)
    assert finding.verdict is CheckStatus.FAIL
    assert ("a.bin" if harm in ("changed", "missing") else "manifest") in finding.detail.lower()


def test_cli_doctor_compares_versions_with_the_floors(monkeypatch):
    """A package below its security floor is a failure that says which and what is required."""
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda _: ["starlette>=1.0.1", "nothing-like-this>=1", 'x; extra == "dev"']
    )
    monkeypatch.setattr(importlib.metadata, "version", fake_version)
    (finding,) = doctor.check_packages()
    assert finding.verdict is CheckStatus.FAIL
    assert finding.detail == "starlette 0.40.0 is not >=1.0.1; nothing-like-this is missing"


def fake_version(name):
    if name != "starlette":
        raise importlib.metadata.PackageNotFoundError(name)
    return "0.40.0"


def test_cli_doctor_says_who_has_the_port():
    """A busy port is a warning: another port will do."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        (finding,) = doctor.check_port("127.0.0.1", other.getsockname()[1])
    assert finding.verdict is CheckStatus.WARN


def test_cli_doctor_unusable_home_is_no_failure(tmp_path):
    """Without a home the state goes elsewhere, and doctor says where."""
    (finding,) = doctor.check_home({"HOME": "/proc/nothing"})
    assert finding.verdict is CheckStatus.OK
    assert "/proc/nothing is not writable" in finding.detail
    (finding,) = doctor.check_home({"PLAIT_STATE_DIR": "/proc/nothing"})
    assert finding.verdict is CheckStatus.FAIL


@pytest.mark.parametrize(("verdict", "code"), [(CheckStatus.OK, 0), (CheckStatus.WARN, 0), (CheckStatus.FAIL, 1)])
def test_cli_doctor_exit_code_and_json(monkeypatch, capsys, verdict, code):
    """Only a failure is exit code 1; --json is a list that a program can read."""
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: [doctor.CheckResult("cores", verdict, "2")])
    assert root.main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == [{"name": "cores", "verdict": verdict.value, "detail": "2"}]
