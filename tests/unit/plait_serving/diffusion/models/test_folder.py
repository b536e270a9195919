"""The folder of base models: what is moved in is seen, also at the same tick of the file system's clock."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest

from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models.folder import FolderOfModels, FoundModel
from plait_serving.diffusion.models.pool import ModelPool


def model(folder: Path, name: str) -> Path:
    """What looks like a model from outside."""
    (folder / name).mkdir(parents=True)
    (folder / name / "model_index.json").write_text("{}")
    return folder / name


def test_of_two_folders_with_one_name_the_first_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """They look the same to people: the log says once which one is left out."""
    first = model(tmp_path, "u\u0308")
    second = model(tmp_path, "\u00fc")
    folder = FolderOfModels(tmp_path)
    for _ in range(2):
        assert {name: found.folder for name, found in folder.list().items()} == {"\u00fc": first}
    assert [record.getMessage() for record in caplog.records] == [f"{second} is ignored: {first.name} has its name"]


def test_what_is_not_served_is_logged_once_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Whatever may be a model; a note is none."""
    outside = model(tmp_path / "outside", "secret")
    folder = tmp_path / "more"
    for name in ("X.SAFETENSORS", "ok"):
        model(folder, name)
    (folder / "note.txt").touch()
    reasons = {
        "dream.safetensors": "images.models names those", "OLD.CKPT": "a pickle", "out": "leads out",
        "itself": "leads out", ".half.7.partial": "hidden", "gone": "leads nowhere",
        "a:b": "a name has", "empty": "has no model_index.json",
        "copied": "its model_index.json is a link that leads nowhere",
    }  # fmt: skip
    for name in ("dream.safetensors", "OLD.CKPT"):
        (folder / name).touch()
    for name in (".half.7.partial", "a:b"):
        model(folder, name)
    for name in ("empty", "copied"):
        (folder / name).mkdir()
    (folder / "copied" / "model_index.json").symlink_to("../../blobs/1")
    (folder / "out").symlink_to(outside)
    (folder / "itself").symlink_to(folder)
    (folder / "gone").symlink_to(tmp_path / "gone")
    found = FolderOfModels(folder)
    for _ in range(3):
        assert list(found.list()) == ["X.SAFETENSORS", "ok"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(reasons)
    for path, reason in reasons.items():
        assert sum(line.startswith(f"{folder / path} is ignored: ") and reason in line for line in said) == 1, path


def test_a_model_with_a_link_that_leads_nowhere_is_listed(tmp_path: Path):
    """As `cp -r` of a folder in the hub's cache has them: what is missing is told when it is loaded. A file in the
    link's place is another state of the model."""
    link = model(tmp_path, "copied") / "weights"
    link.symlink_to("../../blobs/1")
    folder = FolderOfModels(tmp_path)
    before = folder.list()["copied"].stamp
    link.unlink()
    link.touch()
    assert folder.list()["copied"].stamp != before


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
        assert self.go_on.wait(60)
        return super().list()


def test_a_look_beside_one_that_goes_on_waits_where_something_was_moved(tmp_path: Path):
    """It does not answer with the list of before."""
    folder = _Slow(tmp_path)
    pool = ModelPool(budget_bytes=1, clock=time.monotonic, wake=Mock(), open_models=set, memory=MemoryReader())
    first = threading.Thread(target=pool.watch, args=(folder, Mock()))
    first.start()
    assert folder.entered.wait(60)
    second = threading.Thread(target=pool.look, kwargs={"always": False})
    second.start()
    second.join(0.2)
    assert second.is_alive()
    folder.go_on.set()
    for thread in (first, second):
        thread.join(60)
        assert not thread.is_alive()
