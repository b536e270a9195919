"""The demo once more, in the folder of an earlier one; `tests/e2e/test_wheel.py` runs it in a new one."""

from __future__ import annotations

import subprocess

import pytest

from plait.demo import run as demo
from plait.errors import ServeError


def test_cli_demo_makes_a_second_model(tmp_path, monkeypatch):
    """Anew by the command."""
    commands = []
    (tmp_path / demo.SECOND).mkdir()
    (tmp_path / demo.SECOND / "model_index.json").write_text("{}")

    def run(command, **_):
        commands.append(command)
        assert not (tmp_path / demo.SECOND).exists()
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(demo.subprocess, "run", run)
    assert demo.second_model(tmp_path) == tmp_path / demo.SECOND
    assert commands[0][-6:] == ["merge", "emoji", "--lora", "sketch", "--out", str(tmp_path / demo.SECOND)]
    with pytest.raises(ServeError, match="ended with exit code 1"):
        demo.second_model(tmp_path)
