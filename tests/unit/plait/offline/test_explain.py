"""`plait models explain`: all obstacles in one pass."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from plait.cli.models import app

SOURCE = """
import torch
from torch import nn
from plait_disagg.graph.inputs import Dense

class Model(nn.Module):
    def forward(self, x, y):
        return {bodies}

def build():
    return Model().eval(), [Dense("x", shape=(3,)), Dense("y", shape=(3,))]
"""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        (
            "(x - x.mean(dim=0)).sum(1) + y.cumsum(dim=0).sum(1)",
            1,
            ("1. aten.mean.dim", "2. aten.cumsum", "model.py:8"),
        ),
        ("x.sum(1) + y.sum(1)", 0, ("nothing keeps it",)),
    ],
)
def test_all_obstacles_are_listed_with_their_lines(tmp_path, monkeypatch, body, code, said):
    """Both are listed, though the first would already refuse the model; a model without any exits with 0."""
    (tmp_path / "model.py").write_text(SOURCE.format(bodies=body), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["explain", "model.py:build"])
    assert made.exit_code == code, made.output
    assert all(text in made.output for text in said)
