"""From what a configuration calls a model to its folder: a folder, a checkpoint in one file, or a hub id.

A whole checkpoint in one file, as people download them, is converted into a folder of plait's cache, once. Its family
says what the file is, and how it becomes a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from os.path import expanduser
from pathlib import Path

import diffusers

from plait_kernels.executors import MODULES
from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.families import row_of_file
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.memory import gigabytes
from plait_serving.diffusion.settings import cache_folder
from plait_serving.diffusion.sources.file_kinds import stem_of, why_unread
from plait_serving.diffusion.sources.parts import INDEX, beside_file
from plait_serving.diffusion.sources.staging import locked, new_folder
from plait_serving.diffusion.weight_files import MAX_FILE_BYTES

_log = logging.getLogger(__name__)

_FORMAT = 2
"""Of what is written: raised by a change that folders of before do not have."""


def resolve_source(
    source: str | Path, revision: str | None = None, *, config: Path | None = None, cache: Path | None = None
) -> Path:
    """Return the folder that `source` names: a file is converted the first time, a hub id is downloaded. Raises
    `ModelError`.

    `config`: the folder that a file's configurations and tokenizers are in, if they are not the published ones; `cache`
    keeps what is converted.
    """
    place = Path(expanduser(source))
    if place.is_dir():
        return place
    if (why := why_unread(place.name)) is not None:
        raise ModelError(f"{source}: {why}")
    if stem_of(place.name) is not None:
        return _converted(place, config=config, cache=(cache or cache_folder()) / "converted")
    parts = str(source).split("/")
    if isinstance(source, Path) or len(parts) != 2 or not all(parts) or str(source).startswith((".", "~")):
        raise ModelError(f"{source}: no such folder")
    if revision is None:
        raise ModelError(f"{source}: not a folder here; as a hub id it needs a revision (a commit's 40 hex digits)")
    from plait_serving.diffusion.sources import hub

    return hub.fetch_from_hub(str(source), revision)


def _converted(path: Path, *, config: Path | None, cache: Path) -> Path:
    """Return a checkpoint's folder, which is written if `cache` does not have it. `config`: a folder with its
    configurations, if they are not the published ones. Raises `ModelError`."""
    kind, needed, write = conversion(path, config)
    folder = cache / f"{path.stem}-{_stamp(path, config)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f".{folder.name}.lock"):
            if not (folder / INDEX).is_file():
                started_s = time.perf_counter()
                _log.info("%s: %s, converting %s", path, kind, gigabytes(needed))
                with new_folder(folder, needed_bytes=needed) as staged, MODULES:
                    write(staged)
                _log.info("%s: converted into %s in %.1f s", path, folder, time.perf_counter() - started_s)
    except OSError as error:
        raise ModelError(f"{error.filename or cache}: {error.strerror or error}") from error
    return folder


def conversion(path: Path, config: Path | None) -> tuple[str, int, Callable[[Path], None]]:
    """Return what a checkpoint is, its size in bytes, and what writes it as a folder. Raises `ModelError` for one that
    is not served, as far as its header and its configuration tell."""
    try:
        header = inspect(path, max_bytes=MAX_FILE_BYTES)
        kind, row = row_of_file(header.tensors)
    except (LoraError, ModelError) as error:
        raise ModelError(f"{path}: {error.message}") from error
    assert row.convert is not None  # of whoever knows what the file is
    needed = sum(info.end - info.begin for info in header.tensors.values())
    return kind, needed, row.convert(path, header, config)


def _stamp(path: Path, config: Path | None) -> str:
    """Return what changes with the files, the configuration and the libraries."""
    seen = [path, beside_file(path), *(sorted(config.rglob("*")) if config is not None else ())]
    states = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in seen if each.is_file()]
    return hashlib.sha256(json.dumps([_FORMAT, diffusers.__version__, states]).encode()).hexdigest()[:16]
