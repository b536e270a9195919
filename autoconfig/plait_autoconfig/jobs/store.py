"""The file of a job, which holds all of its state: the job itself, every measurement, and the workers.

`job.sqlite` in the job's folder is one SQLite database. Every change is one transaction: a process that is killed
leaves what was committed before, and nothing else. Documents are JSON; the view `trials` shows them as a table:

```
sqlite3 FOLDER/job.sqlite "select * from trials"
```

Beside it lie `job.yaml` (as the user wrote it, for people), `trials/0007/` (artefacts of measurement 7) and `logs/`
(output of the measuring processes).
"""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from plait_autoconfig.errors import JobBroken, JobRefused
from plait_autoconfig.jobs.records import Claim, JobFacts, Record
from plait_autoconfig.jobs.spec import JobSpec, changed_settings

_FILE, _EARLIER = "job.sqlite", "resolved.json"
_BUSY_S = 30.0  # transactions take milliseconds, on a slow disk under load more
LEASE_S = 60.0
"""For how long a worker that says nothing is taken to be alive."""

_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS job (id INTEGER PRIMARY KEY CHECK (id = 1), spec TEXT NOT NULL, facts TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS measurement (number INTEGER PRIMARY KEY, record TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS worker (name TEXT PRIMARY KEY, presence TEXT NOT NULL)",
    """CREATE VIEW IF NOT EXISTS trials AS SELECT
        number,
        json_extract(record, '$.claim.kind') AS kind,
        CASE WHEN json_extract(record, '$.measured') IS NOT NULL THEN 'finished'
            WHEN json_extract(record, '$.lost') != '' THEN 'lost' ELSE 'running' END AS status,
        json_extract(record, '$.claim.config') AS config,
        json_extract(record, '$.measured.outcome.metrics') AS metrics,
        json_extract(record, '$.measured.outcome.failure') AS failure,
        json_extract(record, '$.measured.duration_s') AS duration_s
    FROM measurement ORDER BY number""",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """The process of a worker, and when it said last that it works. `place`: the host, its boot and the namespace in
    which `pid` counts. `started`: in clock ticks since that boot, for a number that is used again.

    A worker that died is known at once where its process can be looked up; one that hangs, or works elsewhere, when it
    said nothing for `LEASE_S`. Times are in seconds since 1970.
    """

    place: str
    pid: int
    started: int
    seen_s: float

    @classmethod
    def own(cls, *, now_s: float) -> Self:
        """Return the presence of this process."""
        return cls(place=_place(), pid=os.getpid(), started=_started(os.getpid()) or 0, seen_s=now_s)

    def holds(self, *, now_s: float) -> bool:
        """Return whether the worker is alive and working."""
        gone = self.place == _place() and _started(self.pid) != self.started
        return not gone and now_s - self.seen_s < LEASE_S


@cache
def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot} {Path('/proc/self/ns/pid').readlink()}"


def _started(pid: int) -> int | None:
    """Return when a process started; None if there is none, or only what its parent has not asked for yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


_FACTS, _RECORD, _PRESENCE = TypeAdapter(JobFacts), TypeAdapter(Record), TypeAdapter(Presence)


class JobStore:
    """An open job. All methods may be called from several threads and processes at once; each raises `JobBroken` for a
    file that cannot be read or written."""

    def __init__(self, folder: Path, spec: JobSpec) -> None:
        self.folder, self.spec = folder, spec

    @classmethod
    def open_or_create(cls, folder: Path, spec: JobSpec, text: str = "") -> Self:
        """Resume the job in the folder, or create it. `text`: the job file, kept for people.

        Budget, confirmation and time limits may have changed since (`changed_settings`); then the new ones apply.
        Everything may change while nothing was measured, as in a job that was rejected for a typo. Raises
        `JobRefused` if anything else changed, `JobBroken` if the folder cannot be used.
        """
        with _translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _check_locks(folder)
        with _transaction(folder, mode="rwc") as db:
            before = _job(db, folder)
            changed = () if before is None else changed_settings(before, spec)
            if changed and any(record.status != "lost" for record in _records(db)):
                raise JobRefused(f"{folder} holds a job with other {', '.join(changed)}; choose another folder or name")
            if before is not None and changed and before.storage is not None:
                from plait_autoconfig.jobs.studies import forget_study

                forget_study(before.storage, before, folder)  # its directions and parameters were the old job's
            if changed or before is None:
                db.execute("DELETE FROM measurement")
                _write_job(db, spec, JobFacts())
            else:
                db.execute("UPDATE job SET spec = ?", (spec.model_dump_json(),))
            (folder / "job.yaml").write_text(text or spec.model_dump_json(indent=2), encoding="utf-8")
        store = cls(folder, spec)
        if store.records():
            store._try_to_copy()
        else:
            store._copy()
        return store

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open the job in a folder. Raises `JobRefused` if there is none, `JobBroken` if it cannot be read."""
        if holds_job(folder):
            path = folder / _FILE
            with _transaction(folder, mode="rw" if path.exists() and path.stat().st_size else "rwc") as db:
                spec = _job(db, folder)
            if spec is not None:
                return cls(folder, spec)
        raise JobRefused(f"there is no job in {folder}")

    # ---- measurements ------------------------------------------------------------------------------------------------

    def records(self) -> tuple[Record, ...]:
        """Return all measurements in the order in which they were claimed."""
        with _transaction(self.folder) as db:
            return _records(db)

    def claim(self, claim: Claim, *, seen: Sequence[Record]) -> Record | None:
        """Claim a measurement that was decided on when the job had the measurements `seen`. Return None, storing
        nothing, if it has others by now: another worker was quicker, and the decision is to be made again."""
        with _transaction(self.folder, write=True) as db:
            records = _records(db)
            if records != tuple(seen):
                return None
            record = Record(number=records[-1].number + 1 if records else 0, claim=claim)
            _write(db, record)
            return record

    def end(self, record: Record) -> bool:
        """Store how a measurement ended. Return False, storing nothing, if it was already declared lost, or the job was
        begun anew since it was claimed."""
        with _transaction(self.folder, write=True) as db:
            known = next((each for each in _records(db) if each.number == record.number), None)
            if known is None or known.status != "running" or known.claim.nonce != record.claim.nonce:
                return False
            _write(db, record)
        self._try_to_copy()
        return True

    def artefacts(self, number: int) -> Path:
        """Create and return the folder of a measurement."""
        folder = self.folder / "trials" / f"{number:04d}"
        with _translated(self.folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _copy(self) -> None:
        if self.spec.storage is not None:
            from plait_autoconfig.jobs.studies import copy_study

            copy_study(self.spec.storage, self.spec, self.folder, self.records())

    def _try_to_copy(self) -> None:
        """The next copy completes one that fails: a job does not end for it."""
        try:
            self._copy()
        except JobBroken as error:
            self.warn([f"the copy for Optuna's tools is behind: {error}"])

    # ---- workers -----------------------------------------------------------------------------------------------------

    def join(self, worker: str, *, now_s: float, alone: bool = False) -> None:
        """Say that this process works on the job, under this name; again at least every `LEASE_S`. `alone`: raises
        `JobBroken` while another worker is alive."""
        with _transaction(self.folder, write=True) as db:
            if alone and (others := _workers(db, now_s=now_s)):
                raise JobBroken(f"another process is tuning the live service of this job ({', '.join(others)})")
            own = _PRESENCE.dump_json(Presence.own(now_s=now_s)).decode()
            db.execute("INSERT OR REPLACE INTO worker VALUES (?, ?)", (worker, own))

    def leave(self, worker: str) -> None:
        """Say that this worker has ended."""
        with _transaction(self.folder, write=True) as db:
            db.execute("DELETE FROM worker WHERE name = ?", (worker,))

    def workers(self, *, now_s: float) -> tuple[str, ...]:
        """Return the workers that are alive, in order of their names."""
        with _transaction(self.folder) as db:
            return _workers(db, now_s=now_s)

    # ---- the job -----------------------------------------------------------------------------------------------------

    def facts(self) -> JobFacts:
        """Return what is known of the job besides its measurements."""
        with _transaction(self.folder) as db:
            return _facts(db)

    def note(self, **changes: Any) -> None:
        """Change fields of `JobFacts`. `cancelled` asks all workers to end: running measurements are abandoned, and a
        live service is restored."""
        with _transaction(self.folder, write=True) as db:
            _write_facts(db, replace(_facts(db), **changes))

    def warn(self, sentences: Sequence[str]) -> None:
        """Add warnings, each only once."""
        with _transaction(self.folder, write=True) as db:
            facts = _facts(db)
            _write_facts(db, replace(facts, warnings=tuple(dict.fromkeys((*facts.warnings, *sentences)))))


def holds_job(folder: Path) -> bool:
    """Return whether there is a job in the folder, also of an earlier version."""
    return any((folder / name).is_file() for name in (_FILE, _EARLIER))


# ---- SQL -------------------------------------------------------------------------------------------------------------


@contextmanager
def _transaction(folder: Path, *, write: bool = False, mode: str = "rw") -> Iterator[sqlite3.Connection]:
    """Commit what the block does, or nothing if it raises. A connection each: they cross neither threads nor forks."""
    where = f"{(folder / _FILE).absolute().as_uri()}?mode={mode}"
    with _translated(folder), closing(sqlite3.connect(where, uri=True, timeout=_BUSY_S, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE" if write or mode == "rwc" else "BEGIN")
        yield db
        db.execute("COMMIT")


def _job(db: sqlite3.Connection, folder: Path) -> JobSpec | None:
    """Return the job in the file, which is made first of what an earlier version left in the folder, if need be."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'trials'").fetchone() is None:
        for statement in _SCHEMA:
            db.execute(statement)
        if (folder / _EARLIER).is_file():
            from plait_autoconfig.jobs.studies import earlier_job

            spec, facts, records = earlier_job(folder)
            _write_job(db, spec, facts)
            for record in records:
                _write(db, record)
    row = db.execute("SELECT spec FROM job").fetchone()
    return None if row is None else JobSpec.model_validate_json(row[0])


def _write_job(db: sqlite3.Connection, spec: JobSpec, facts: JobFacts) -> None:
    content = (spec.model_dump_json(), _FACTS.dump_json(facts).decode())
    db.execute("INSERT OR REPLACE INTO job VALUES (1, ?, ?)", content)


def _facts(db: sqlite3.Connection) -> JobFacts:
    return _FACTS.validate_json(db.execute("SELECT facts FROM job").fetchone()[0])


def _write_facts(db: sqlite3.Connection, facts: JobFacts) -> None:
    db.execute("UPDATE job SET facts = ?", (_FACTS.dump_json(facts).decode(),))


def _records(db: sqlite3.Connection) -> tuple[Record, ...]:
    return tuple(_record(text) for (text,) in db.execute("SELECT record FROM measurement ORDER BY number"))


def _workers(db: sqlite3.Connection, *, now_s: float) -> tuple[str, ...]:
    rows = db.execute("SELECT name, presence FROM worker ORDER BY name")
    return tuple(name for name, text in rows if _PRESENCE.validate_json(text).holds(now_s=now_s))


@lru_cache(maxsize=4096)
def _record(text: str) -> Record:
    return _RECORD.validate_json(text)


def _write(db: sqlite3.Connection, record: Record) -> None:
    text = _RECORD.dump_json(record).decode()
    db.execute("INSERT OR REPLACE INTO measurement VALUES (?, ?)", (record.number, text))


# ---- errors ----------------------------------------------------------------------------------------------------------


def _check_locks(folder: Path) -> None:
    """Raise `JobBroken` for a file system without locks, on which SQLite waits or lets two workers write at once."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        try:
            fcntl.lockf(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            msg = (
                f"the file system of {folder} refuses the locks that the job's file needs ({error.strerror}); "
                "choose a folder on another one, such as a local disk"
            )
            raise JobBroken(msg) from error


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Translate errors of SQLite, of the file system and of documents that we did not write into `JobBroken`."""
    try:
        yield
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        msg = f"{folder / _FILE} is damaged{f': {where}' if where else ''}; the job cannot be resumed"
        raise JobBroken(msg) from error
    except (sqlite3.Error, OSError) as error:
        raise JobBroken(f"the job in {folder} cannot be read or written: {error}") from error
