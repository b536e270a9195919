"""Where an engine keeps what it has made."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait_serving.diffusion.settings import EngineSettings


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container runs one: a number that is in no list of users. What would be kept there is made anew."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert not EngineSettings(model="x").prepared_folder.parent.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert EngineSettings(model="x").prepared_folder == Path("/var/cache/plait/prepared")
