"""The measuring process, from both ends of its pipe: `ChildRunner` starts it, enforces limits and turns its death into
an outcome; `main` is what runs in it. All that crosses is JSON.

A request is the name of a method and its arguments; those of `check`, the first one, say also how the measurer is made.
The reply is any number of `["say", text]` and one `["ok", result]`, `["refused", text]` or `["failed", outcome]`. When
the job's process has died (end of file), the measurer is interrupted, restores and closes; once that is done, or after
`PARTING_S`, the whole process group ends. Nothing outlives a `kill -9` of the job by more than that.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from plait_autoconfig.errors import JobBroken, JobError, JobRefused
from plait_autoconfig.jobs.measurer import Measured, MeasurementTask, Measurer, MeasurerSource, Say
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.values import Config, FailureKind, TrialOutcome, TuningSubject

PARTING_S = 30.0
_TICK_S = 0.2
_TAIL_BYTES, _LAST_CHARS = 1 << 20, 4000
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|bad_alloc|Cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE
)
_TASK, _MEASURED, _SUBJECT = TypeAdapter(MeasurementTask), TypeAdapter(Measured), TypeAdapter(TuningSubject)
_OUTCOME = TypeAdapter(TrialOutcome)

Tick = Callable[[], None]
"""Called about five times a second while waiting; an exception that it raises ends the wait and the child process."""


class ChildRunner:
    """Measures tasks in a process that is kept as long as it behaves, and replaced after it had to be killed. Used from
    one thread."""

    def __init__(self, source: MeasurerSource, spec: JobSpec, *, folder: Path, log: Path) -> None:
        self._source, self._spec, self._folder, self._log = source, spec, folder, log
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._unrestored = False

    def check(self, tick: Tick = lambda: None) -> TuningSubject:
        """Start a process, make the measurer in it and have it check the job as in `Measurer.check`. Raises
        `JobRefused`, or `JobBroken` if the measurer cannot be made."""
        try:
            self._spawn()
        except OSError as error:
            raise JobBroken(f"the measurer could not be started: {error}") from error
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
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is the parent's, and the whole group can be killed
            )
        self._connection = ours

    def _asked(
        self, request: tuple[Any, ...], limit_s: float, say: Say = lambda _: None, tick: Tick = lambda: None
    ) -> Any:
        """Return the answer to a request. Raises `_NoAnswer` or `JobRefused`.

        An exception from `tick` ends the process in an orderly way, because it may have something to restore.
        """
        kills, log_from = count_oom_kills(), size_of(self._log)
        try:
            until = time.monotonic() + limit_s
            next_tick = time.monotonic() + _TICK_S
            kind, answer = self._exchanged(request, 0.0)
            while True:
                if kind == "ok":
                    return answer
                if kind == "refused":
                    raise JobRefused(answer)
                if kind == "failed":
                    raise _NoAnswer(_OUTCOME.validate_python(answer))
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
        with suppress(ProcessLookupError):
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
    lines = said_since(log, start)[-_LAST_CHARS:].splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-3:])


def said_since(log: Path, start: int) -> str:
    """Return what was written to the log since `start` (bytes); only the end of very much."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, size_of(log) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def size_of(log: Path) -> int:
    """Return how many bytes the log has; 0 if there is none."""
    return log.stat().st_size if log.exists() else 0


# ---- why it ended ----------------------------------------------------------------------------------------------------


def mentions_out_of_memory(text: str) -> bool:
    """Return whether an error's text is one that Python, C++, PyTorch or CUDA gives for running out of memory."""
    return _OUT_OF_MEMORY.search(text) is not None


def outcome_of_exit(return_code: int, *, last_lines: str, oom_kills: int) -> TrialOutcome:
    """Return the outcome of a trial whose process ended. `return_code`: negative for a signal, as in `subprocess`.

    `oom_kills`: how often the kernel killed for memory on this machine during the trial (`count_oom_kills`).
    """
    said = f": {last_lines}" if last_lines else ""
    if return_code == -signal.SIGKILL and oom_kills > 0:
        detail = f"killed by the kernel, which ran out of memory{said}"
        return TrialOutcome.failed(FailureKind.OUT_OF_MEMORY, detail)
    if mentions_out_of_memory(last_lines):
        return TrialOutcome.failed(FailureKind.OUT_OF_MEMORY, last_lines)
    if return_code < 0:
        name = signal.Signals(-return_code).name if -return_code in set(signal.Signals) else f"signal {-return_code}"
        return TrialOutcome.failed(FailureKind.CRASH, f"the measuring process was ended by {name}{said}")
    return TrialOutcome.failed(FailureKind.CRASH, f"the measuring process ended with code {return_code}{said}")


def count_oom_kills(
    *, vmstat: Path = Path("/proc/vmstat"), memory_events: Path = Path("/sys/fs/cgroup/memory.events")
) -> int:
    """Return how many processes the kernel has killed for memory since boot; 0 where it does not report that.

    `vmstat` is the machine's, `memory_events` a container's.
    """
    return max(_counter(vmstat, "oom_kill"), _counter(memory_events, "oom_kill"))


def _counter(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for line in lines if (words := line.split())[:1] == [name]), 0)


# ---- the process -----------------------------------------------------------------------------------------------------


class _Child:
    """A measurer and the requests for it, in the main thread of its process."""

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        self._tell = tell
        self._measurer: Measurer | None = None

    def answer(self, what: str, *arguments: Any) -> None:
        """Carry out a request and report the result."""
        try:
            done = self._do(what, *arguments)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            self._tell(*_described(error))
        else:
            self._tell("ok", done)

    def part(self) -> None:
        """Restore and close, as far as that works."""
        if self._measurer is None:
            return
        for act in (self._measurer.restore, self._measurer.close):
            try:
                act()
            except Exception:
                traceback.print_exc()

    def _do(self, what: str, *arguments: Any) -> Any:
        if what == "check":
            factory, folder, given, spec = arguments
            self._measurer = resolve_name(factory)(folder=Path(folder), **given)
            arguments = (JobSpec.model_validate_json(spec),)
        if what == "measure":
            arguments = (_TASK.validate_python(*arguments), lambda text: self._tell("say", text))
        return getattr(self._measurer, what)(*arguments)


def _described(error: BaseException) -> tuple[str, str | TrialOutcome]:
    """Return refused, and why; or failed, and as what."""
    text = str(error) or type(error).__name__
    if isinstance(error, JobError):
        return "refused", text
    said = f"{type(error).__name__}: {text}"
    is_memory = isinstance(error, MemoryError) or mentions_out_of_memory(said)
    return "failed", TrialOutcome.failed(FailureKind.OUT_OF_MEMORY if is_memory else FailureKind.CRASH, said)


def _listen(connection: Connection, requests: queue.SimpleQueue[Any], main: int) -> None:
    """Pass requests on; at the end of file interrupt the main thread and give the group `PARTING_S` to end."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(from_json(connection.recv_bytes()))
    threading.Timer(PARTING_S, os.killpg, (os.getpgid(0), signal.SIGKILL)).start()
    signal.pthread_kill(main, signal.SIGINT)


def main(descriptor: int) -> None:
    """Answer requests until the other side of the pipe `descriptor` is closed."""
    connection = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    writing = threading.Lock()

    def tell(kind: str, what: Any) -> None:
        with writing:
            connection.send_bytes(to_json((kind, what)))

    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    child = _Child(tell)
    try:
        listener = threading.Thread(target=_listen, args=(connection, requests, threading.get_ident()), daemon=True)
        listener.start()
        while True:
            child.answer(*requests.get())
    except (KeyboardInterrupt, OSError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child.part()
    finally:
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # multiprocessing's sockets, which its own exit would remove
        sys.stdout.flush()
        sys.stderr.flush()
        os.killpg(os.getpgid(0), signal.SIGKILL)  # threads and processes that the measurer left, and this one
