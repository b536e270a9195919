"""The folder of base models: what is moved in is seen, also at the same tick of the file system's clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

from plait_serving.diffusion.residents.model_folder import FolderOfModels, FoundModel
from plait_serving.diffusion.residents.roster import Growth, Roster


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


class _Slow(FolderOfModels):
    """A folder that is listed when it may be; `entered` says that somebody waits for that."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.entered, self.go_on = threading.Event(), threading.Event()

    def list(self) -> Mapping[str, FoundModel]:
        self.entered.set()
        assert self.go_on.wait(20)
        return super().list()


def test_a_look_beside_one_that_goes_on_waits_where_something_was_moved(tmp_path: Path):
    """It does not answer with the list of before."""
    folder = _Slow(tmp_path)
    roster = Roster({}, Growth(folder=folder, make=Mock(), engine=Mock()))
    first = threading.Thread(target=roster.look)
    first.start()
    assert folder.entered.wait(20)
    second = threading.Thread(target=roster.look, kwargs={"wait": False})
    second.start()
    second.join(0.2)
    assert second.is_alive()
    folder.go_on.set()
    for thread in (first, second):
        thread.join(20)
        assert not thread.is_alive()
