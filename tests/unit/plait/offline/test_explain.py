"""`plait models explain`: the exit code says that something keeps a model from being cut; guides show the other one."""

from __future__ import annotations

from plait.cli.main import main

SOURCE = """
import torch
from torch import nn
from plait_disagg.graph.inputs import Dense

class Model(nn.Module):
    def forward(self, x, y):
        return (x - x.mean(dim=0)).sum(1) + y.cumsum(dim=0).sum(1)

def build():
    return Model().eval(), [Dense("x", shape=(3,)), Dense("y", shape=(3,))]
"""


def test_all_obstacles_are_listed_with_their_lines(tmp_path, monkeypatch, capsys):
    """Both are listed, though the first would already refuse the model."""
    (tmp_path / "model.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["models", "explain", "model.py:build"]) == 1
    said = capsys.readouterr().out
    assert all(text in said for text in ("1. aten.mean.dim", "2. aten.cumsum", "model.py:8"))
