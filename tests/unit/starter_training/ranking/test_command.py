"""The training command of the starter's ranking model."""

from __future__ import annotations

import json

from starter_training.ranking import __main__ as command
from starter_training.ranking.train import PicksAuc


def test_picks_are_trained_and_packaged(tmp_path, monkeypatch, capsys):
    """The command writes the state and then the package that is served; its figures are JSON. The manifest of the
    shipped files is only written for those."""
    done = []
    figures = PicksAuc(**dict.fromkeys(PicksAuc.__dataclass_fields__, 0.5))
    monkeypatch.setattr(command, "train_picks", lambda folder: done.append(("train", folder)) or figures)
    monkeypatch.setattr(command, "package_picks", lambda folder: done.append(("package", folder)))
    monkeypatch.setattr(command, "write_manifest", lambda folder: done.append(("manifest", folder)))
    assert command.main(["picks", "--out", str(tmp_path)]) == 0
    assert done == [("train", tmp_path), ("package", tmp_path)]
    assert set(json.loads(capsys.readouterr().out)) == set(PicksAuc.__dataclass_fields__)
