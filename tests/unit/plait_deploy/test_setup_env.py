"""`make setup`, before anything is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from support.server import REPOSITORY


@pytest.fixture
def setup_env() -> ModuleType:
    """The script, which is in no package."""
    spec = importlib.util.spec_from_file_location("setup_env", REPOSITORY / "deploy" / "setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_environment_whose_making_was_interrupted_is_made_again(setup_env: ModuleType, tmp_path: Path) -> None:
    """`python -m venv` puts Python there first, and takes seconds until pip is there, too."""
    python = tmp_path / "bin" / "python"
    assert setup_env.needs_venv(tmp_path)
    python.parent.mkdir()
    for script, needs in (("exit 1", True), ("exit 0", False)):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        assert setup_env.needs_venv(tmp_path) is needs
