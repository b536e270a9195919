"""How much load one machine can generate: our generator and others against a server that does nothing.

Ours is an open loop, and counts only at a rate that it keeps on time (see `ours`); the peers are closed loops that
send as fast as replies come, which is easier. All share the machine's cores with the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from plait_bench.benchmark import Benchmark, Metric, Reading, Say, Subject, Workload, cache_folder, chosen, pairs_of
from plait_bench.loadtest import ours, peers
from plait_bench.loadtest.window import NoopServer, ThroughputWindow, noop_server

NAME = "loadtest"
OURS = "plait"
SYSTEMS = ("plait", "locust", "wrk")
WORKLOAD = "noop"
_TRIAL_S, _ROUND_S = 3.0, 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContender:
    """A generator: `take(layout, seconds)` is one run. `prepare`: called, at least once, before runs."""

    layouts: tuple[str, ...]
    take: Callable[[str, float], ThroughputWindow]
    prepare: Callable[[], None] = lambda: None


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark. Raises `BenchError` for an unknown name."""
    chosen(only, (WORKLOAD,), "workload")
    return Benchmark(name=NAME, workloads=(NoopWorkload(),))


class NoopWorkload(Workload):
    """Requests to a server that does nothing, for as many seconds as a round has."""

    name = WORKLOAD
    systems = SYSTEMS
    ours = OURS
    pairs = pairs_of(OURS, SYSTEMS)
    deciding = "requests_per_s"
    metrics: Mapping[str, Metric] = {
        "requests_per_s": Metric(unit="requests/s", better="higher"),
        "cpu_s_per_1000": Metric(unit="s/1000", better="lower"),
    }

    def __init__(self) -> None:
        self._made: dict[str, LoadContender] = {}

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Run the server."""
        with noop_server() as self._server:
            self._say = say
            yield

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names of the numbers of callers. Raises `SystemUnavailable` if the generator is not installed."""
        if system not in self._made:
            self._made[system] = CONTENDERS[system](self._server, self._say)
        return self._made[system].layouts

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open the generator with that many callers."""
        yield _Loading(self._made[system], layout)


@dataclass(frozen=True)
class _Loading:
    """Implements `Subject`."""

    contender: LoadContender
    layout: str

    def warm_up(self) -> None:
        self.contender.prepare()

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        window = self.contender.take(self.layout, _TRIAL_S if trial else _ROUND_S)
        return [
            Reading(metric="requests_per_s", value=window.per_s),
            Reading(metric="cpu_s_per_1000", value=window.cpu_s_per_1000),
        ]


def _ours(server: NoopServer, say: Say) -> LoadContender:
    known: list[float] = []

    def prepare() -> None:
        if not known:
            known.append(ours.highest_rate(partial(ours.try_rate, server, seconds=_TRIAL_S), say=say))

    def take(_: str, seconds: float) -> ThroughputWindow:
        return ours.hold(partial(ours.try_rate, server, seconds=seconds), known[0], say=say).window

    return LoadContender(layouts=(f"{ours.PROCESSES} processes, open loop",), take=take, prepare=prepare)


def _locust(server: NoopServer, say: Say) -> LoadContender:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing {peers.LOCUST} into {folder} (once)")
    take = partial(peers.locust, peers.install_locust(folder), server)
    return _closed_loop(take, f"{peers.PROCESSES} processes, {{}} users")


def _wrk(server: NoopServer, _: Say) -> LoadContender:
    return _closed_loop(partial(peers.wrk, peers.find_wrk(), server), f"{peers.PROCESSES} threads, {{}} connections")


def _closed_loop(take: Callable[..., ThroughputWindow], name: str) -> LoadContender:
    """Make a generator that offers a choice of callers."""
    callers = {name.format(count): count for count in peers.USERS}
    return LoadContender(layouts=tuple(callers), take=lambda layout, seconds: take(callers[layout], seconds=seconds))


CONTENDERS: Mapping[str, Callable[[NoopServer, Say], LoadContender]] = {"plait": _ours, "locust": _locust, "wrk": _wrk}
"""The factory of each system's generator. Raises `SystemUnavailable`."""
