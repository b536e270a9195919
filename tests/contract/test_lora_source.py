"""The contract of `LoraSource`, for every implementation. A new source is one more entry of `SOURCES`."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from plait_serving.diffusion.errors import NotFound
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.remote import RemoteEntry, RemoteSource
from plait_serving.diffusion.lora.source import FolderSource, LoraSource
from plait_serving.diffusion.lora.targets import LoraTargets
from support.loras import TwoLayers, tiny_lora_file

NAMES = ("alpha", "be-ta.v2", "G4mma_x", "_花 (b)[c]#%+")


def files(folder: Path) -> Path:
    """A folder with a file for every name."""
    for seed, name in enumerate(NAMES):
        tiny_lora_file(folder, name, seed=seed)
    return folder


def folder_source(tmp_path: Path) -> LoraSource:
    """A folder of files."""
    return FolderSource(files(tmp_path / "loras"))


def remote_source(tmp_path: Path) -> LoraSource:
    """A store behind an fsspec URL."""
    store = files(tmp_path / "store")
    entries = {}
    for name in NAMES:
        content = (store / f"{name}.safetensors").read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        entries[name] = RemoteEntry(path=f"{name}.safetensors", sha256=sha256, nbytes=len(content))
    return RemoteSource(store.as_uri(), entries, cache_folder=tmp_path / "cache")


SOURCES = (folder_source, remote_source)


@pytest.fixture(params=SOURCES, ids=lambda build: build.__name__)
def source(request: pytest.FixtureRequest, tmp_path: Path):
    """Each source with `NAMES` in it; closing it again does nothing."""
    made: LoraSource = request.param(tmp_path)
    yield made
    made.close()
    made.close()


def test_names_entries_and_files_agree(source):
    """Names are sorted; each has an entry of that name and, whenever it is fetched, a LoRA of the announced size, with
    a content of its own."""
    targets = LoraTargets.of({"unet": TwoLayers()})
    assert list(source.names()) == sorted(NAMES)
    assert source.names() == source.names()
    contents, stamps = set(), set()
    for name in NAMES:
        entry, path = source.find(name), source.fetch(name)
        assert source.find(name) == entry
        assert (entry.name, entry.nbytes) == (name, path.stat().st_size)
        assert parse(name, path, targets).name == name
        assert source.fetch(name).read_bytes() == path.read_bytes()
        contents.add(path.read_bytes())
        stamps.add(entry.stamp)
    assert len(contents) == len(stamps) == len(NAMES)


NO_NAMES = (
    "nobody", "", ".", "..", "../alpha", "./alpha", "alpha/", "/etc/passwd", "alpha.safetensors", "ALPHA",
    "a" * 65, "alpha\n", "alpha\0", "al pha", "file:///etc/passwd", "%2e%2e", "älpha", "*", "-alpha", "..alpha",
)  # fmt: skip


def test_what_is_no_name_is_not_found(source):
    """Paths, URLs, patterns and other spellings find nothing, and fetching them is `NotFound`."""
    for name in NO_NAMES:
        assert source.find(name) is None, name
        with pytest.raises(NotFound) as caught:
            source.fetch(name)
        assert caught.value.param == "loras"
