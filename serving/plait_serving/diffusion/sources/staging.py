"""Nothing half-written: files and folders appear under their name when they are complete, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plait_serving.diffusion.errors import ModelError

_GIB = 1 << 30


def require_new_folder(folder: Path) -> None:
    """Raise `ModelError` if `folder` exists and is not an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: exists and is not an empty folder")


def require_new_file(path: Path) -> None:
    """Raise `ModelError` if `path` exists."""
    if path.exists():
        raise ModelError(f"{path}: exists already")


@contextmanager
def new_folder(folder: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `folder` at the end, or goes if the block raises.

    Raises `ModelError` as `require_new_folder` does, and if the disk is too full.
    """
    require_new_folder(folder)
    with _staged(folder.absolute(), needed_bytes) as staged:
        staged.mkdir()
        yield staged


@contextmanager
def new_file(path: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yield the path of a file to write, which becomes `path` at the end, or goes if the block raises.

    Raises `ModelError` as `require_new_file` does, and if the disk is too full.
    """
    require_new_file(path)
    with _staged(path.absolute(), needed_bytes) as staged:
        yield staged


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock across threads and processes; blocks. The file stays, because removing it would race."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _staged(path: Path, needed_bytes: int) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}.partial")
    _remove(staged)  # in a container, one that was killed had the same process id
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise ModelError(f"{path}: needs {needed_bytes / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free there")
    try:
        yield staged
        staged.replace(path)
    except BaseException:
        _remove(staged)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
