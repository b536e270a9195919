"""What the tests of rendering share."""

from __future__ import annotations

import pytest

from plait.cli import main as root


@pytest.fixture
def render(tmp_path, capsys):
    """`plait deploy render` of a plait.yaml in the test's folder: the exit code, and what it prints."""

    def run(text, *arguments):
        path = tmp_path / "plait.yaml"
        path.write_text(text)
        capsys.readouterr()
        return root.main(["deploy", "render", str(path), *arguments]), capsys.readouterr()

    return run
