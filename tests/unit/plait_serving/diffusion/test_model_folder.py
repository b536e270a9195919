"""The folder of base models: what is moved in is seen, also at the same tick of the file system's clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

from plait_serving.diffusion.residents.model_folder import FolderOfModels


def test_a_move_at_the_same_tick_as_a_look_is_seen(tmp_path: Path):
    """The folder's time does not tell the two apart; after a second it stands still, and says so."""
    folder = FolderOfModels(tmp_path)
    (tmp_path / "one").mkdir()
    now_ns = time.time_ns()
    os.utime(tmp_path, ns=(now_ns, now_ns))
    before = folder.changed_ns()
    (tmp_path / "two").mkdir()
    os.utime(tmp_path, ns=(now_ns, now_ns))
    assert folder.changed_ns() != before
    long_ago_ns = now_ns - 5_000_000_000
    os.utime(tmp_path, ns=(long_ago_ns, long_ago_ns))
    assert folder.changed_ns() == folder.changed_ns() == long_ago_ns
    assert FolderOfModels(tmp_path / "absent").changed_ns() == 0
