"""The updates applied to a package, in order, kept inside its folder: a starting worker applies them.

::

    PACKAGE/updates/
        applied.json         {"format": 1, "versions": ["2", "3"]}, from the package's own version on
        2/  3/               the updates
        .lock                held while one is published

applied.json is replaced atomically, after the update that it names is there and on disk: a crash at any moment
leaves the old list or the new one. A folder that it does not name was never published.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from plait_disagg.package.manifest import Name
from plait_disagg.refresh.errors import BadUpdate, NotPublished
from plait_disagg.refresh.update import FORMAT, MANIFEST, Format, bad_file, read_update_manifest

UPDATES = "updates"
_APPLIED = "applied.json"


class _Applied(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    format: Format
    versions: tuple[Name, ...]


class Journal:
    """The journal of the package at `folder`; it need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / UPDATES

    def versions(self) -> tuple[str, ...]:
        """Return the applied versions, oldest first, without the packaged one. Raises `BadUpdate` if the list is
        unreadable."""
        try:
            return _Applied.model_validate_json((self._folder / _APPLIED).read_bytes()).versions
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise BadUpdate(_APPLIED, str(error)) from error
        except ValidationError as error:
            raise bad_file(_APPLIED, error) from error

    def after(self, version: str) -> tuple[Path, ...]:
        """Return the folders of the updates after `version`, or all of them if `version` is not in the journal."""
        versions = self.versions()
        begin = versions.index(version) + 1 if version in versions else 0
        return tuple(self.path(one) for one in versions[begin:])

    def path(self, version: str) -> Path:
        """Return the folder of that update, whether or not it exists."""
        return self._folder / version

    def store(self, update: Path, version: str) -> Path:
        """Copy an update that `applied.json` does not name yet; it is on disk when this returns.

        Raises OSError, `BadUpdate`, with nothing left of the copy.
        """
        if update.resolve().parent == self._folder.resolve():
            raise BadUpdate(MANIFEST, f"{update} is where the package keeps what is published; move it elsewhere")
        target, draft = self.path(version), self._folder / f".{version}.partial"
        for leftover in (target, draft):
            shutil.rmtree(leftover, ignore_errors=True)
        draft.mkdir()
        try:
            for name in (MANIFEST, *read_update_manifest(update).files):
                shutil.copyfile(update / name, draft / name)
                _sync(draft / name)
            _sync(draft)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _sync(self._folder)
        return target

    def record(self, version: str) -> None:
        """Record that the stored update is applied from now on. Raises OSError."""
        applied = _Applied(format=FORMAT, versions=(*self.versions(), version))
        draft = self._folder / f".{_APPLIED}.partial"
        draft.write_text(applied.model_dump_json() + "\n", encoding="utf-8")
        _sync(draft)
        draft.replace(self._folder / _APPLIED)
        _sync(self._folder)

    def discard(self, version: str) -> None:
        """Delete an update that was stored but not recorded."""
        shutil.rmtree(self.path(version), ignore_errors=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Admit one publisher at a time. Raises `NotPublished` if another one is running, OSError."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise NotPublished("another update is being published; try again") from error
            yield


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
