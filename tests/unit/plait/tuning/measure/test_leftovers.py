"""What a killed tuner leaves is found and taken away by the next one: processes, applications, notes."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fakes.tuned_app import compose
from plait.config import dump_config, load_config
from plait.errors import PlaitError
from plait.server import processes
from plait.server.cluster import Cluster
from plait.server.processes import ProcessId
from plait.server.state import RunRecord, write_config
from plait.tuning.measure import live
from plait.tuning.measure.application import LiveBusy, RunningApplication
from plait.tuning.measure.clone import Clone
from plait.tuning.measure.live import LiveServer, RollbackNote, left_notes, note_path, running_config
from support.forking import forked, killed
from support.waiting import wait_for

GONE = ProcessId(pid=2**22 - 1, start_ticks=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A state folder."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


def clone_in(root: Path) -> Clone:
    """A clone that is not started."""
    return Clone(compose, root=root, log_path=root / "clone.log", say=lambda _: None)


def test_what_a_killed_clone_left_goes_when_the_next_one_comes(root: Path) -> None:
    """Its record says what: see `clean_up_others`."""
    folder = root / "port-4321"
    folder.mkdir(mode=0o700)
    boot_id, url = processes.boot_id(), "http://127.0.0.1:4321"
    record = RunRecord(run_id="r", boot_id=boot_id, command=GONE, url=url, address="local", ray_folder="/nowhere/r-1")
    (folder / "run.json").write_text(record.to_json())
    clone_in(root)
    assert not (folder / "run.json").exists()


def test_a_clone_on_a_foreign_ray_is_an_application_of_its_own_there(root, monkeypatch):
    """Below a path of its own; nothing else of that Ray is stopped."""
    stopped: list[bool] = []
    cluster = SimpleNamespace(own_name="{}-02".format, stop=lambda *, hurry: stopped.append(hurry))
    monkeypatch.setattr(Cluster, "attach", lambda config, port: cluster)
    monkeypatch.setenv(processes.RUN_ID_VARIABLE, "")
    monkeypatch.setenv("PLAIT_LOG_PATH", "")
    clone = clone_in(root)
    clone.start(load_config(overrides=["ray.address=1.2.3.4:5"]), num_cpus=1)
    assert (clone.app, clone.prefix) == ("plait-trial-02", "/plait-trial-02")
    clone.close()
    assert stopped == [False]


def live_note(owner: ProcessId, *, boot_id: str | None = None) -> RollbackNote:
    """A note about a live server."""
    return RollbackNote(run_id="r", config="images: null", owner=owner, boot_id=boot_id or processes.boot_id())


def test_a_note_says_whether_its_owner_is_gone(root: Path) -> None:
    """Dead, or of another boot; what cannot be read is no note."""
    live_note(GONE).write(note_path(root, 1))
    live_note(processes.me()).write(note_path(root, 2))
    live_note(processes.me(), boot_id="another").write(note_path(root, 3))
    note_path(root, 4).write_text("{}")
    assert left_notes(root) == [1, 3]
    assert RollbackNote.read(note_path(root, 1)) == live_note(GONE)
    assert RollbackNote.read(note_path(root, 4)) is None


def served(root: Path, port: int) -> None:
    """What `plait serve` leaves on disk while it runs, as this process."""
    (folder := root / f"port-{port}").mkdir(mode=0o700)
    (folder / "run.json").write_text(RunRecord(run_id="r", url=f"http://127.0.0.1:{port}").to_json())
    write_config(folder, dump_config(load_config(overrides=["images.knobs.threads=1"])))


def test_a_live_server_is_tuned_by_one_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment when the first has come, long before it changes anything. The second is told which process is at
    it; a server on another port is free, and so is this one when the first has left, or was killed."""
    monkeypatch.setattr(Cluster, "attach", lambda config, port: SimpleNamespace(detach=lambda: None))
    for port in (8000, 8001):
        served(root, port)
    first = LiveServer(compose, root=root, port=8000)
    with pytest.raises(LiveBusy, match=f"process {os.getpid()} tunes the server on port 8000 already"):
        LiveServer(compose, root=root, port=8000)
    LiveServer(compose, root=root, port=8001).close()
    first.close()
    killed_pid = forked(lambda: (LiveServer(compose, root=root, port=8000), (root / "at it").touch(), time.sleep(60.0)))
    wait_for((root / "at it").exists)
    with pytest.raises(LiveBusy, match=f"process {killed_pid} tunes"):
        LiveServer(compose, root=root, port=8000)
    killed(killed_pid)
    LiveServer(compose, root=root, port=8000).close()


def test_a_live_server_whose_new_configuration_cannot_be_noted_gets_its_own_back(root, monkeypatch):
    """On a full disk: what others read is what runs."""
    folder, before = root / "port-8000", load_config(overrides=["images.knobs.threads=1"])
    served(root, 8000)
    applied: list[str] = []
    monkeypatch.setattr(Cluster, "attach", lambda config, port: SimpleNamespace())
    monkeypatch.setattr(RunningApplication, "apply", lambda _, to, **__: applied.append(dump_config(to)) or {})
    live = LiveServer(compose, root=root, port=8000)
    changed = load_config(overrides=["images.knobs.threads=2"])
    (folder / "config.yaml.new").symlink_to("/dev/full")
    with pytest.raises(PlaitError, match=r"config\.yaml: No space left on device"):
        live.keep(changed)
    assert applied == [dump_config(changed), dump_config(before)]
    assert dump_config(running_config(root, 8000)) == dump_config(live.original) == dump_config(before)
    assert not note_path(root, 8000).exists()
    live.keep(changed)
    assert dump_config(running_config(root, 8000)) == dump_config(live.original) == dump_config(changed)


def test_the_note_of_a_server_that_is_gone_is_dropped(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to roll back any more."""
    monkeypatch.setenv("PLAIT_STATE_DIR", str(root))
    live_note(GONE).write(note_path(root, 4444))
    assert live.main(["4444"]) == 0
    assert left_notes(root) == []
