"""What each LoRA source promises beyond the contract: links, new files, pinned hashes, one download per node."""

from __future__ import annotations

import hashlib
import io
import itertools
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest

from plait_serving.diffusion.errors import EngineStopped, LoraError, NotFound
from plait_serving.diffusion.lora import listing
from plait_serving.diffusion.lora.remote import RemoteEntry, RemoteSource
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.sources.names import composed
from plait_serving.diffusion.sources.staging import locked

# ---- folder ---------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, content: bytes = b"x") -> Path:
    """A file with some content; sources do not look inside."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class Watched:
    """A folder source on a clock that the test holds, long after what is put into the folder; counts what is read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.entries = 0
        self.probe = folder.with_name("probe")
        self.wall_ns = time.time_ns() + 10**12
        self.source = FolderSource(folder, clock=lambda: self.now_s)
        monkeypatch.setattr(listing, "time", SimpleNamespace(time_ns=lambda: self.wall_ns))
        monkeypatch.setattr(listing, "os", SimpleNamespace(scandir=self._scandir, path=os.path))

    def _scandir(self, directory: Path):
        self.entries += len(list(directory.iterdir()))
        return os.scandir(directory)

    def tick(self) -> None:
        """Wait until the file system's clock moves, so that changes have another time than what was read."""
        probe = self.probe
        probe.write_bytes(b"")
        before_ns = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == before_ns:
            probe.write_bytes(b"x")

    def names(self) -> list[str]:
        """Return what a request is told."""
        return list(self.source.names())


@pytest.fixture
def watched(tmp_path, monkeypatch) -> Watched:
    """Over `loras` in the test's folder, which is not there yet."""
    return Watched(tmp_path / "loras", monkeypatch)


def test_a_folder_is_listed_once_for_any_number_of_requests(tmp_path, watched):
    """Nor is it again while nothing comes or goes: neither for LoRAs that are there nor for those that are not."""
    for i in range(300):
        put(tmp_path / "loras", f"s{i % 3}/f{i}.safetensors")
    for _ in range(40):
        watched.now_s += 0.2
        assert len(watched.names()) == 300
        assert watched.source.find("f17").name == watched.source.fetch("f17").stem == "f17"
        assert watched.source.find("nobody") is None
    assert watched.entries == 3 + 300


def test_new_files_are_known_within_two_seconds(tmp_path, watched):
    """No restart: the folder is the truth, also before it exists, and in sub-folders; who asks for the LoRA itself
    gets it at once."""
    places = ("a.safetensors", "b/c/b.safetensors", "b/c/d.safetensors", "e/pytorch_lora_weights.safetensors")
    for i, place in enumerate(places):
        watched.names()
        watched.tick()
        path = put(tmp_path / "loras", place)
        name = path.stem if i < 3 else "e"
        if i == 2:
            assert watched.source.find(name) is not None
        watched.now_s += 2.0
        assert name in watched.names()
        assert watched.source.fetch(name) == path


@pytest.mark.parametrize("how", ["removed", "renamed", "folder", "pipe", "leads out", "folder leads out"])
def test_what_is_no_file_of_the_folder_any_more_is_not_found_at_once(tmp_path, watched, how):
    """Not even for the two seconds in which it may still be listed."""
    path = put(tmp_path / "loras", "sub/a.safetensors")
    outside = put(tmp_path / "outside", "a.safetensors")
    assert watched.source.find("a") is not None
    watched.tick()
    if how == "folder leads out":
        path.parent.rename(tmp_path / "loras" / "other.d")
        shutil.rmtree(tmp_path / "loras" / "other.d")
        path.parent.symlink_to(outside.parent)
    elif how == "renamed":
        path.rename(path.with_name("b.safetensors"))
    else:
        path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "leads out":
        path.symlink_to(outside)
    assert watched.source.find("a") is None
    with pytest.raises(NotFound):
        watched.source.fetch("a")
    watched.now_s += 2.0
    assert "a" not in watched.names()


@pytest.mark.parametrize("link", ["loras", "loras/styles", "loras/styles/a.safetensors"])
def test_a_link_that_leads_elsewhere_is_followed_at_once(tmp_path, watched, link):
    """Whole folders are replaced by a link that is turned: nothing of the old one is served from then on."""
    path, root = tmp_path / link, tmp_path / ("" if link == "loras" else "loras")
    for version in ("v1", "v2"):
        put(root / version, {"loras": "styles/a.safetensors"}.get(link, "a.safetensors"), version.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    below = "a.safetensors" if link.endswith(".safetensors") else ""
    for version in ("v1", "v2"):
        watched.tick()
        path.unlink(missing_ok=True)
        path.symlink_to(root / version / below)
        assert watched.source.fetch("a").read_bytes() == version.encode()


def test_a_change_in_the_same_moment_is_not_missed(tmp_path, watched):
    """Where the file system's clock stood still between a reading and the next change, the times are equal."""
    put(tmp_path / "loras", "a.safetensors")
    folder = tmp_path / "loras"
    watched.wall_ns = folder.stat().st_ctime_ns + 10**9
    assert watched.names() == ["a"]
    for _ in range(3):
        watched.now_s += 2.0
        watched.names()
    assert watched.entries == 4
    watched.wall_ns += 10**12
    for _ in range(3):
        watched.now_s += 2.0
        watched.names()
    assert watched.entries == 5


def test_a_file_system_that_keeps_no_times_is_read_every_ten_seconds(tmp_path, watched, monkeypatch):
    """Some of those of object stores: all that is put there is known, if later."""
    monkeypatch.setattr(listing, "_mark", lambda path: None)
    put(tmp_path / "loras", "a.safetensors")
    assert watched.names() == ["a"]
    put(tmp_path / "loras", "b.safetensors")
    watched.now_s += 10.0
    assert watched.names() == ["a", "b"]


@pytest.mark.parametrize("change", ["content", "time", "replaced", "in place", "configuration"])
def test_a_changed_file_has_a_new_stamp(tmp_path, change):
    """Overwritten in place, also by as many bytes with the time put back, touched, or replaced by a file of the same
    size and time; and an adapter whose configuration is another."""
    path = put(tmp_path, "a/adapter_model.safetensors", b"one")
    config = put(tmp_path, "a/adapter_config.json")
    source = FolderSource(tmp_path)
    before = source.find("a")
    times, changed_ns = (path.stat().st_atime_ns, path.stat().st_mtime_ns), path.stat().st_ctime_ns
    if change in ("content", "in place"):
        while path.stat().st_ctime_ns == changed_ns:  # until the file system's clock moves
            path.write_bytes(b"three" if change == "content" else b"two")
        os.utime(path, ns=times)
    elif change == "time":
        os.utime(path, ns=(times[0], times[1] + 1))
    elif change == "configuration":
        config.write_bytes(b"other")
    else:
        other = put(tmp_path, "other", b"two")
        os.utime(other, ns=times)
        other.replace(path)
    assert source.find("a").stamp != before.stamp


def test_sub_folders_at_any_depth(tmp_path):
    """Saved folders are named by themselves, other files by their stem, also beside what was saved."""
    places = {
        "top": "top.safetensors",
        "pytorch_lora_weights": "pytorch_lora_weights.safetensors",  # of the folder itself, which has no name
        "wash": "styles/ink/wash.safetensors",
        "portrait": "runs/7/portrait/pytorch_lora_weights.safetensors",
        "checkpoint-500": "runs/7/portrait/checkpoint-500/pytorch_lora_weights.safetensors",
        "landscape": "runs/8/landscape/adapter_model.safetensors",
        "other": "runs/8/landscape/other.safetensors",
        "adapter_model": "bare/adapter_model.safetensors",  # without a configuration it is a file like any other
    }
    for place in (*places.values(), "runs/7/portrait/optimizer.bin", "runs/8/landscape/adapter_config.json"):
        put(tmp_path, place)
    source = FolderSource(tmp_path)
    assert {name: str(path.relative_to(tmp_path)) for name, path in source.files().items()} == places
    assert list(source.names()) == sorted(places)


@pytest.mark.parametrize(
    ("files", "served"),
    [
        (("a/x.safetensors", "x.safetensors"), "x.safetensors"),
        (("b/x.safetensors", "a/x.safetensors"), "a/x.safetensors"),
        (("b/x.safetensors", "x/pytorch_lora_weights.safetensors"), "x/pytorch_lora_weights.safetensors"),
        (("x.safetensors", "x.SAFETENSORS"), "x.SAFETENSORS"),
        (("x/pytorch_lora_weights.safetensors", "x.safetensors"), "x.safetensors"),
        (("\u00fc.safetensors", "u\u0308.safetensors"), "u\u0308.safetensors"),
    ],
)
def test_of_two_with_one_name_one_is_served(tmp_path, caplog, files, served):
    """The one nearer to the top, at one depth the first by path; the log says so once, and which one is. macOS writes
    ü as two characters: it is one name, the composed one."""
    for file in files:
        put(tmp_path, file)
    clock = itertools.count(step=60)
    source = FolderSource(tmp_path, clock=lambda: next(clock))
    for _ in range(2):
        [(name, path)] = source.files().items()
        assert (name, str(path.relative_to(tmp_path))) == (composed(name), served)
    (other,) = set(files) - {served}
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{tmp_path}/{other} is ignored: {served} has its name"]


def test_what_is_not_served_is_logged_once_with_its_reason(tmp_path, caplog):
    """Whatever looks like a LoRA, or may hold some; a note and an empty folder do not."""
    outside = put(tmp_path / "outside", "secret.safetensors").parent
    folder = tmp_path / "loras"
    put(folder, "ok.safetensors")
    put(folder, "note.txt")
    (folder / "empty").mkdir()
    (folder / "dir.safetensors").mkdir()
    reasons = {
        ".hidden.safetensors": "hidden", ".git": "hidden", "a:b.safetensors": "a name has", " .safetensors": "a name",
        "x\u200b/pytorch_lora_weights.safetensors": "a name has", f"{'x' * 201}.safetensors": "a name has",
        "deep/er/b.PT": "only .safetensors files are read", "out.safetensors": "leads out", "outdir": "leads out",
        "loop.safetensors": "leads nowhere", "linked/adapter_model.safetensors": "adapter_config.json is a link",
        "pipe.safetensors": "not a file", "circle/adapter_model.safetensors": "adapter_config.json is a link",
    }  # fmt: skip
    for name in (".hidden.safetensors", ".git/x.safetensors", *list(reasons)[2:7], "linked/adapter_model.safetensors"):
        put(folder, name)
    (folder / "out.safetensors").symlink_to(outside / "secret.safetensors")
    (folder / "outdir").symlink_to(outside)
    (folder / "loop.safetensors").symlink_to(folder / "loop.safetensors")
    (folder / "linked" / "adapter_config.json").symlink_to(put(outside, "adapter_config.json"))
    put(folder, "circle/adapter_model.safetensors")
    (folder / "circle" / "adapter_config.json").symlink_to(folder / "circle" / "adapter_config.json")
    os.mkfifo(folder / "pipe.safetensors")
    clock = itertools.count(step=60)
    source = FolderSource(folder, clock=lambda: next(clock))
    for _ in range(3):
        assert list(source.names()) == ["ok"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(reasons)
    for path, reason in reasons.items():
        shown = repr(str(folder / path))[1:-1]
        assert sum(line.startswith(f"{shown} is ignored: ") and reason in line for line in said) == 1, path


def test_a_folder_that_is_nowhere_is_empty(tmp_path):
    """Not there yet, or a link to itself."""
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for name in ("circle", "absent"):
        assert not FolderSource(tmp_path / name).names()


def test_links_inside_lead_to_their_names_and_to_no_end(tmp_path):
    """A linked file or folder has the link's name; a folder that leads back up is read once."""
    put(tmp_path, "a/pytorch_lora_weights.safetensors")
    put(tmp_path, "a/inner.safetensors")
    (tmp_path / "linked.safetensors").symlink_to(tmp_path / "a" / "inner.safetensors")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "same").symlink_to(tmp_path / "a")
    assert list(FolderSource(tmp_path).names()) == ["a", "b", "inner", "linked", "same"]


# ---- remote ---------------------------------------------------------------------------------------------------------

CONTENT = bytes(range(256)) * 5000


def entry(content: bytes = CONTENT, path: str = "a.safetensors") -> RemoteEntry:
    """A pinned entry for a content."""
    return RemoteEntry(path=path, sha256=hashlib.sha256(content).hexdigest(), nbytes=len(content))


class Store:
    """A folder as a remote store that counts downloads."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path / "store"
        self.cache = tmp_path / "cache"
        self.downloads = 0
        put(self.folder, "a.safetensors", CONTENT)
        real_open = fsspec.open

        def counted(*args, **kwargs):
            self.downloads += 1
            return real_open(*args, **kwargs)

        monkeypatch.setattr(fsspec, "open", counted)

    def source(self, **entries: RemoteEntry) -> RemoteSource:
        """A source over it, as another process or a restart would make it."""
        return RemoteSource(self.folder.as_uri(), entries or {"a": entry()}, cache_folder=self.cache)

    def left_over(self) -> list[str]:
        """Files in the cache that are neither locks nor complete."""
        return [path.name for path in self.cache.iterdir() if path.name.startswith(".")]


@pytest.fixture
def store(tmp_path, monkeypatch) -> Store:
    """With one file."""
    return Store(tmp_path, monkeypatch)


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], CONTENT[:-1] + b"!"], ids=["none", "cut", "flipped"])
def test_a_cached_file_is_fetched_again_if_it_is_damaged(store, damage, caplog):
    """It lies under its hash, across restarts, and is checked at every use."""
    path = store.source().fetch("a")
    assert path.name == f"{hashlib.sha256(CONTENT).hexdigest()}.safetensors"
    if damage:
        path.write_bytes(damage)
    assert store.source().fetch("a") == path
    assert path.read_bytes() == CONTENT
    assert (store.downloads, "damaged" in caplog.text) == ((2, True) if damage else (1, False))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(CONTENT[:-1], "has 1279999 bytes, not"), (CONTENT[:-1] + b"!", "has sha256")],
    ids=["short", "other"],
)
def test_what_is_not_the_pinned_file_is_refused(store, content, sentence):
    """Tried twice, then an error; nothing is left in the cache, and a repaired store works at once."""
    put(store.folder, "a.safetensors", content)
    with pytest.raises(LoraError, match=sentence):
        store.source().fetch("a")
    assert store.downloads == 2
    assert [path.suffix for path in store.cache.iterdir()] == [".lock"]
    put(store.folder, "a.safetensors", CONTENT)
    assert store.source().fetch("a").read_bytes() == CONTENT


def test_a_store_that_fails_is_a_clear_error_without_secrets(store):
    """The message names the entry and the kind of error, never the URL, which may carry credentials."""
    source = RemoteSource("memory://user:secret@host/", {"a": entry()}, cache_folder=store.cache)
    with pytest.raises(LoraError) as caught:
        source.fetch("a")
    assert "does not deliver 'a.safetensors' (FileNotFoundError)" in caught.value.message
    assert "secret" not in caught.value.message


class Endless(io.BytesIO):
    """A remote file without an end, that says what is read of it."""

    def __init__(self, on_read: Callable[[int], None]) -> None:
        super().__init__()
        self._on_read = on_read

    def read(self, nbytes: int) -> bytes:
        self._on_read(nbytes)
        return bytes(nbytes)


def test_an_endless_download_stops_at_the_pinned_size(store, monkeypatch):
    """A store that sends more than was declared cannot fill the disk."""
    sent_bytes: list[int] = []
    monkeypatch.setattr(fsspec, "open", lambda *_, **__: Endless(sent_bytes.append))
    with pytest.raises(LoraError, match="more than"):
        store.source().fetch("a")
    assert sum(sent_bytes) <= 2 * (len(CONTENT) + max(sent_bytes))


def test_closing_ends_a_running_download(store, monkeypatch):
    """Shut-down does not wait for gigabytes: the download fails at its next chunk."""
    source = store.source()
    monkeypatch.setattr(fsspec, "open", lambda *_, **__: Endless(lambda _: source.close()))
    with pytest.raises(EngineStopped):
        source.fetch("a")
    assert store.left_over() == []


def test_left_overs_of_a_killed_process_are_removed(store):
    """A partial download that nobody holds any more goes away with the next one of that entry."""
    put(store.cache, f".{entry().sha256}.dead.part", b"half")
    store.source().fetch("a")
    assert store.left_over() == []


def test_threads_download_an_entry_once(store):
    """Eight concurrent fetches of one entry cost one download."""
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: store.source().fetch("a"), range(8)))
    assert len(paths) == 1
    assert store.downloads == 1


def fetch_slowly(url: str, cache: str, log: str) -> None:
    """In another process: fetches and notes each download."""
    real_open = fsspec.open

    def noted(*args, **kwargs):
        with Path(log).open("a") as file:
            file.write("download\n")
        return real_open(*args, **kwargs)

    fsspec.open = noted
    RemoteSource(url, {"a": entry()}, cache_folder=Path(cache)).fetch("a")


def die_with_the_lock(path: Path) -> None:
    """In another process: kill -9 while it holds an entry's lock."""
    with locked(path):
        os.kill(os.getpid(), signal.SIGKILL)


def test_processes_download_an_entry_once(store, tmp_path):
    """The lock file holds between processes; a lock whose holder was killed does not block."""
    context = multiprocessing.get_context("fork")
    store.cache.mkdir()
    victim = context.Process(target=die_with_the_lock, args=(store.cache / f"{entry().sha256}.lock",))
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    args = (store.folder.as_uri(), str(store.cache), str(tmp_path / "log"))
    workers = [context.Process(target=fetch_slowly, args=args) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "download\n"


def test_a_cache_that_can_not_be_written_is_a_clear_error(store, tmp_path):
    """The operator reads what is wrong with the node."""
    blocker = put(tmp_path, "file")
    source = RemoteSource(store.folder.as_uri(), {"a": entry()}, cache_folder=blocker / "cache")
    with pytest.raises(LoraError, match="node's cache cannot be used"):
        source.fetch("a")


@pytest.mark.parametrize(
    "bad",
    [{"sha256": "abc"}, {"sha256": "A" * 64}, {"nbytes": 0}, {"nbytes": 1 << 50}, {"path": "../x"}, {"path": ""}],
    ids=str,
)
def test_entries_are_checked_when_they_are_configured(bad, tmp_path):
    """A wrong pin, or a name that nobody could ask for, is found at start, not at the first request."""
    with pytest.raises(ValueError):
        RemoteEntry(**{"path": "a", "sha256": "0" * 64, "nbytes": 1, **bad})
    with pytest.raises(ValueError, match="no valid LoRA name"):
        RemoteSource("memory://x", {"../a": entry()}, cache_folder=tmp_path)
