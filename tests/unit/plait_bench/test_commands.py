"""Commands in processes of their own, and environments for peers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait_bench import commands
from plait_bench.errors import SystemFailed, SystemUnavailable


def test_a_command_that_fails_says_why(capfd):
    """Its errors go where ours go; the sentence has its exit code. Too slow and not there are failures, too."""
    assert commands.run_command([sys.executable, "-c", "print('fine')"], limit_s=60.0) == "fine\n"
    with pytest.raises(SystemFailed, match="ended with 1: its message is above"):
        commands.run_command([sys.executable, "-c", "raise SystemExit('no such variant')"], limit_s=60.0)
    assert "no such variant" in capfd.readouterr().err
    assert commands.run_command([sys.executable, "-c", "raise SystemExit(99)"], limit_s=60.0, fine=(0, 99)) == ""
    with pytest.raises(SystemFailed, match="timed out"):
        commands.run_command([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.01)
    with pytest.raises(SystemFailed, match="nothing"):
        commands.run_command(["/nothing/here"], limit_s=60.0)


def test_an_environment_is_made_once_and_again_for_other_versions(monkeypatch, tmp_path, capfd):
    """A half-made one does not stay."""
    called: list[list[str]] = []

    def run(command, **_):
        called.append(list(command))
        if command[1:3] == ["-m", "venv"]:
            Path(command[-1]).mkdir(parents=True)
        if command[-1] == "broken==1":
            raise SystemFailed("no room")
        return ""

    monkeypatch.setattr(commands, "run_command", run)
    python = commands.environment(tmp_path / "peer", ("one==1", "two==2"), dropped=("three",))
    assert python == tmp_path / "peer" / "bin" / "python"
    assert [command[-2:] for command in called] == [
        ["venv", str(tmp_path / "peer")], ["one==1", "two==2"], ["--yes", "three"]
    ]  # fmt: skip
    assert "installing one==1" in capfd.readouterr().err
    commands.environment(tmp_path / "peer", ("one==1", "two==2"))
    assert len(called) == 3
    commands.environment(tmp_path / "peer", ("one==2",))
    assert len(called) == 5
    with pytest.raises(SystemUnavailable, match="broken==1 cannot be installed: no room"):
        commands.environment(tmp_path / "peer", ("broken==1",))
    assert not (tmp_path / "peer").exists()
