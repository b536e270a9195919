"""Tuning jobs submitted over HTTP: kept in a folder, run one after the other, across crashes of any process.

One at a time, because two jobs on one machine would disturb each other's measurements. A job is a folder of
`plait_autoconfig.jobs` with four files of ours: `server.yaml` (what it tunes, to its end, whatever the server is
changed to meanwhile), `ticket.json` (its owner; written last, so a folder that has one is complete), `cancel` (it was
cancelled) and `ended.json` (its outcome). A queue that is opened on the folder resumes where the last one died.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import TypeAdapter, ValidationError

from plait.tuning.service.job_view import (
    PROGRESS,
    JobQueueError,
    job_summary,
    read_json,
    unreadable_summary,
    write_json,
)
from plait.tuning.service.untrusted import check_untrusted
from plait_autoconfig.errors import JobRefused, TunerError
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.measurer import MeasurerSource
from plait_autoconfig.jobs.reporting import read_state, state_to_json
from plait_autoconfig.jobs.spec import JobSpec, TuningTarget
from plait_autoconfig.jobs.state import JobState
from plait_autoconfig.jobs.store import JobStore
from plait_loadtest.strict_yaml import NotYaml

MAX_WAITING = 20
MAX_DEATHS = 3
"""The number of deaths in a row, without a finished measurement in between, after which a job is given up."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
_KEPT_OPEN = 2 * MAX_WAITING
"""Jobs whose measurements are in memory, those that were looked at last: all that wait, and as many that ended."""
_POLL_S = 0.2
_FRESH_S = 0.5  # a state is worked out anew after so long


StartJob: TypeAlias = Callable[[Path, MeasurerSource], subprocess.Popen[bytes]]
"""Starts a process that works on the job in a folder until it is over; see `job_process.start_job`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQueueSettings:
    """`folder` of all jobs. `config`: the server's plait.yaml as text; jobs tune a clone of its application. `live`:
    whether a job may tune the server that users are on."""

    folder: Path
    config: str
    live: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRecord:
    id: str
    name: str
    tenant: str
    created_s: float


_TICKET = TypeAdapter(_JobRecord)


class TuningJobQueue:
    """The job queue. All methods but `work_once` return at once and may be called from several threads."""

    def __init__(self, settings: JobQueueSettings, start: StartJob) -> None:
        self._settings, self._start = settings, start
        self._lock = threading.RLock()
        self._store = lru_cache(_KEPT_OPEN)(lambda job_id: JobStore.open(settings.folder / job_id))
        self._state_at = lru_cache(_KEPT_OPEN)(lambda job_id, _: read_state(self._store(job_id), now_s=time.time()))
        self._running: str | None = None
        settings.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def configure(self, settings: JobQueueSettings) -> None:
        """Replace the settings for later jobs; the folder stays."""
        self._settings = settings

    def submit(self, text: str, tenant: str, token: str) -> dict[str, Any]:
        """Accept a job; it starts when those before it are over. `token`: the same token again means the same job.

        Raises `JobQueueError`.
        """
        spec = self._checked(text)
        job_id = f"{spec.name}-{token}"
        folder = self._settings.folder / job_id
        with self._lock:
            if (folder / "ticket.json").exists():
                return self._summary(self._ticket(job_id))
            if len(self._open_tickets()) >= MAX_WAITING:
                raise JobQueueError("too_many_jobs", f"{MAX_WAITING} jobs are waiting already")
            ticket = _JobRecord(id=job_id, name=spec.name, tenant=tenant, created_s=round(time.time(), 3))
            try:
                with _told("job_not_kept", "the job cannot be kept"):
                    folder.mkdir(exist_ok=True)
                    JobStore.open_or_create(folder, self._ours(spec, folder), text)
                    write_json(folder / "ticket.json", ticket)
            except JobQueueError:
                shutil.rmtree(folder, ignore_errors=True)  # there may be no room for it
                raise
        return self._summary(ticket)

    def jobs(self) -> list[dict[str, Any]]:
        """Return all jobs, newest first."""
        return [self._summary(ticket) for ticket in reversed(self._tickets())]

    def job(self, job_id: str) -> dict[str, Any]:
        """Return one job with its whole state. Raises `JobQueueError`."""
        ticket = self._ticket(job_id)
        return {**self._summary(ticket), "state": state_to_json(self._state(job_id))}

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancel a job and abort its running measurement. Raises `JobQueueError`, also if it is over."""
        ticket = self._ticket(job_id)
        with self._lock:
            if self._ended(job_id) is not None:
                raise JobQueueError("job_is_over", f"job {job_id} is over")
            with _told("job_not_kept", "the cancellation cannot be kept"):
                (self._settings.folder / job_id / "cancel").touch()
                if self._running != job_id:
                    self._end(ticket, "cancelled", "it was cancelled before it began")
        return self._summary(ticket)

    def since(self, job_id: str, known: int) -> dict[str, Any]:
        """Return what is new after the first `known` measurements: `{"job", "measured", "progress"}`. Raises
        `JobQueueError`."""
        ticket, state = self._ticket(job_id), self._state(job_id)
        rows = state_to_json(state)["rows"]
        over = [row for row in rows if row["status"] != "running"]
        progress = read_json(self._settings.folder / job_id / PROGRESS)
        return {"job": self._summary(ticket), "measured": over[known:], "progress": progress}

    def report(self, job_id: str) -> str:
        """Return the report as HTML, even if the job is not over. Raises `JobQueueError`."""
        from plait.tuning.job.local_run import report_of

        self._ticket(job_id)
        with _readable(job_id):
            return report_of(self._store(job_id))

    # ---- work --------------------------------------------------------------------------------------------------------

    def work_once(self) -> bool:
        """Run the oldest open job until it is over; return False if there is none."""
        with self._lock:
            tickets = self._open_tickets()
            if not tickets:
                return False
            ticket = tickets[0]
            if (self._settings.folder / ticket.id / "cancel").exists():
                self._end(ticket, "cancelled", "it was cancelled")
                return True
            self._running = ticket.id
        try:
            self._end(ticket, *self._worked_on(ticket))
        except Exception as error:  # the desk goes on with the next job, whatever this one did
            self._end(ticket, "failed", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._running = None
        return True

    def _worked_on(self, ticket: _JobRecord) -> tuple[str, str]:
        """Run a job until it is over, again if its process dies; return its last status and why."""
        from plait.tuning.job.local_run import FACTORY

        folder, store = self._settings.folder / ticket.id, self._store(ticket.id)
        while store.workers(now_s=time.time()):
            time.sleep(_POLL_S)  # of a desk that was killed: its worker is cleaning up
        state = read_state(store, now_s=time.time())
        if state.phase == "failed":  # its process said so, and we were killed before we could note it
            return state.phase, state.reason
        live = self._settings.live and bool(store.spec.target.live)
        source = MeasurerSource(factory=FACTORY, arguments={"live": live})
        code, deaths, measured = 0, 0, -1
        while deaths < MAX_DEATHS:
            code = self._run(folder, store, source)
            state = read_state(store, now_s=time.time())
            if (folder / "cancel").exists():
                return "cancelled", "it was cancelled"
            if state.phase in {"finished", "failed"}:
                return state.phase, state.reason
            before, measured = measured, sum(row.status == "finished" for row in state.rows)
            deaths = 1 if measured > before else deaths + 1
        why = f"its process ended {deaths} times without a measurement (exit code {code}); see logs/process.log"
        return "failed", why

    def _run(self, folder: Path, store: JobStore, source: MeasurerSource) -> int:
        work = self._start(folder, source)
        while (code := work.poll()) is None:
            with suppress(subprocess.TimeoutExpired):
                work.wait(_POLL_S)
            if (folder / "cancel").exists() and not store.facts().cancelled:
                store.note(cancelled=True)  # again and again: a worker that begins forgets older signs
        return code

    # ---- files -------------------------------------------------------------------------------------------------------

    def _checked(self, text: str) -> JobSpec:
        """Parse and check the job: refuse what an untrusted job may not name."""
        try:
            check_untrusted(text)
            spec = parse_job(text, folder=self._settings.folder)
        except (yaml.YAMLError, NotYaml, JobRefused) as error:
            said = " ".join(str(error).split())[:1000].removeprefix("the job: ")
            raise JobQueueError("invalid_job", said) from error
        if spec.target.live and not self._settings.live:
            why = "target.live: this server does not allow it (tuning.live)"
            raise JobQueueError("invalid_job", why, "target.live")
        return spec

    def _ours(self, spec: JobSpec, folder: Path) -> JobSpec:
        """Return the job with our own settings; the server's configuration goes into the job's folder."""
        config = folder / "server.yaml"
        config.write_text(self._settings.config, encoding="utf-8")
        assert isinstance(spec.target, TuningTarget), "`check_untrusted` lets no other pass"
        target = spec.target.model_copy(update={"config": str(config)})
        library = str(self._settings.folder / "library.journal")
        return spec.model_copy(update={"target": target, "library": library})

    def _tickets(self) -> list[_JobRecord]:
        """Return the tickets of all jobs, oldest first."""
        found = []
        for path in self._settings.folder.glob("*/ticket.json"):
            with suppress(OSError, ValidationError):  # not ours, or removed by hand in this moment
                found.append(_TICKET.validate_json(path.read_bytes()))
        return sorted(found, key=lambda ticket: (ticket.created_s, ticket.id))

    def _open_tickets(self) -> list[_JobRecord]:
        return [ticket for ticket in self._tickets() if self._ended(ticket.id) is None]

    def _ticket(self, job_id: str) -> _JobRecord:
        if _ID.fullmatch(job_id):
            with suppress(OSError, ValidationError):  # as in the list of all
                return _TICKET.validate_json((self._settings.folder / job_id / "ticket.json").read_bytes())
        raise JobQueueError("job_not_found", f"there is no tuning job {job_id[:130]!r}")

    def _ended(self, job_id: str) -> dict[str, Any] | None:
        return read_json(self._settings.folder / job_id / "ended.json")

    def _end(self, ticket: _JobRecord, status: str, reason: str) -> None:
        self._state_at.cache_clear()
        write_json(self._settings.folder / ticket.id / "ended.json", self._status_fields(ticket, status, reason))

    def _state(self, job_id: str) -> JobState:
        with self._lock, _readable(job_id):
            return self._state_at(job_id, int(time.time() / _FRESH_S))

    def _summary(self, ticket: _JobRecord) -> dict[str, Any]:
        status = "running" if self._running == ticket.id else "queued"
        return self._ended(ticket.id) or self._status_fields(ticket, status, "")

    def _status_fields(self, ticket: _JobRecord, status: str, reason: str) -> dict[str, Any]:
        try:
            return job_summary(asdict(ticket), status, reason, self._state(ticket.id))
        except JobQueueError as error:  # a folder that somebody damaged must not hide the others
            return unreadable_summary(asdict(ticket), str(error))


def _readable(job_id: str) -> AbstractContextManager[None]:
    return _told("job_unreadable", f"job {job_id} cannot be read")


@contextmanager
def _told(code: str, about: str) -> Iterator[None]:
    """Raise what is wrong with a job's folder as `JobQueueError`."""
    try:
        yield
    except (TunerError, OSError, UnicodeDecodeError) as error:
        raise JobQueueError(code, f"{about}: {' '.join(str(error).split())[:300]}") from error
