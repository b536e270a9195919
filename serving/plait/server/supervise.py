"""`plait serve` as a function: claim the port, clean up, start, wait until healthy, run until a signal, drain, stop.

The main thread does everything, because Ray's processes ask the kernel to be killed when the thread that started
them dies: that is the first safety net under kill -9; the state folder is the second.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self, TextIO

from plait.config import TUNING_WITHOUT_ADMIN, PlaitConfig, ServerSection, dump_config
from plait.deployments import Deployment, finishing
from plait.errors import PlaitError, ServeError
from plait.gpu_shares import placement_line, with_gpus
from plait.server import processes
from plait.server.cluster import APP, Cluster
from plait.server.leftovers import clean_up, clean_up_others, end_with_us, remove_ray_folder, remove_sockets
from plait.server.ports import check_port, free_port, health, hold_port, with_port
from plait.server.state import Keeping, PortState, RunRecord, scratch_root, state_root, write_config
from plait_serving.deployments import ENGINE
from plait_serving.deployments.process import LOG_PATH_VARIABLE

_log = logging.getLogger(__name__)

_WATCH_PERIOD_S = 1.0
_POLL_PERIOD_S = 0.1


class _Interrupted(BaseException):
    """A stop signal that arrived while the command was starting."""


class StopSignals:
    """A counter of SIGTERM, SIGINT and SIGHUP. During startup they interrupt; afterwards the loops check the count."""

    def __init__(self) -> None:
        self.count = 0
        self.interrupts = True

    def install(self) -> None:
        """Install the handlers (repeatedly: Ray replaces SIGTERM's when it connects and when it ends). A SIGHUP that is
        ignored stays so: `nohup` means that the server is to outlive its terminal."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002  # the signature is given
        self.count += 1
        if self.interrupts and self.count == 1:
            raise _Interrupted

    def hurry(self) -> bool:
        """Return whether a second signal asked to stop waiting."""
        return self.count > 1


def serve(
    config: PlaitConfig,
    *,
    compose: Callable[[PlaitConfig], Sequence[Deployment]],
    num_cpus: int,
) -> int:
    """Run the server until a signal. Return the exit code: 0 after an orderly stop. Raises `PlaitError`.

    `compose` makes the table of what is deployed. Nobody may have imported Ray before, as its environment is set here.
    """
    started_s = time.monotonic()
    port = free_port(config.server.host) if config.server.port == 0 else config.server.port
    root = state_root(os.environ)
    state = PortState.claim(root, port)
    with ExitStack() as held:
        held.callback(state.release)
        clean_up(state)
        clean_up_others(root)
        check_port(config.server.host, port)
        if (direct_port := config.server.direct_port) is not None and config.ray.is_local:  # else it is elsewhere
            check_port(config.server.host, direct_port, option="server.direct_port")
            held.enter_context(hold_port(config.server.host, direct_port))
        console = Console.divert(state.log_path)
        run = _Run(config, state, console, port=port, compose=compose)
        try:
            code = run.go(num_cpus, started_s)
        except PlaitError:
            console.restore()
            raise
    if run.killed_ray:
        leave(code)
    return code


class _Run:
    """One run of the server, from claiming the port to the end of the last process."""

    def __init__(
        self,
        config: PlaitConfig,
        state: PortState,
        console: Console,
        *,
        port: int,
        compose: Callable[[PlaitConfig], Sequence[Deployment]],
    ) -> None:
        self._config, self._state, self._console = config, state, console
        self._port, self._compose = port, compose
        self._keep = Keeping(state.folder, console.progress)
        self._rows: Sequence[Deployment] = ()
        self._signals = StopSignals()
        self._run_id = secrets.token_hex(8)
        self._ray_folder = scratch_root() / f"r-{self._run_id[:8]}" if config.ray.is_local else None
        self._cluster: Cluster | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._serving = False

    def go(self, num_cpus: int, started_s: float) -> int:
        """Run from start to stop and return the exit code, as `serve` does."""
        self._signals.install()
        os.environ[processes.RUN_ID_VARIABLE] = self._run_id
        os.environ[LOG_PATH_VARIABLE] = str(self._state.log_path)
        failure: BaseException | None = None
        try:
            self._start(num_cpus)
            seconds = time.monotonic() - started_s
            url = self._running.url
            line = start_line(self._config.public_names, self._refused(), url, seconds)
            self._console.data(url)
            self._console.progress(line)
            if (port := self._config.server.direct_port) is not None:
                self._console.progress(f"plait: without Serve's proxy at {with_port(url, port)}")
            self._watch()
        except _Interrupted:
            self._console.progress("plait: stopped while starting")
        except Exception as error:
            # Ray may turn an interrupt that hits its C++ parts into an error of its own.
            failure = None if self._signals.count else error
            if failure is None:
                _log.info("interrupted", exc_info=error)
        self._signals.interrupts = False
        self._signals.install()  # an interrupt may have come while Ray's were: its end would abort us
        left = self._stop(keep_logs=failure is not None)
        if failure is not None:
            _log.error("plait serve failed", exc_info=failure)
            sentence = " ".join(str(failure).split())[:400]
            raise ServeError(f"{sentence} (details: {self._state.log_path})") from failure
        if left:
            raise ServeError(f"{left} processes could not be ended; the next start tries again")
        return 0

    def _refused(self) -> Mapping[str, str]:
        """Return why models are not served, by name; none if the engine does not tell: its log has them too."""
        refused: Mapping[str, str] = {}
        try:
            if self._config.images is not None:
                refused = self._running.ask(ENGINE, "refused")
        except Exception:
            _log.exception("asking what is not served")
        return refused

    @property
    def killed_ray(self) -> bool:
        """Whether a Ray that this process was part of was killed instead of shut down, as an unfinished one is."""
        return self._ray_folder is not None and (self._cluster is None or self._signals.hurry())

    @property
    def _running(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    def _start(self, num_cpus: int) -> None:
        ray, folder = self._config.ray, self._ray_folder
        where = "a local Ray" if ray.is_local else f"Ray at {ray.address}"
        self._console.progress(f"plait: starting on {where}; Ray's log lines go to {self._state.log_path}")
        url, own = f"http://{self._config.server.host}:{self._port}", None if folder is None else str(folder)
        if folder is not None:
            self._warn(self._config.server)
        self._state.write(RunRecord(run_id=self._run_id, url=url, address=ray.address, ray_folder=own))
        signals = self._signals.install
        if folder is not None:
            self._watcher = end_with_us(self._state.folder / "run.json")
            token = self._state.token_path()
            self._cluster = Cluster.start_local(
                self._config, port=self._port, num_cpus=num_cpus, folder=folder, token_path=token, signals=signals
            )
            self._state.note(gcs_address=self._cluster.gcs_address)
        else:
            self._cluster = Cluster.attach(self._config, port=self._port, signals=signals)
        self._note_processes()
        self._cluster.claim(APP)
        self._config = with_gpus(self._config, nodes := self._cluster.nodes())
        write_config(self._state.folder, dump_config(self._config))
        server = self._config.server.behind(self._cluster.host)
        if folder is None:
            self._warn(server)
        if self._config.tuning.enabled and not server.has_admin:
            raise ServeError(f"Serve listens on {self._cluster.host}, and {TUNING_WITHOUT_ADMIN}")
        self._rows = self._compose(self._config.model_copy(update={"server": server}))
        if nodes is not None and nodes.total_milli:
            self._console.progress(f"plait: {placement_line(self._rows, nodes)}")
        self._cluster.deploy(self._rows, name=APP, salt=self._run_id)
        self._signals.interrupts = False
        self._wait_until_healthy(self._cluster)
        self._serving = True

    def _wait_until_healthy(self, cluster: Cluster) -> None:
        limit_s = self._config.server.ready_timeout_s
        reported: tuple[str, ...] = ()
        for state in cluster.states(limit_s, give_up=lambda: self._signals.count > 0, say=self._console.progress):
            if state.failure is not None:
                raise ServeError(state.failure)
            if state.waiting_for and state.waiting_for != reported:
                reported = state.waiting_for
                self._console.progress(f"plait: waiting for {', '.join(reported)}")
                self._note_processes()
            if state.running and health(cluster.url) is None:
                self._note_processes()
                return
        if self._signals.count:
            raise _Interrupted
        raise ServeError(f"not ready after {limit_s:g} s: {health(cluster.url)}")

    def _watch(self) -> None:
        """Watch until a signal arrives, keeping the list of processes fresh. Raises `ServeError` if Ray dies."""
        watched_s = time.monotonic()
        while not self._signals.count:
            time.sleep(_POLL_PERIOD_S)
            if time.monotonic() - watched_s >= _WATCH_PERIOD_S:
                watched_s = time.monotonic()
                self._note_processes()
                self._keep(self._state.rotate_log)
                if (lost := self._running.lost()) is not None:
                    raise ServeError(lost)

    def _stop(self, *, keep_logs: bool) -> int:
        """Drain, stop, and verify by process identity. Return how many processes survived (normally 0)."""
        hurry = self._signals.hurry
        known = self._note_processes()
        if self._cluster is not None:
            if self._serving and self._signals.count and not hurry():
                limit_s = self._config.server.drain_s
                self._console.progress(f"plait: finishing what runs (at most {limit_s:g} s; again to stop at once)")
                self._cluster.drain(finishing(self._rows), drain_s=limit_s, hurry=hurry)
            self._cluster.stop(hurry=hurry(), meanwhile=self._signals.install)
        left: tuple[processes.ProcessId, ...] = ()
        if self._ray_folder is not None:
            known |= processes.members(self._run_id, os.getpid())
            left = processes.end(known, grace_s=0.0 if hurry() else 2.0)
            remove_ray_folder(self._ray_folder, logs_to=self._state.folder / "ray-logs" if keep_logs else None)
            remove_sockets()
        if not left:
            if self._watcher is not None:
                self._watcher.wait()
            self._state.forget()
        self._console.progress("plait: stopped")
        return len(left)

    def _warn(self, server: ServerSection) -> None:
        for line in warning_lines(self._config, server):
            self._console.progress(line)

    def _note_processes(self) -> frozenset[processes.ProcessId]:
        """Return the current processes of the run and record them on disk. Empty if we only attached: none there are
        ours to end."""
        if self._ray_folder is None:
            return frozenset()
        found = processes.members(self._run_id, os.getpid())
        self._keep(lambda: self._state.note(processes=tuple(sorted(found))))
        return found


def warning_lines(config: PlaitConfig, server: ServerSection) -> Iterator[str]:
    """Yield what the owner of a server that listens as `server` says should know before it answers anybody."""
    results = None if config.images is None else config.images.results
    if results is not None and results.public_url is None and not server.answered_hosts:
        what = "any host name is answered to, and URLs of kept images begin with the one that a request says"
        yield f"plait: {what}; images.results.public_url names the server's"
    if server.is_open:
        why = f"{server.host} can be reached from outside and no API keys are set"
        yield f"plait: WARNING: {why}; the routes of admins are closed"


def start_line(names: Iterable[str], refused: Mapping[str, str], url: str, seconds: float) -> str:
    """Return the line that says what is served, and what is not and why (`refused`, by name)."""
    served = ", ".join(name for name in names if name not in refused)
    missing = "; ".join(f"{name} ({reason})" for name, reason in refused.items())
    return f"plait serves {served} at {url} (ready after {seconds:.0f} s){missing and f'; not loaded: {missing}'}"


def leave(code: int) -> NoReturn:
    """End this process without Ray's exit handlers, which would contact its dead processes and exit with code 1."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk is full
            stream.flush()
    logging.shutdown()
    os._exit(code)


class Console:
    """Our own output lines. After `divert`, whatever else writes to stdout or stderr (Ray, C++ libraries) goes to the
    log."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err

    @classmethod
    def divert(cls, log_path: Path) -> Self:
        """Redirect file descriptors 1 and 2 of this process, and of its children, to `log_path` (appended)."""
        sys.stdout.flush()
        sys.stderr.flush()
        # dup makes descriptors that children do not inherit: a pipe behind us closes when we end, not when they do.
        out, err = (os.fdopen(os.dup(fd), "w", buffering=1) for fd in (1, 2))
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        os.close(log_fd)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
        return cls(out, err)

    def progress(self, text: str) -> None:
        """Write one line to stderr; a closed stderr does not stop a server."""
        self._write(self._err, text)

    def data(self, text: str) -> None:
        """Write one line to stdout."""
        self._write(self._out, text)

    def restore(self) -> None:
        """Restore file descriptors 1 and 2, so that the command's last messages reach the caller."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # what libraries printed, and the disk is full
                stream.flush()
        for fd, stream in ((1, self._out), (2, self._err)):
            os.dup2(stream.fileno(), fd)

    @staticmethod
    def _write(stream: TextIO, text: str) -> None:
        try:
            stream.write(text + "\n")
            stream.flush()
        except (OSError, ValueError):
            logging.getLogger(__name__).info("console is closed: %s", text)
