"""The application that serves users, changed and changed back.

Before the first change its configuration is written to `<state root>/live/port-<port>.json`; the note is removed
when the original, or a configuration that is meant to stay, is in force. The next process after a kill finds the
note and rolls back. The note names the run of `plait serve`: a restarted server has its own configuration, and the
note is stale. `python -m plait.tuning.measure.live PORT` does so, in a process of its own, because a process can attach
to only one Ray. Whoever tunes the server holds `port-<port>.lock` beside it, from before he attaches until he ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
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
from plait.server.state import RunRecord, read_record, state_root, write_config
from plait.tuning.measure.application import Compose, RunningApplication, alone_with, compose_of

_ROLL_BACK_S = 120.0
_RECOVER_S = 180.0


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


class LiveServer(RunningApplication):
    """The server that `plait serve` runs on a port of this machine."""

    def __init__(self, compose: Compose, *, root: Path, port: int, wait_s: float = 0.0) -> None:
        """Attach to the server's Ray, and roll back what a killed tuner has left. Raises `StateError` if no such server
        runs, `LiveBusy` if another process is tuning it, also after `wait_s`."""
        self._path, self._folder = note_path(root, port), root / f"port-{port}"
        self._record = _record(root, port)
        self._lock = alone_with(f"the server on port {port}", self._path.with_suffix(".lock"), wait_s=wait_s)
        note = RollbackNote.read(self._path)
        self.original = running_config(root, port)
        if self._record.gcs_address is not None:
            prepare_environment(self._folder / "auth_token")
        address, run_id, config = self._record.gcs_address or self._record.address, self._record.run_id, self.original
        there = config.model_copy(update={"ray": config.ray.model_copy(update={"address": address})})
        marked = run_id if self._record.ray_folder is not None else None  # only our own Ray's processes are
        cluster = Cluster.attach(there, port=port)
        super().__init__(cluster, compose, app=APP, salt=run_id, run_id=marked, config=config)
        if note is not None:
            self._roll_back_to(note)

    def apply(self, config: PlaitConfig, *, limit_s: float) -> dict[str, Effect]:
        """Apply a configuration as `RunningApplication.apply` does; the original is on disk before anything changes."""
        if not self._path.exists():
            with told(file=self._path):
                RollbackNote(run_id=self._record.run_id, config=dump_config(self.original)).write(self._path)
        return super().apply(config, limit_s=limit_s)

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
            super().apply(self.original, limit_s=_ROLL_BACK_S)
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Disconnect from the service and leave it unchanged."""
        self.cluster.detach()
        self._lock.close()

    def _roll_back_to(self, note: RollbackNote) -> None:
        if note.run_id == self._record.run_id:
            self.original = parse_config(yaml.safe_load(note.config), source="the note", folder=Path.cwd())
            self.config = None  # nobody knows how far the killed tuner was
            super().apply(self.original, limit_s=_ROLL_BACK_S)
        self._path.unlink(missing_ok=True)


def running_config(root: Path, port: int) -> PlaitConfig:
    """Return the configuration that this user's `plait serve` on a port serves. Raises `StateError` if there is
    none."""
    _record(root, port)
    path = root / f"port-{port}" / "config.yaml"
    with told(OSError, yaml.YAMLError, about=f"{path} cannot be read", to=StateError):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
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


def recover_all(root: Path, *, say: Callable[[str], None]) -> None:
    """Roll back every service on this machine that a killed tuner left with a configuration that is not its own."""
    for port in left_notes(root):
        say(f"a tuner was killed while it tuned the server on port {port}; rolling back")
        command = [sys.executable, "-m", "plait.tuning.measure.live", str(port)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_RECOVER_S, check=False)
            problem = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        except subprocess.TimeoutExpired:
            problem = f"not done after {_RECOVER_S:g} s"
        say(
            f"rolling back port {port} failed: {problem}" if problem else f"port {port} has its own configuration again"
        )


def main(arguments: list[str]) -> int:
    """Run with the arguments `PORT [module:function]`; the second names the application factory, if it is not plait's
    own."""
    root, port = state_root(os.environ), int(arguments[0])
    compose = compose_of(*arguments[1:])
    try:
        LiveServer(compose, root=root, port=port).close()
    except StateError:
        note_path(root, port).unlink(missing_ok=True)  # the server is gone, and with it what there was to roll back
    except PlaitError as error:
        print(error, file=sys.stderr)  # noqa: T201  # for the process that started us
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
