"""The application that serves users, changed and changed back.

Before the first change its configuration is written to `<state root>/live/port-<port>.json`; the note is removed
when the original, or a configuration that is meant to stay, is in force. The next process after a kill finds the
note and rolls back. The note names the run of `plait serve`: a restarted server has its own configuration, and the
note is stale.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from plait.config import PlaitConfig, dump_config, parse_config
from plait.deployments import Effect
from plait.errors import PlaitError, StateError, told
from plait.server import processes
from plait.server.cluster import APP, Cluster
from plait.server.environment import prepare_environment
from plait.server.state import RunRecord, read_record, write_config
from plait.tuning.measure.application import Compose, RunningApplication

_ROLL_BACK_S = 120.0


class LiveBusy(PlaitError):
    """Another process is tuning this service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackNote:
    """The configuration to roll back to, and the process that changed it."""

    run_id: str
    config: str
    owner: processes.ProcessId = field(default_factory=processes.me)
    boot_id: str = field(default_factory=processes.boot_id)

    @classmethod
    def read(cls, path: Path) -> RollbackNote | None:
        """Read a note; None if there is none or it is unreadable, because then there is nothing known to roll back
        to."""
        try:
            return _NOTE.validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, path: Path) -> None:
        """Write the note atomically."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(_NOTE.dump_json(self))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @property
    def is_left(self) -> bool:
        """Whether its owner has ended without removing it."""
        return processes.has_ended(self.owner, self.boot_id)


_NOTE = TypeAdapter(RollbackNote)


def note_path(root: Path, port: int) -> Path:
    """Return the path of the note about the server on a port."""
    return root / "live" / f"port-{port}.json"


def left_notes(root: Path) -> list[int]:
    """Return the ports whose server was left with a configuration that is not its own."""
    notes = {path: RollbackNote.read(path) for path in sorted((root / "live").glob("port-*.json"))}
    return [int(path.stem.removeprefix("port-")) for path, note in notes.items() if note is not None and note.is_left]


class LiveServer:
    """The server that `plait serve` runs on a port of this machine."""

    def __init__(self, compose: Compose, *, root: Path, port: int) -> None:
        """Attach to the server's Ray, and roll back what a killed tuner has left. Raises `StateError` if no such server
        runs, `LiveBusy` if another process is tuning it."""
        self._path = note_path(root, port)
        note = RollbackNote.read(self._path)
        if note is not None and not note.is_left and note.owner.pid != os.getpid():
            raise LiveBusy(f"process {note.owner.pid} tunes the server on port {port} already")
        self._folder = root / f"port-{port}"
        self._record = _record(root, port)
        self.original = running_config(root, port)
        self.running = self._attach(compose, port)
        if note is not None:
            self._roll_back_to(note)

    def apply(self, config: PlaitConfig, *, limit_s: float) -> dict[str, Effect]:
        """Apply a configuration as `RunningApplication.apply` does; the original is on disk before anything changes."""
        if not self._path.exists():
            with told(file=self._path):
                RollbackNote(run_id=self._record.run_id, config=dump_config(self.original)).write(self._path)
        return self.running.apply(config, limit_s=limit_s)

    def keep(self, config: PlaitConfig) -> None:
        """Leave the service with this configuration permanently (until its next start, which reads plait.yaml). Raises
        `PlaitError` if it cannot be noted; the service then has its original one again."""
        self.apply(config, limit_s=_ROLL_BACK_S)
        with told(file=self._folder / "config.yaml"):
            try:
                write_config(self._folder, dump_config(config))
            except OSError:
                self.restore()
                raise
        self.original = config
        self._path.unlink(missing_ok=True)

    def restore(self) -> None:
        """Restore the original configuration. Idempotent. Raises what `RunningApplication.apply` raises; the note then
        stays."""
        if self._path.exists():
            self.running.apply(self.original, limit_s=_ROLL_BACK_S)
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Disconnect from the service and leave it unchanged."""
        self.running.cluster.detach()

    def _attach(self, compose: Compose, port: int) -> RunningApplication:
        if self._record.gcs_address is not None:
            prepare_environment(self._folder / "auth_token")
        address, run_id, config = self._record.gcs_address or self._record.address, self._record.run_id, self.original
        there = config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})
        cluster = Cluster.attach(there, port=port)
        marked = run_id if self._record.ray_folder is not None else None  # only our own Ray's processes are
        return RunningApplication(cluster, compose, app=APP, salt=run_id, run_id=marked, config=config)

    def _roll_back_to(self, note: RollbackNote) -> None:
        if note.run_id == self._record.run_id:
            self.original = parse_config(yaml.safe_load(note.config), source="the note", folder=Path.cwd())
            self.running.config = None  # nobody knows how far the killed tuner was
            self.running.apply(self.original, limit_s=_ROLL_BACK_S)
        self._path.unlink(missing_ok=True)


def running_config(root: Path, port: int) -> PlaitConfig:
    """Return the configuration that this user's `plait serve` on a port serves. Raises `StateError` if there is
    none."""
    _record(root, port)
    path = root / f"port-{port}" / "config.yaml"
    with told(OSError, yaml.YAMLError, about=f"{path} cannot be read", to=StateError):
        data = yaml.safe_load(path.read_text())
    return parse_config(data, source="the running configuration", folder=Path.cwd())


def _record(root: Path, port: int) -> RunRecord:
    """Return the record of the live run. Raises `StateError`."""
    folder, gone = root / f"port-{port}", f"no plait serve of this user runs on port {port}"
    record = read_record(folder)
    if record is None:
        raise StateError(f"{gone} (there is no {folder}/run.json)")
    if processes.has_ended(record.command, record.boot_id):
        raise StateError(f"{gone} any more")
    return record
