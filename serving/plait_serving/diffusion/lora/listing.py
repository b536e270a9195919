"""Which LoRAs a folder holds, by name. Reads directories, no file.

A file is named by its stem; what diffusers or PEFT saved as a folder, by that folder. Of two with one name the one
nearer to the top counts, and at one depth the first by path. Links are followed as long as they stay in the folder.
Whether anything came or went since is seen from the times of the directories, without reading them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from plait_serving.diffusion.sources.file_kinds import SUFFIX, is_pickle, stem_of
from plait_serving.diffusion.sources.names import HIDDEN, NOWHERE, OUT, composed, shown, why_not

DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
"""The file name that diffusers' `save_lora_weights` uses in its folder."""
ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""The file names that PEFT's `save_pretrained` uses in its folder."""

_TICK_NS = 2_000_000_000  # the coarsest clock of a file system

_Mark = tuple[int, int, int, int] | None


def _mark(path: Path) -> _Mark:
    """Return what changes when something comes into a directory or leaves it, or when a link leads elsewhere."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a folder held when it was read. `files`: the weights by name, in name order; `places`: the paths on which
    they were found; `left_out`: what is not served, as paths below the folder, each with its reason; `root`: where the
    folder is; `marks`: how its directories and links were at `read_ns`."""

    files: Mapping[str, Path]
    places: Mapping[str, Path]
    left_out: Mapping[str, str]
    root: Path
    marks: Mapping[Path, _Mark]
    read_ns: int

    def is_current(self) -> bool:
        """Return whether the folder still holds the same, by a stat of every directory and link in it. False where one
        changed just before it was read: it may have changed once more at the same time of its clock."""
        changed_ns = max((max(mark[2:]) for mark in self.marks.values() if mark), default=0)
        is_settled = abs(self.read_ns - changed_ns) >= _TICK_NS
        return is_settled and all(_mark(path) == mark for path, mark in self.marks.items())

    def leads_to(self, name: str) -> Path | None:
        """Return the file of that name, if that is still where it was found: no link on the way was changed."""
        try:
            path, found = self.files[name], self.places[name].resolve(strict=True)
            return path if found == path.resolve(strict=True) and found.is_relative_to(self.root) else None
        except (KeyError, OSError, RuntimeError):
            return None


def list_loras(folder: Path) -> Listing:
    """Read a folder and all below it; an absent one is empty."""
    read_ns, marks = time.time_ns(), {folder: _mark(folder)}
    walk = _Walk(Path(os.path.realpath(folder)), marks)  # which takes links in a circle
    walk.run()
    files: dict[str, Path] = {}
    places: dict[str, str] = {}
    for _, place, name, file in sorted(walk.found):
        if name in files:
            walk.left_out[place] = f"{shown(places[name])} has its name"
        else:
            files[name], places[name] = file, place
    return Listing(
        files=MappingProxyType(dict(sorted(files.items()))),
        places={name: folder / place for name, place in places.items()},
        left_out=MappingProxyType(walk.left_out),
        root=walk.root,
        marks=marks,
        read_ns=read_ns,
    )


@dataclass(slots=True)
class _Walk:
    """Reads a folder level by level, and what links lead to only once, so that it ends.

    `found`: of each LoRA in how many sub-folders what it is named by lies, the path of its weights below the folder,
    its name and its file."""

    root: Path
    marks: dict[Path, _Mark]
    found: list[tuple[int, str, str, Path]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Fill `found` and `left_out`."""
        level, seen = [("", self.root)], set[Path]()
        while level:
            inner: list[tuple[str, Path]] = []
            for place, directory in level:
                is_new = directory not in seen
                seen.add(directory)
                inner += self._read(place, directory, is_new)
            level = inner

    def _read(self, place: str, directory: Path, is_new: bool) -> Iterator[tuple[str, Path]]:
        """Take the LoRAs of a directory, and yield those in it, each with its `place` (ends in a slash, or is empty).

        Of one that was read under another name, only whether it is a LoRA as a whole.
        """
        self.marks[directory] = _mark(directory)
        try:
            with os.scandir(directory) as entries:
                inside = {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}
        except OSError as error:
            if place:
                self.left_out[place] = f"cannot be read ({error.strerror})"
            return
        saved = [DIFFUSERS_FILE] if DIFFUSERS_FILE in inside else []
        saved += [ADAPTER_FILE] if {ADAPTER_FILE, CONFIG_FILE} <= inside.keys() else []
        is_saved = bool(place and saved)
        for name, entry in inside.items():
            if is_saved and name in saved:
                self._take(place, directory, entry, name_of=place.rstrip("/").rpartition("/")[2], up=1)
            elif is_new and (path := self._directory(place + name, entry)) is not None:
                yield f"{place}{name}/", path
            elif is_new and (stem := stem_of(name)) is not None and not _is(entry.is_dir):
                self._take(place, directory, entry, name_of=stem)
            elif is_new and is_pickle(name) and not is_saved:  # beside what was saved lies what training needs
                self.left_out[place + name] = f"only {SUFFIX} files are read"

    def _directory(self, place: str, entry: os.DirEntry[str]) -> Path | None:
        """Return where a directory is that is to be read."""
        if not _is(entry.is_dir):
            return None
        path = self._target(place, entry)
        if path is not None and entry.name.startswith("."):
            self.left_out[place] = HIDDEN
            return None
        return path

    def _take(self, place: str, directory: Path, entry: os.DirEntry[str], *, name_of: str, up: int = 0) -> None:
        """Take a file, named by its stem or, `up` 1, by its directory."""
        label = place + entry.name
        why = why_not(name_of)
        if why is not None:
            self.left_out[label] = why
            return
        target = self._target(label, entry)
        if target is None:
            return
        file = directory / entry.name if up else target  # a saved folder stays together, whatever its files link to
        config = file.parent / CONFIG_FILE
        if not _is(entry.is_file):
            self.left_out[label] = "not a file"
        elif file.name == ADAPTER_FILE and config.is_symlink() and self._followed(config)[1]:
            self.left_out[label] = f"its {CONFIG_FILE} is {OUT}, or nowhere"
        else:
            self.found.append((place.count("/") - up, label, composed(name_of), file))

    def _target(self, place: str, entry: os.DirEntry[str]) -> Path | None:
        """Return where an entry leads to, unless that is outside."""
        path, why = Path(entry.path), ""
        if entry.is_symlink():
            path, why = self._followed(path)
        if why:
            self.left_out[place] = why
        return None if why else path

    def _followed(self, link: Path) -> tuple[Path, str]:
        """Return where a link leads to, and why that is not read; nothing: it lies in the folder."""
        self.marks[link] = _mark(link)
        try:
            path = link.resolve(strict=True)
        except (OSError, RuntimeError):
            return link, NOWHERE
        return path, "" if path.is_relative_to(self.root) else OUT


def _is(test: Callable[[], bool]) -> bool:
    """Ask an entry what it is; of links in a circle, and where a file system does not say, it is nothing."""
    try:
        return test()
    except OSError:
        return False
