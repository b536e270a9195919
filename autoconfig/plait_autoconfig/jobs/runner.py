"""The parent's side of the measuring process: starts it, enforces limits, and turns its death into an outcome."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter
from pydantic_core import to_json

from plait_autoconfig.errors import JobBroken, JobRefused
from plait_autoconfig.jobs.child import PARTING_S
from plait_autoconfig.jobs.exit_status import count_oom_kills, outcome_of_exit
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, MeasurerSource, Say, TuningSubject
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, FailureKind, TrialOutcome

_TICK_S = 0.2
_TAIL_BYTES = 4000
_MEASURED, _SUBJECT = TypeAdapter(Measured), TypeAdapter(TuningSubject)

Tick = Callable[[], None]
"""Called about five times a second while waiting; an exception that it raises ends the wait and the child process."""


class Runner(Protocol):
    """Measures tasks, whatever they do. Used from one thread."""

    def check(self, tick: Tick) -> TuningSubject:
        """Check the job as in `Measurer.check`. Raises `JobRefused`, or `JobBroken` if the measurer cannot be made."""

    def measure(self, task: MeasurementTask, say: Say, tick: Tick) -> Measured:
        """Measure for at most `task.limit_s` (plus the start of a fresh process). Raises only what `check` does."""

    def apply(self, config: Config) -> None:
        """Apply as in `Measurer.apply`. Raises `JobBroken`."""

    def finish(self) -> None:
        """Restore, close and end the process. May be called when there is none. Raises `JobBroken` if others use what
        was tuned, and it could not be restored."""


class ChildRunner:
    """A `Runner` whose process is kept as long as it behaves, and replaced after it had to be killed."""

    def __init__(
        self, source: MeasurerSource, spec: JobSpec, *, folder: Path, log: Path, held: tuple[int, ...] = ()
    ) -> None:
        """Create the runner. `held`: descriptors of locks that the process must also hold for as long as it lives."""
        self._source, self._spec, self._folder, self._log, self._held = source, spec, folder, log, held
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._received = b""
        self._unrestored = False

    def check(self, tick: Tick) -> TuningSubject:
        """Implement `Runner.check` in the child process."""
        return self._started(tick)

    def measure(self, task: MeasurementTask, say: Say, tick: Tick) -> Measured:
        """Implement `Runner.measure` in the child process."""
        if self._process is None:
            self._started(tick)
        kills, log_from, began = count_oom_kills(), _size(self._log), time.monotonic()
        try:
            answer = self._asked({"do": "measure", "task": task}, task.limit_s, say, tick)
            measured = _MEASURED.validate_python(answer)
        except _TooLate:
            detail = f"still running after {task.limit_s:g} s, and ended by force"
            measured = _failed(FailureKind.TIME_OUT, detail)
        except _Failed as error:
            kind = FailureKind.OUT_OF_MEMORY if error.memory else FailureKind.CRASH
            measured = _failed(kind, str(error))
        except _Gone as error:
            lines = last_lines(self._log, log_from)
            outcome = outcome_of_exit(error.return_code, last_lines=lines, oom_kills=count_oom_kills() - kills)
            measured = Measured(outcome=outcome)
        return replace(measured, duration_s=time.monotonic() - began)

    def apply(self, config: Config) -> None:
        """Implement `Runner.apply` in the child process."""
        if self._process is None:
            self._started(_no_tick)
        try:
            self._asked({"do": "apply", "config": dict(config)}, self._spec.start_limit_s, _no_say, _no_tick)
        except (_TooLate, _Failed, _Gone) as error:
            raise JobBroken(f"the best configuration could not be applied: {error}") from error

    def finish(self) -> None:
        """Implement `Runner.finish`; a process that was killed while it changed a live service is started once more."""
        if self._process is None and self._unrestored:
            self._started(_no_tick)
        try:
            if self._connection is not None and self._spec.target.is_shared:
                self._asked({"do": "restore"}, self._spec.start_limit_s, _no_say, _no_tick)
        except (_TooLate, _Failed, _Gone) as error:
            msg = f"what was tuned has not got its own configuration back: {error}; run the job again to try it again"
            raise JobBroken(msg) from error
        finally:
            if self._connection is not None:
                self._end(grace_s=PARTING_S)
            self._unrestored = False

    def _started(self, tick: Tick) -> TuningSubject:
        """Start a process, make the measurer in it and have it check the job."""
        self._spawn()
        make = {
            "do": "make",
            "factory": self._source.factory,
            "folder": str(self._folder),
            "arguments": dict(self._source.arguments),
        }
        log_from = _size(self._log)
        try:
            self._asked(make, self._spec.start_limit_s, _no_say, tick)
            check = {"do": "check", "spec": self._spec}
            return _SUBJECT.validate_python(self._asked(check, self._spec.start_limit_s, _no_say, tick))
        except (_TooLate, _Failed, _Gone) as error:
            lines = last_lines(self._log, log_from) if isinstance(error, _Gone) else ""
            self._end(grace_s=PARTING_S)
            msg = f"the measurer could not be started: {error}{f': {lines}' if lines else ''} (see {self._log})"
            raise JobBroken(msg) from error
        except JobRefused:
            self._end(grace_s=PARTING_S)
            raise

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
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
        self._connection, self._received = ours, b""

    def _asked(self, request: Mapping[str, Any], limit_s: float, say: Say, tick: Tick) -> Any:
        """Return the answer to a request. Raises `_TooLate`, `_Gone` (the process has then ended), `_Failed`,
        `JobRefused`.

        An exception from `tick` ends the process in an orderly way, because it may have something to restore.
        """
        try:
            self._send(request)
            until = time.monotonic() + limit_s
            next_tick = time.monotonic() + _TICK_S
            while True:
                message = self._message(min(next_tick, until) - time.monotonic())
                if message is not None and "say" not in message:
                    return _answer(message)
                if message is not None:
                    say(str(message["say"]))
                # However much the process has to say.
                if (now := time.monotonic()) >= until:
                    self._end(grace_s=0.0)
                    raise _TooLate(f"no answer within {limit_s:g} s")
                if now >= next_tick:
                    tick()
                    next_tick = now + _TICK_S
        except (_TooLate, _Failed, _Gone, JobRefused):
            raise
        except BaseException:
            self._end(grace_s=PARTING_S)
            raise

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._connection is not None
        try:
            self._connection.sendall(to_json(request) + b"\n")
        except OSError:
            raise _Gone(self._end(grace_s=0.0)) from None

    def _message(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line from the process; None if there is none in time."""
        assert self._connection is not None
        while b"\n" not in self._received:
            if not select.select([self._connection], [], [], max(0.0, timeout_s))[0]:
                return None
            try:
                more = self._connection.recv(65536)
            except OSError:
                more = b""
            if not more:
                raise _Gone(self._end(grace_s=1.0))
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

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


class _TooLate(Exception):
    """No answer in time; the process was killed."""


class _Gone(Exception):
    """The process ended by itself."""

    def __init__(self, return_code: int) -> None:
        super().__init__(f"the measuring process ended ({return_code})")
        self.return_code = return_code


class _Failed(Exception):
    """The measurer raised an exception. `memory`: for lack of memory."""

    def __init__(self, text: str, *, memory: bool) -> None:
        super().__init__(text)
        self.memory = memory


def _answer(message: Mapping[str, Any]) -> Any:
    if "ok" in message:
        return message["ok"]
    error = message["error"]
    if error["kind"] == "refused":
        raise JobRefused(error["text"])
    raise _Failed(error["text"], memory=error["kind"] == "memory")


def _ends_within(pid: int, limit_s: float) -> bool:
    """Wait for a child process to end, without reaping it."""
    until = time.monotonic() + limit_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= until:
            return False
        time.sleep(0.01)
    return True


def _failed(kind: FailureKind, detail: str) -> Measured:
    return Measured(outcome=TrialOutcome.failed(kind, detail))


def last_lines(log: Path, start: int, *, count: int = 3) -> str:
    """Return the last lines written to the log since `start` (bytes)."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, _size(log) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _no_say(_text: str) -> None:
    """Discard the text."""


def _no_tick() -> None:
    """Do nothing while waiting."""
