"""Any service that answers over HTTP as what is tuned: a command starts it, or a hook changes one that runs."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from plait.errors import PlaitError, StateError, told
from plait.server import processes
from plait.server.leftovers import clean_up_others
from plait.server.ports import free_port
from plait.server.state import PortState, RunRecord
from plait.tuning.forms import as_argv, as_environment, as_file
from plait.tuning.measure.application import HAND_OVER_S, Applied, LiveBusy, NotReady, RefusedStart, alone_with
from plait.tuning.measure.checks import METRICS, check_metrics, scenarios_of
from plait.tuning.measure.cost import ReservedResources, known_costs
from plait.tuning.measure.quality import QUALITY_DRIFT
from plait_autoconfig.errors import JobRefused
from plait_autoconfig.jobs.runner import last_lines
from plait_autoconfig.jobs.spec import JobSpec, ServiceTarget
from plait_autoconfig.values import Config

_ASK_S = 0.1
_ANSWER_S = 5.0
_STOP_S = 10.0
"""How long a service may take to end after SIGTERM."""

_MAIN, _CHILD = "the service", "a process of it"


class ServiceSubject:
    """A service to be measured, with the attributes of `PlaitSubject`.

    What `command` starts carries the id of this run, so that its processes are counted, and ended: by the next trial,
    at the end, or, after kill -9, by the next command of plait that measures or serves.
    """

    guard = None
    may_end = frozenset({_CHILD})
    """Whatever the command starts itself."""
    features: Mapping[str, float] = {}

    def __init__(self, spec: JobSpec, target: ServiceTarget, *, root: Path, folder: Path) -> None:
        """Raises `JobRefused` before anything is started, also if another plait is on the port."""
        self.spec, self._target = spec, target
        self._program = target.command or target.apply
        self.prefix = urlsplit(target.address).path.rstrip("/")
        self.name, self.log_path = spec.name, folder / "service.log"
        self._written = folder / f"configuration-{os.getpid()}{Path(target.file or '').suffix}"  # one for each worker
        self._changed = folder / "changed"  # as long as the hook has set anything but the reference
        self._run_id = secrets.token_hex(8)
        closing = {"connection": "close"}  # it may answer one connection at a time
        client = httpx2.Client(timeout=_ANSWER_S, headers=closing, trust_env=False, follow_redirects=True)
        self._held = ExitStack()
        self._client = self._held.enter_context(client)
        self._held.callback(self._written.unlink, missing_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._config: Config | None = None
        self._state: PortState | None = None
        self._port = 0
        self.scenarios = scenarios_of(spec)
        self.unseen: frozenset[str] = frozenset()
        if target.apply:  # whose processes are not ours to see
            self.unseen = frozenset({"cpu_cores", "used_cost_per_hour"})
            self.unseen |= {"memory_gib"} if target.reserves.memory_gib is None else set()
        self._check()
        if target.apply:
            path = root / "live" / f"{sha256(target.address.encode()).hexdigest()[:16]}.lock"
            with told(LiveBusy, about="target.apply", to=JobRefused):
                self._held.enter_context(alone_with(target.address, path, wait_s=HAND_OVER_S))
        self.costs = known_costs(spec, self._reserved_by)
        clean_up_others(root)
        if any("{port}" in each for each in (target.ready or "", target.address, *target.command)):
            self._port = free_port("127.0.0.1")
        if target.command:
            self._state = self._claimed(root)
            if not self._problem():
                self.close()
                raise JobRefused("target.ready: something answers there although the service was not started yet")

    @property
    def running(self) -> ServiceSubject:
        """The service itself."""
        return self

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return "{0.scheme}://{0.netloc}".format(urlsplit(self._filled(self._target.address)))

    @property
    def reserved(self) -> ReservedResources:
        """What `reserves` says of the running configuration."""
        assert self._config is not None, "nothing runs"
        return self._reserved_by(self._config)

    def pids(self) -> dict[int, str]:
        """Return the processes of the command; none of a service that a hook changes."""
        if self._process is None:
            return {}
        main = _running(self._process)
        found = dict.fromkeys((each.pid for each in processes.members(self._run_id, main)), _CHILD)
        return found if main is None else found | {main: _MAIN}

    def apply(self, config: Config, *, limit_s: float) -> Applied:
        """Start the service with this configuration, or have the hook set it, unless it is in force. Raises
        `RefusedStart` or `NotReady`."""
        if config == self._config and (self._process is None or self._process.poll() is None):
            return Applied()
        self._config = None
        until_s = time.monotonic() + limit_s
        if self._target.apply:
            self._run_hook(config, limit_s=limit_s)
        else:
            self._end()
            self._process = self._start(config)
        while True:
            problem = self._problem()
            if self._process is not None and (code := self._process.poll()) is not None:
                raise RefusedStart(self._ended(code))  # even if somebody else answers there
            if not problem:
                self._config = config
                return Applied(restarted=("service",) if self._target.command else (), done="service ready")
            if time.monotonic() >= until_s:
                raise NotReady(f"not ready after {limit_s:.0f} s: {problem}")
            time.sleep(_ASK_S)

    def after_failure(self) -> None:
        """Trust nothing that runs: the next trial starts or sets it again."""
        self._config = None

    def keep(self, config: Config) -> None:
        """Do nothing: no job of this kind is live."""

    def restore(self) -> None:
        """Have the hook set the reference again, if it set anything else."""
        if self._changed.exists():
            self.apply(self.spec.default, limit_s=self.spec.start_limit_s)
            self._changed.unlink()

    def close(self) -> None:
        """End what the command started."""
        left = self._end()
        self._held.close()
        state, self._state = self._state, None
        if state is not None:
            if not left:
                state.forget()
                if [each.name for each in state.folder.iterdir()] == ["lock"]:
                    shutil.rmtree(state.folder, ignore_errors=True)
            state.release()

    # ---- before anything is started ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Refuse what cannot be measured. Raises `JobRefused`."""
        check_metrics(self.spec, METRICS - self.unseen - {QUALITY_DRIFT})
        program = self._program[0]
        if shutil.which(str(Path(self._target.folder, program)) if "/" in program else program) is None:
            field = "command" if self._target.command else "apply"
            raise JobRefused(f"target.{field}: there is no program {program!r}")
        first = {name: knob.value_at(0) for name, knob in self.spec.space.by_name.items()}
        with told(PlaitError, about="target", to=JobRefused):
            self._handed_over({**first, **self.spec.default})  # those that are inactive in the reference, too

    def _claimed(self, root: Path) -> PortState:
        port = self._port or urlsplit(self._filled(self._target.address)).port or 80
        with told(StateError, about="target.ready", to=JobRefused):
            state = PortState.claim(root, port)
        # Without a Ray, but with processes of ours to end.
        state.write(RunRecord(run_id=self._run_id, url=self.url, ray_folder=""))
        return state

    # ---- while trials run --------------------------------------------------------------------------------------------

    def _reserved_by(self, config: Config) -> ReservedResources:
        reserves = self.spec.reserved_by.items()
        return ReservedResources(**{name: each.value(config) for name, each in reserves if each is not None})

    def _handed_over(self, config: Config) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and the variables that a configuration adds; write the file that has it."""
        settings = self.spec.settings(config)
        if self._target.knobs == "argv":
            return list(as_argv(settings)), {}
        if self._target.knobs == "env":
            return [], as_environment(settings)
        self._written.write_text(as_file(Path(self._target.file or ""), settings), encoding="utf-8")
        return [], {}

    def _start(self, config: Config) -> subprocess.Popen[bytes]:
        """Start the command, or the hook, which outlives a measuring process that is killed. Raises `RefusedStart`."""
        more, variables = self._handed_over(config)
        command = [*map(self._filled, self._program), *more]
        if self._target.command:
            variables[processes.RUN_ID_VARIABLE] = self._run_id
        env, own_session = {**os.environ, **variables}, bool(self._target.apply)
        with told(OSError, about=command[0], to=RefusedStart), self.log_path.open("ab") as log:
            self._logged_bytes = log.tell()
            return subprocess.Popen(
                command, cwd=self._target.folder, env=env, start_new_session=own_session,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _run_hook(self, config: Config, *, limit_s: float) -> None:
        if config != self.spec.default:
            self._changed.touch()
        hook = self._start(config)
        try:
            code = hook.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(hook.pid, signal.SIGKILL)  # with what it waits for
            hook.wait()
            raise NotReady(f"target.apply has not ended after {limit_s:.0f} s") from None
        if code:
            raise RefusedStart(self._ended(code))

    def _ended(self, code: int) -> str:
        said = last_lines(self.log_path, self._logged_bytes)
        return f"{self._program[0]} ended with code {code}{f': {said}' if said else ''}"

    def _problem(self) -> str:
        """Return why the service takes no requests yet; empty if it does."""
        if self._target.ready is None:
            return ""
        url = self._filled(self._target.ready)
        try:
            answer = self._client.get(url)
        except httpx2.HTTPError as error:
            return f"{url}: {error}"
        return "" if answer.is_success else f"{url} answers {answer.status_code}"

    def _end(self) -> tuple[processes.ProcessId, ...]:
        """End the processes of the command, and return those that survived."""
        process, self._process = self._process, None
        if process is None:
            return ()
        main = _running(process)
        own = None if main is None else processes.identify(main)
        found = processes.members(self._run_id, main) | ({own} if own else set())
        left = processes.end(found, grace_s=_STOP_S)
        process.poll()
        return left

    def _filled(self, text: str) -> str:
        return text.replace("{port}", str(self._port)).replace("{file}", str(self._written))


def _running(process: subprocess.Popen[bytes]) -> int | None:
    """Return the number of a process that has not ended: that of one which has may be another's by now."""
    return process.pid if process.poll() is None else None
