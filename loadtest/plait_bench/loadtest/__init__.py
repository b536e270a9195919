"""How much load one machine can generate: our generator and others against a server that does nothing.

Ours is an open loop, and counts only at a rate that it keeps on time; the peers are closed loops without pauses, which
is easier: Locust's fast client with two processes, and wrk with two threads. All share the machine's cores with the
server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from plait_bench.benchmark import Reading, Say, Subject, Workload, cache_folder, readings, selected
from plait_bench.commands import PLAIT, environment
from plait_bench.errors import SystemFailed, SystemUnavailable
from plait_bench.loadtest.window import NoopServer, ThroughputWindow, measure, noop_server

TRIAL_S, _ROUND_S = 3.0, 8.0
LAG_LIMIT_MS = 5.0

_PROCESSES = 2
_FIRST_PER_S = 4000.0
_STEP = 1.05  # the rate is found to 5 %
_USERS = (16, 64, 256)
"""The numbers of concurrent callers to try; the best one is measured."""

_LOCUST = "locust==2.47.0"
_LOCUSTFILE = '''"""A user that asks without a pause."""

from locust import FastHttpUser, constant, task


class Asks(FastHttpUser):
    """See above."""

    wait_time = constant(0)

    @task
    def ask(self):
        """The one request."""
        self.client.get("/")
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorTrial:
    """One run: what the server counted, and whether the run is valid."""

    rate_per_s: float
    window: ThroughputWindow
    lag_p99_ms: float
    errors: int

    @property
    def is_valid(self) -> bool:
        """Whether the run was on time, without errors, and at the offered rate (Poisson counts scatter: within 2 %)."""
        return self.lag_p99_ms <= LAG_LIMIT_MS and self.errors == 0 and self.window.per_s >= 0.98 * self.rate_per_s


def try_rate(server: NoopServer, rate_per_s: float, *, seconds: float) -> GeneratorTrial:
    """Make one run with Poisson arrivals. Raises `SystemFailed`."""
    whole_s = seconds + 1.5  # the window ends before the load does
    command = [*PLAIT, "loadtest", "run", "--url", server.url, "--path", "/", "--method", "GET", "--json", "-"]
    command += ["--rate", f"{rate_per_s:.6g}", "--duration", str(whole_s), "--processes", str(_PROCESSES)]
    window, told = measure(command, server, settle_s=1.0, seconds=seconds, fine=(0, 1))  # 1: late by its own rules
    report = json.loads(told)
    lag_ms, errors = report["send_lag_ms"]["p99"], sum(report["errors"].values())
    return GeneratorTrial(rate_per_s=rate_per_s, window=window, lag_p99_ms=lag_ms, errors=errors)


def highest_rate(attempt: Callable[[float], GeneratorTrial]) -> float:
    """Find the highest rate whose run was valid: doubled until two runs are not, then lowered (`hold`). Raises
    `SystemFailed` if none is."""
    rate_per_s = _FIRST_PER_S
    while any(attempt(rate_per_s).is_valid for _ in range(2)):
        rate_per_s *= 2
    return hold(attempt, rate_per_s).rate_per_s


def hold(attempt: Callable[[float], GeneratorTrial], rate_per_s: float) -> GeneratorTrial:
    """Return a valid run at that rate, or at the first lower one (5 % steps) that is valid. Raises `SystemFailed` if
    none is."""
    while not (trial := attempt(rate_per_s)).is_valid:
        rate_per_s /= _STEP
        if rate_per_s < _FIRST_PER_S / 2:
            raise SystemFailed("no rate held: this machine is too busy")
    return trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """A load generator: the names of its layouts, and what loads the server in one of them for so many seconds, which
    raises `SystemFailed`."""

    layouts: tuple[str, ...]
    take: Callable[[str, float], ThroughputWindow]


def plait(server: NoopServer) -> Generator:
    """Return ours, which holds the highest rate that it keeps; that is found once, now."""
    highest_per_s = highest_rate(partial(try_rate, server, seconds=TRIAL_S))
    return Generator(
        layouts=(f"{_PROCESSES} processes, open loop",),
        take=lambda _, seconds: hold(partial(try_rate, server, seconds=seconds), highest_per_s).window,
    )


def closed_loop(server: NoopServer, command: Callable[[int, int], list[str]], *, settle_s: float = 1.0) -> Generator:
    """Return a peer that asks as fast as replies come; `command(callers, seconds)` makes the command of a run."""
    callers = {f"{_PROCESSES} processes, {count} callers": count for count in _USERS}

    def take(layout: str, seconds: float) -> ThroughputWindow:
        made = command(callers[layout], int(seconds + settle_s + 2))
        return measure(made, server, settle_s=settle_s, seconds=seconds)[0]

    return Generator(layouts=tuple(callers), take=take)


def locust(server: NoopServer) -> Generator:
    """Return Locust in a virtual environment of its own. Raises `SystemUnavailable`."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    program = environment(folder / _LOCUST.replace("==", "-"), (_LOCUST,)).with_name("locust")
    file = folder / "locustfile.py"
    file.write_text(_LOCUSTFILE, encoding="utf-8")

    def command(callers: int, whole_s: int) -> list[str]:
        made = [str(program), "--locustfile", str(file), "--host", server.url, "--headless"]
        made += ["--users", str(callers), "--spawn-rate", str(callers), "--processes", str(_PROCESSES)]
        return [*made, "--run-time", f"{whole_s}s", "--only-summary", "--loglevel", "ERROR"]

    return closed_loop(server, command, settle_s=3.0)  # users start within the first second; then the rate is steady


def wrk(server: NoopServer) -> Generator:
    """Return the wrk on PATH (Debian: `apt install wrk`). Raises `SystemUnavailable`."""
    if (program := shutil.which("wrk")) is None:
        raise SystemUnavailable("wrk is not on PATH")
    options = [f"--threads={_PROCESSES}", server.url]
    return closed_loop(server, lambda callers, s: [program, f"--connections={callers}", f"--duration={s}s", *options])


CONTENDERS: Mapping[str, Callable[[NoopServer], Generator]] = {"plait": plait, "locust": locust, "wrk": wrk}


class NoopWorkload(Workload):
    """Requests to a server that does nothing, for as many seconds as a round has."""

    name = "noop"
    systems = tuple(CONTENDERS)
    deciding = "requests_per_s"
    metrics: Mapping[str, str] = {"requests_per_s": "requests/s", "cpu_s_per_1000": "s/1000"}

    def __init__(self) -> None:
        self._made: dict[str, Generator] = {}

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Run the server."""
        with noop_server() as self._server:
            yield

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the numbers of callers. Raises `SystemUnavailable` if the generator is not installed."""
        if system not in self._made:
            self._made[system] = CONTENDERS[system](self._server)
        return self._made[system].layouts

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the generator with that many callers."""
        generator = self._made[system]

        def taken(seconds: float) -> list[Reading]:
            window = generator.take(layout, seconds)
            return readings({"requests_per_s": window.per_s, "cpu_s_per_1000": window.cpu_s_per_1000})

        yield Subject(lambda _: taken(_ROUND_S), trial=lambda _: taken(TRIAL_S))


def benchmark(*, only: Sequence[str] = ()) -> tuple[Workload, ...]:
    """Make the benchmark. Raises `BenchError` for an unknown name."""
    return selected([NoopWorkload()], only)
