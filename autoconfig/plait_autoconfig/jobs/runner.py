"""The parent's side of the measuring process: starts it, enforces limits, and turns its death into an outcome."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from plait_autoconfig.errors import JobBroken, JobRefused
from plait_autoconfig.jobs.child import PARTING_S
from plait_autoconfig.jobs.exit_status import count_oom_kills, outcome_of_exit
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, MeasurerSource, Say
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, FailureKind, TrialOutcome, TuningSubject

_TICK_S = 0.2
_TAIL_BYTES = 4000
_FAILURES = {"memory": FailureKind.OUT_OF_MEMORY, "failed": FailureKind.CRASH}
_MEASURED, _SUBJECT = TypeAdapter(Measured), TypeAdapter(TuningSubject)

Tick = Callable[[], None]
"""Called about five times a second while waiting; an exception that it raises ends the wait and the child process."""


class ChildRunner:
    """Measures tasks in a process that is kept as long as it behaves, and replaced after it had to be killed. Used from
    one thread."""

    def __init__(
        self, source: MeasurerSource, spec: JobSpec, *, folder: Path, log: Path, held: tuple[int, ...] = ()
    ) -> None:
        """Create the runner. `held`: descriptors of locks that the process must also hold for as long as it lives."""
        self._source, self._spec, self._folder, self._log, self._held = source, spec, folder, log, held
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._unrestored = False

    def check(self, tick: Tick = lambda: None) -> TuningSubject:
        """Start a process, make the measurer in it and have it check the job as in `Measurer.check`. Raises
        `JobRefused`, or `JobBroken` if the measurer cannot be made."""
        self._spawn()
        source, spec = self._source, self._spec.model_dump_json()
        check = ("check", source.factory, self._folder, dict(source.arguments), spec)
        try:
            return _SUBJECT.validate_python(self._asked(check, self._spec.start_limit_s, tick=tick))
        except (_NoAnswer, JobRefused) as error:
            if self._process is not None:  # else it has ended by itself, or was killed
                self._end(grace_s=PARTING_S)
            if isinstance(error, JobRefused):
                raise
            raise JobBroken(f"the measurer could not be started: {error} (see {self._log})") from error

    def measure(self, task: MeasurementTask, say: Say, tick: Tick) -> Measured:
        """Measure for at most `task.limit_s` (plus the start of a fresh process), whatever the measurer does. Raises
        only what `check` does."""
        if self._process is None:
            self.check(tick)
        began = time.monotonic()
        try:
            measured = _MEASURED.validate_python(self._asked(("measure", task), task.limit_s, say, tick))
        except _NoAnswer as error:
            measured = Measured(outcome=error.outcome)
        return replace(measured, duration_s=time.monotonic() - began)

    def apply(self, config: Config) -> None:
        """Apply as in `Measurer.apply`. Raises `JobBroken`."""
        if self._process is None:
            self.check()
        try:
            self._asked(("apply", dict(config)), self._spec.start_limit_s)
        except _NoAnswer as error:
            raise JobBroken(f"the best configuration could not be applied: {error}") from error

    def finish(self) -> None:
        """Restore, close and end the process, if there is one; one that was killed while it changed a live service is
        started once more. Raises `JobBroken` if others use what was tuned, and it could not be restored."""
        if self._process is None and self._unrestored:
            self.check()
        try:
            if self._connection is not None and self._spec.target.is_shared:
                self._asked(("restore",), self._spec.start_limit_s)
        except _NoAnswer as error:
            msg = f"what was tuned has not got its own configuration back: {error}; run the job again to try it again"
            raise JobBroken(msg) from error
        finally:
            if self._connection is not None:
                self._end(grace_s=PARTING_S)
            self._unrestored = False

    def _spawn(self) -> None:
        ours, theirs = Pipe()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "plait_autoconfig.jobs", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), *self._held),
                start_new_session=True,  # Ctrl-C is the parent's, and the whole group can be killed
            )
        self._connection = ours

    def _asked(
        self, request: tuple[Any, ...], limit_s: float, say: Say = lambda _: None, tick: Tick = lambda: None
    ) -> Any:
        """Return the answer to a request (`child`). Raises `_NoAnswer` or `JobRefused`.

        An exception from `tick` ends the process in an orderly way, because it may have something to restore.
        """
        kills, log_from = count_oom_kills(), _size(self._log)
        try:
            until = time.monotonic() + limit_s
            next_tick = time.monotonic() + _TICK_S
            kind, answer = self._exchanged(request, 0.0)
            while True:
                if kind == "ok":
                    return answer
                if kind == "refused":
                    raise JobRefused(answer)
                if kind in _FAILURES:
                    raise _NoAnswer(TrialOutcome.failed(_FAILURES[kind], answer))
                if kind == "gone":
                    code, lines = self._end(grace_s=1.0), last_lines(self._log, log_from)
                    raise _NoAnswer(outcome_of_exit(code, last_lines=lines, oom_kills=count_oom_kills() - kills))
                if kind == "say":
                    say(answer)
                # However much the process has to say.
                if (now := time.monotonic()) >= until:
                    self._end(grace_s=0.0)
                    detail = f"still running after {limit_s:g} s, and ended by force"
                    raise _NoAnswer(TrialOutcome.failed(FailureKind.TIME_OUT, detail))
                if now >= next_tick:
                    tick()
                    next_tick = now + _TICK_S
                kind, answer = self._exchanged(None, min(next_tick, until) - now)
        except (_NoAnswer, JobRefused):
            raise
        except BaseException:
            self._end(grace_s=PARTING_S)
            raise

    def _exchanged(self, request: tuple[Any, ...] | None, timeout_s: float) -> tuple[str, Any]:
        """Send a request, if any, and return the next message of the process: empty if there is none in time, `gone`
        if it has ended."""
        assert self._connection is not None
        try:
            if request is not None:
                self._connection.send_bytes(to_json(request))
            kind, answer = from_json(self._connection.recv_bytes()) if self._connection.poll(timeout_s) else ("", None)
            return kind, answer
        except (EOFError, OSError):
            return "gone", None

    def _end(self, *, grace_s: float) -> int:
        """End the process and its whole group, after `grace_s` to restore and close. Return its exit code."""
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        self._process = self._connection = None
        connection.close()
        ended = _ends_within(process.pid, grace_s)
        self._unrestored = self._spec.target.is_shared and not ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        return process.wait()


class _NoAnswer(Exception):
    """The measurer raised an exception; or it had no answer in time and was killed, or ended by itself: then the
    process has ended. `outcome`: that of a trial."""

    def __init__(self, outcome: TrialOutcome) -> None:
        super().__init__(outcome.detail)
        self.outcome = outcome


def _ends_within(pid: int, limit_s: float) -> bool:
    """Wait for a child process to end, without reaping it."""
    until = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def last_lines(log: Path, start: int) -> str:
    """Return the last lines written to the log since `start` (bytes)."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, _size(log) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-3:])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
