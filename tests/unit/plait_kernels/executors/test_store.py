"""Converted models on disk: whatever interrupts or damages an entry, none is half there, and each is made once."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from plait_kernels.executors.store import ProgramStore, content_key


def fill(folder: Path) -> None:
    """An entry of one file."""
    (folder / "model").write_text("good")


def make(store: ProgramStore, key: str = "k", fills=fill) -> Path:
    """Make an entry now."""
    with store.making(key) as write:
        return write(fills)


def test_an_entry_is_found_under_its_key_until_it_is_dropped(tmp_path):
    """Other keys find nothing; making it again replaces it."""
    store = ProgramStore(tmp_path / "new" / "folder")
    assert store.find("k") is None
    path = make(store)
    assert store.find("k") == path
    assert store.find("other") is None
    make(store, fills=lambda folder: (folder / "other").touch())
    assert [file.name for file in path.iterdir()] == ["other"]
    store.drop("k")
    store.drop("k")
    assert store.find("k") is None


def test_a_process_that_dies_leaves_no_entry_and_its_leftovers_go(tmp_path, caplog):
    """It is killed after half the files: nothing is found; the next to make it removes what was left and says so."""
    code = """
import os, sys
from pathlib import Path
from plait_kernels.executors.store import ProgramStore
def half(folder):
    (folder / "model").write_text("ha")
    os._exit(9)
with ProgramStore(Path(sys.argv[1])).making("k") as write:
    write(half)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert sum(1 for path in tmp_path.iterdir() if path.is_dir()) == 1
    store = ProgramStore(tmp_path)
    assert store.find("k") is None
    with caplog.at_level(logging.INFO):
        path = make(store)
    assert "an interrupted conversion left" in caplog.text
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == ["k"]
    assert (path / "model").read_text() == "good"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError()])
def test_what_fails_leaves_nothing(tmp_path, error):
    """A full disk is an OSError, and whatever it is, no file stays and the earlier entry is as it was."""

    def fail(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise error

    store = ProgramStore(tmp_path)
    with pytest.raises(type(error)):
        make(store, fills=fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    make(store)
    with pytest.raises(type(error)):
        make(store, fills=fail)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["k"]
    assert (tmp_path / "k" / "model").read_text() == "good"


def test_who_holds_a_key_holds_others_up_and_no_other_key(tmp_path):
    """Of two threads one makes the entry while the other waits, and then finds it."""
    store, made, waiting = ProgramStore(tmp_path), [], threading.Event()

    def work() -> None:
        with store.making("k") as write:
            if store.find("k") is None:
                waiting.wait(60)
                made.append(write(fill))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    make(store, "other")
    waiting.set()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1


def test_a_key_is_of_bytes_names_and_facts(tmp_path):
    """One byte, a file's name, a fact: each makes another key. Times and order do not."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.json"
    a.write_bytes(b"weights")
    b.write_bytes(b"{}")
    key = content_key([a, b], ["openvino 1", "format 1"])
    assert len(key) == 32
    os.utime(a, (time.time() + 100, time.time() + 100))
    assert content_key([b, a], ["format 1", "openvino 1"]) == key
    others = [content_key([a, b], ["openvino 2", "format 1"]), content_key([a], ["openvino 1", "format 1"])]
    a.write_bytes(b"weightz")
    others.append(content_key([a, b], ["openvino 1", "format 1"]))
    a.write_bytes(b"weights")
    others.append(content_key([a.rename(tmp_path / "c.safetensors"), b], ["openvino 1", "format 1"]))
    assert len({key, *others}) == 5
    with pytest.raises(OSError, match="nowhere"):
        content_key([tmp_path / "nowhere"], [])
