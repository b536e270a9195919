"""Results that are kept for a while: who finds them, when they end, and what a store that cannot keep them says."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from pydantic import ValidationError

from plait_serving.images.codec import OutputFormat
from plait_serving.images.config import ResultsSection
from plait_serving.images.results import ResultStore, StoreFailed, StoreFull
from support.waiting import Clock

PNG = OutputFormat.PNG
LIFETIME_S = 100.0


@pytest.fixture
def clock():
    """Both clocks of a store."""
    return Clock(1_790_000_000.0)


@pytest.fixture(params=["folder", "url"])
def place(request, tmp_path):
    return str(tmp_path / "kept" / "images") if request.param == "folder" else f"memory://{tmp_path.name}/kept"


def store_at(place, clock, max_bytes=1000):
    where = {"url": place} if "://" in place else {"folder": place}
    settings = ResultsSection(**where, lifetime_s=LIFETIME_S, max_bytes=max_bytes)
    return ResultStore(settings, now_s=clock, monotonic_s=clock)


def test_names_cannot_be_guessed(place, clock):
    """192 random bits; two of the same image differ."""
    store = store_at(place, clock)
    names = {store.put(b"same", PNG) for _ in range(20)}
    assert len({name.partition("-")[2] for name in names}) == 20
    assert all(len(name.partition("-")[2].removesuffix(".png")) == 32 for name in names)


def test_an_image_ends_and_its_file_goes(place, clock):
    """Its name says when; whoever stores or checks next removes the file, whichever process kept it."""
    name = store_at(place, clock).put(b"image", PNG)
    clock.now_s += LIFETIME_S - 1
    assert store_at(place, clock).get(name) is not None
    clock.now_s += 3
    other = store_at(place, clock)
    assert other.get(name) is None
    files, folder = fsspec.core.url_to_fs(place)
    assert len(files.ls(folder)) == 1
    other.check()
    assert files.ls(folder) == []


@pytest.mark.parametrize(
    "name",
    ["", "..", "../secret", "/etc/passwd", "06ab1f6f5-" + "a" * 32, "06ab1f6f5-" + "a" * 31 + ".png", "x" * 300,
     "06ab1f6f5-" + "a" * 32 + ".svg", "06ab1f6f5-" + "a" * 32 + ".png\n", "fffffffff-" + "../" * 10 + "aa.png"],
)  # fmt: skip
def test_only_names_of_its_own_are_looked_up(place, clock, name):
    """No other file of the folder, and none outside of it."""
    store = store_at(place, clock)
    store.check()
    assert store.get(name) is None


def test_the_bound_holds_over_all_processes(place, clock):
    """What another replica keeps counts after ten seconds; who ends makes room; the wait is told."""
    first, second = store_at(place, clock), store_at(place, clock)
    second.check()
    first.put(b"x" * 600, PNG)
    with pytest.raises(StoreFull, match="is full") as full:
        first.put(b"x" * 401, PNG)
    assert LIFETIME_S - 1 <= full.value.retry_after_s <= LIFETIME_S
    clock.now_s += 11
    with pytest.raises(StoreFull):
        second.put(b"x" * 401, PNG)
    second.put(b"x" * 400, PNG)
    with pytest.raises(StoreFull):
        second.check()
    clock.now_s += LIFETIME_S + 2
    second.put(b"x" * 1000, PNG)


def test_other_files_of_the_folder_are_left_alone(tmp_path, clock):
    """They are neither counted nor removed nor served."""
    (tmp_path / "notes.txt").write_bytes(b"x" * 5000)
    store = store_at(str(tmp_path), clock)
    store.put(b"x", PNG)
    clock.now_s += 1000
    store.check()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert store.get("notes.txt") is None


class Objects(MemoryFileSystem):
    """A bucket, which has no folders: a name that no object begins with cannot be listed."""

    protocol = "objects"

    def makedirs(self, path, exist_ok=False):
        """Do nothing, as s3fs and gcsfs do below a bucket."""


def test_a_bucket_keeps_images_from_the_first_on(clock):
    """Nothing is there to be listed before the first image, nor after the last one has ended."""
    fsspec.register_implementation("objects", Objects, clobber=True)
    store = store_at("objects://bucket/kept", clock)
    for _ in range(2):
        store.check()
        name = store.put(b"image", PNG)
        assert store.get(name).body == b"image"
        clock.now_s += LIFETIME_S + 2
        store.check()  # which removes it
        clock.now_s += 11


def test_a_folder_that_somebody_removed_is_made_again(tmp_path, clock):
    """The images are gone, and later ones are kept without a restart."""
    store = store_at(str(tmp_path / "kept"), clock)
    store.put(b"image", PNG)
    shutil.rmtree(tmp_path / "kept")
    clock.now_s += 11
    store.check()
    assert store.get(store.put(b"again", PNG)).body == b"again"


class FullDisk(MemoryFileSystem):
    """Lists, and has no room."""

    protocol = "fulldisk"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "/secret/path")


def test_a_store_that_cannot_write_says_so_in_one_sentence(tmp_path, clock):
    """A full disk, a read-only file system, a file where the folder should be; nothing of the path is told."""
    fsspec.register_implementation("fulldisk", FullDisk, clobber=True)
    (tmp_path / "file").write_bytes(b"")
    for place, why in (
        ("fulldisk://kept", "cannot keep an image: No space left on device"),
        (
            "/sys/kernel/plait-kept",
            "cannot open its folder: (Read-only file system|Operation not permitted|Permission denied)",
        ),
        (str(tmp_path / "file" / "kept"), "cannot open its folder: Not a directory"),
    ):
        with pytest.raises(StoreFailed, match=f"^the store of results {why}; ask for b64_json$") as failed:
            store_at(place, clock).put(b"image", PNG)
        assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({}, "give a folder or a url"),
        ({"folder": "/a", "url": "memory://b"}, "give a folder or a url"),
        ({"url": "gopher://host/kept"}, "cannot be opened: Protocol not known: gopher"),
        ({"url": "/no/scheme"}, "cannot be opened"),
        ({"folder": "/a", "max_bytes": 0}, "greater than or equal to 1"),
        ({"folder": "/a", "lifetime_s": 0}, "greater than or equal to 1"),
        ({"folder": "/a", "public_url": "example.org"}, "should match pattern"),
    ],
)
def test_a_configuration_that_leads_nowhere_is_refused(section, message):
    """Before the server starts."""
    with pytest.raises(ValidationError, match=message):
        ResultsSection.model_validate(section)


def test_a_relative_folder_is_that_of_its_file():
    """As everywhere in plait.yaml."""
    section = ResultsSection.model_validate({"folder": "kept"}, context={"folder": Path("/srv/plait")})
    assert section.folder == Path("/srv/plait/kept")
