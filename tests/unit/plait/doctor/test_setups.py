"""`plait doctor` as a command, on a healthy set-up and on broken ones: exit code 1 and advice for the one planted."""

from __future__ import annotations

import json
import socket

import pytest

from plait.cli import main as root
from plait.doctor import machine
from plait_serving.starter.manifest import write_manifest


@pytest.fixture
def doctor(tmp_path, monkeypatch, capsys):
    """Runs the command and returns its exit code and its failures. Other programs of this machine do not count."""
    starter = tmp_path / "starter"
    starter.mkdir()
    (starter / "a").write_bytes(b"weights")
    write_manifest(starter)
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr("plait_serving.images.config.STARTER_FOLDER", starter)
    monkeypatch.setenv("PLAIT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(machine, "ray_listeners", list)

    def run(*arguments):
        code = root.main(["doctor", "--json", "--port", "0", *arguments])
        found = json.loads(capsys.readouterr().out)
        assert {"python", "packages", "torch", "cpu", "memory", "files", "caches", "sockets", "starter"} <= {
            it["name"] for it in found
        }
        assert all(bool(it["advice"]) == (it["verdict"] != "ok") for it in found)
        return code, [it for it in found if it["verdict"] == "fail"]

    return run


def test_a_healthy_set_up_passes(doctor):
    """Nothing is wrong: exit code 0."""
    assert doctor() == (0, [])


def test_a_folder_of_pickles_is_found(doctor, tmp_path):
    """A plait.yaml that names weights which run code."""
    unet = tmp_path / "base" / "unet"
    unet.mkdir(parents=True)
    (unet / "diffusion_pytorch_model.bin").write_bytes(b"")
    (unet.parent / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    path = tmp_path / "plait.yaml"
    path.write_text("images: {model: ./base}\nrecommend: null\n")
    code, (found,) = doctor(str(path))
    assert (code, found["name"]) == (1, "models")
    assert "pickled" in found["detail"]
    assert "safe_serialization" in found["advice"]


@pytest.mark.usefixtures("doctor")
def test_ports_are_those_of_the_file(tmp_path, capsys):
    """Unless another one is named; another program has both, and the advice names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as another:
        port = other.getsockname()[1]
        text = f"server: {{port: {port}, direct_port: {another.getsockname()[1]}}}"
        (tmp_path / "plait.yaml").write_text(text)
        in_use, free = f"port {port} on 127.0.0.1 is in use", "0 is free on"
        for given, verdict, detail in (([], "warn", in_use), (["--port", "0"], "ok", free)):
            root.main(["doctor", "--json", str(tmp_path / "plait.yaml"), *given])
            found = {it["name"]: it for it in json.loads(capsys.readouterr().out)}
            assert (found["port"]["verdict"], found["port"]["detail"].startswith(detail)) == (verdict, True)
            assert found["server.direct_port"]["verdict"] == "warn"
            assert "another server.direct_port" in found["server.direct_port"]["advice"]


@pytest.mark.parametrize(
    ("host", "ray", "verdict", "detail"),
    [
        ("192.0.2.1", "local", "warn", "cannot listen on 192.0.2.1:0: "),
        ("192.0.2.1", "ray://elsewhere:10001", "ok", "0 is free on 127.0.0.1"),
        ("0.0.0.0", "local", "ok", "0 is free on 0.0.0.0"),
    ],
)
@pytest.mark.usefixtures("doctor")
def test_the_host_is_that_of_the_file(tmp_path, capsys, host, ray, verdict, detail):
    """An address of another machine is told, unless Serve is to listen on that machine."""
    (tmp_path / "plait.yaml").write_text(f"server: {{host: {host}, port: 0}}\nray: {{address: '{ray}'}}\n")
    root.main(["doctor", "--json", str(tmp_path / "plait.yaml")])
    (found,) = [it for it in json.loads(capsys.readouterr().out) if it["name"] == "port"]
    assert (found["verdict"], found["detail"].startswith(detail)) == (verdict, True)


def test_text_shows_the_advice_below_the_finding(doctor, tmp_path, capsys):
    """Without --json: one line a finding, and what to do under it."""
    (tmp_path / "starter" / "a").write_bytes(b"other")
    assert root.main(["doctor", "--port", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fail  starter"))
    assert lines[at + 1].strip() == "install plait again"
