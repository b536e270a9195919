"""The state that a running `plait serve` keeps on disk, to be alone on its port and to let the next start clean up.

`<state root>/port-<port>/` holds `lock` (held while the command lives; the kernel releases it even after kill -9),
`run.json` (the processes and folders of the run), `auth_token` (Ray's, mode 0600) and `serve.log`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from plait.errors import StateError
from plait.server.processes import ProcessId, boot_id, me

# Ray puts unix sockets under its temporary folder: 107 characters at most, of which it uses 65 itself.
_LONGEST_TEMP_FOLDER = 40

_VERSION = 1
"""Of run.json: raised by a change that an older plait must not misread."""

MAX_LOG_BYTES = 64 << 20
"""The log of a run takes at most about twice as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The process that runs on the port, and what it started. `ray_folder` is Ray's temporary folder; empty if
    it has none, None if only attached.

    `gcs_address`: where others can attach to that Ray; None until it runs.
    """

    run_id: str
    url: str
    address: str = "local"
    ray_folder: str | None = None
    gcs_address: str | None = None
    processes: tuple[ProcessId, ...] = ()
    boot_id: str = field(default_factory=boot_id)
    command: ProcessId = field(default_factory=me)

    def to_json(self) -> str:
        """Return the text of run.json."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of run.json; one without a version is of the first. Raises ValueError, KeyError or TypeError
        if it is not a record, `StateError` if a newer plait wrote it."""
        data: dict[str, Any] = json.loads(text)
        version = data.pop("version", 1)
        if version > _VERSION:
            raise StateError(
                f"a newer plait wrote the state of this port (version {version}, {_VERSION} is read): "
                "stop that server with its own plait, or choose another PLAIT_STATE_DIR"
            )
        command = ProcessId(**data.pop("command"))
        return cls(command=command, processes=tuple(ProcessId(**item) for item in data.pop("processes")), **data)


def state_root(environ: Mapping[str, str]) -> Path:
    """Return the first usable of $PLAIT_STATE_DIR, $XDG_STATE_HOME/plait, ~/.local/state/plait and a private /tmp
    folder.

    Raises `StateError` if an explicit choice cannot be used, or if none can.
    """
    if explicit := environ.get("PLAIT_STATE_DIR"):
        return _private_folder(Path(explicit).absolute())
    home = environ.get("HOME")
    homes = (environ.get("XDG_STATE_HOME"), f"{home}/.local/state" if home and Path(home).is_dir() else None)
    for base in filter(None, homes):
        try:
            return _private_folder(Path(base) / "plait")
        except StateError:
            continue  # an empty or read-only home is common in containers
    return scratch_root()


def scratch_root() -> Path:
    """Return this user's folder in the system's temporary folder; its path is short enough for unix sockets below
    it."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_TEMP_FOLDER - 20:
        base = Path("/tmp")  # noqa: S108  # sockets need a short path; ownership and mode are checked below
    return _private_folder(base / f"plait-{os.getuid()}")


class PortState:
    """The state folder of one port, locked by this process. Create with `claim`. `record`: what this run has
    written."""

    def __init__(self, folder: Path, lock_fd: int, previous: RunRecord | None) -> None:
        self.folder, self.previous, self._lock_fd = folder, previous, lock_fd
        self.record: RunRecord | None = None

    @classmethod
    def claim(cls, root: Path, port: int) -> Self:
        """Take the port's lock. Raises `StateError` if another plait holds it."""
        folder = _private_folder(root / f"port-{port}")
        previous = read_record(folder)
        lock_fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            who = f" (process {previous.command.pid})" if previous else ""
            raise StateError(f"plait already serves on port {port}{who}; stop it or choose another --port") from error
        return cls(folder, lock_fd, read_record(folder))

    @property
    def log_path(self) -> Path:
        """The log file for Ray's output and our own log."""
        return self.folder / "serve.log"

    def token_path(self) -> Path:
        """Return the file with Ray's authentication token, readable by this user alone; written on first use."""
        path = self.folder / "auth_token"
        with suppress(FileNotFoundError):
            found = path.lstat()
            is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
            if is_private and found.st_size:
                return path
            path.unlink()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
        return path

    def rotate_log(self, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Move the log's lines to `serve.log.1`, in place of those of before, if there are more than `max_bytes`.

        The file itself stays: every process of the run appends to it through a descriptor of its own. A line that is
        written between the copy and the cut is lost. Raises OSError.
        """
        path, old = self.log_path, self.log_path.with_name("serve.log.1")
        if not path.exists() or path.stat().st_size <= max_bytes:
            return
        try:
            shutil.copyfile(path, old)
            old.chmod(0o600)
        except OSError:
            old.unlink(missing_ok=True)
            raise
        os.truncate(path, 0)

    def write(self, record: RunRecord) -> None:
        """Write run.json atomically; do nothing if nothing changed. Raises OSError; what was written before stays."""
        if record == self.record:
            return
        replace_text(self.folder / "run.json", record.to_json())
        self.record = record

    def note(self, **changes: Any) -> None:
        """Write the record with other fields, if the run has one."""
        if self.record is not None:
            self.write(replace(self.record, **changes))

    def forget(self) -> None:
        """Delete the record: the run has ended and left nothing behind."""
        (self.folder / "run.json").unlink(missing_ok=True)
        self.record = self.previous = None

    def release(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class Keeping:
    """Calls what writes to a state folder. A full disk ends no server: one warning, and the next write is tried."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = folder, say
        self._cannot_write = False

    def __call__(self, write: Callable[[], None]) -> None:
        """Write, if that is possible."""
        try:
            write()
        except OSError as error:
            if not self._cannot_write:
                self._say(f"plait: WARNING: {self._folder} cannot be written: {error.strerror}")
            self._cannot_write = True


def write_config(folder: Path, text: str) -> None:
    """Store the configuration that the run of a port's folder serves, for tools that change its knobs meanwhile.
    Raises OSError; what was written before stays."""
    replace_text(folder / "config.yaml", text)


def replace_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Write a file in one step. Raises OSError; what was written before stays."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        temporary.touch(mode=0o600)  # nobody else reads what nobody else read before
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(mode)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def read_record(folder: Path) -> RunRecord | None:
    """Return the record of a port's folder, if there is one."""
    try:
        return RunRecord.from_json((folder / "run.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _private_folder(folder: Path) -> Path:
    """Create a folder that only this user can enter. Raises `StateError` if another user's folder is in the way."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StateError(f"{folder} belongs to somebody else")
        if found.st_mode & 0o022:
            raise StateError(f"others may write to {folder}; choose another with PLAIT_STATE_DIR")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise StateError(f"{folder} is not writable")
    except OSError as error:
        raise StateError(f"{folder}: {error.strerror}") from error
    return folder
