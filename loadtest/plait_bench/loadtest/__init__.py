"""How much load one machine can make: our generator and others against a server that does nothing.

Ours is an open loop, and counts only at a rate that it keeps on time (see `ours`); the peers are closed loops that ask
as fast as they get replies, which is the easier thing to do. All share the machine's cores with the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from plait_bench.benchmark import ResultRow
from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.loadtest import ours, peers
from plait_bench.loadtest.window import NoopServer, ThroughputWindow, noop_server
from plait_bench.runner import Result
from plait_bench.summary import ValueSummary, pairwise_ratio

NAME = "loadtest"
OURS = "plait"
SYSTEMS = ("plait", "locust", "wrk")
WORKLOAD = "noop"
_TRIAL_S, _ROUND_S = 3.0, 8.0
_METRICS: Mapping[str, tuple[str, Callable[[ThroughputWindow], float]]] = {
    "requests_per_s": ("requests/s", lambda window: window.per_s),
    "cpu_s_per_1000": ("s/1000", lambda window: window.cpu_s_per_1000),
}

Say = Callable[[str], None]
Contender = tuple[str, Callable[[], ThroughputWindow]]
"""What its rows say of its settings, and one measured run."""


def measure(*, rounds: int, systems: Sequence[str], say: Say) -> Result:
    """Finds each system's best, then runs all in turn, ``rounds`` times. Raises `BenchError`."""
    unknown = sorted(set(systems) - set(SYSTEMS))
    if unknown:
        raise BenchError(f"there is no system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    wanted = [name for name in SYSTEMS if not systems or name in systems]
    left_out: dict[str, str] = {}
    with noop_server() as server:
        contenders: dict[str, Contender] = {}
        for name in wanted:
            try:
                contenders[name] = _PREPARE[name](server, say)
            except SystemUnavailable as reason:
                left_out[name] = str(reason)
                say(f"left out: {reason}")
        taken: dict[str, list[ThroughputWindow]] = {name: [] for name in contenders}
        for round_number in range(1, rounds + 1):
            for name, (_, take) in contenders.items():
                taken[name].append(take())
                window = taken[name][-1]
                say(
                    f"round {round_number} of {rounds}: {name} {window.per_s:.0f} requests/s, "
                    f"{window.cpu_s_per_1000:.4f} CPU s per 1,000"
                )
    layouts = {name: layout for name, (layout, _) in contenders.items()}
    return Result(rows=tuple(rows(taken, layouts)), ratios=ratios(taken), left_out=left_out)


def rows(taken: Mapping[str, Sequence[ThroughputWindow]], layouts: Mapping[str, str]) -> list[ResultRow]:
    """One for each system and metric."""
    return [
        ResultRow.of(
            [value(window) for window in windows],
            system=name, workload=WORKLOAD, metric=metric, unit=unit, layout=layouts[name],
        )
        for name, windows in taken.items()
        for metric, (unit, value) in _METRICS.items()
    ]  # fmt: skip


def ratios(taken: Mapping[str, Sequence[ThroughputWindow]]) -> dict[str, ValueSummary]:
    """Ours to each of the others, round by round."""
    return {
        f"{WORKLOAD}:{metric}:{OURS}/{name}": pairwise_ratio(
            [value(window) for window in taken[OURS]], [value(window) for window in windows]
        )
        for name, windows in taken.items()
        if name != OURS and OURS in taken
        for metric, (_, value) in _METRICS.items()
    }


def _prepare_ours(server: NoopServer, say: Say) -> Contender:
    rate_per_s = ours.highest_rate(partial(ours.try_rate, server, seconds=_TRIAL_S), say=say)
    attempt = partial(ours.try_rate, server, seconds=_ROUND_S)
    return f"{ours.PROCESSES} processes, open loop", lambda: ours.hold(attempt, rate_per_s, say=say).window


def _prepare_locust(server: NoopServer, say: Say) -> Contender:
    folder = peers.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    say(f"installing {peers.LOCUST} into {folder} (once)")
    take = partial(peers.locust, peers.install_locust(folder), server)
    users = _best(take, "locust", say)
    return f"{peers.PROCESSES} processes, {users} users", partial(take, users, seconds=_ROUND_S)


def _prepare_wrk(server: NoopServer, say: Say) -> Contender:
    take = partial(peers.wrk, peers.find_wrk(), server)
    connections = _best(take, "wrk", say)
    return f"{peers.PROCESSES} threads, {connections} connections", partial(take, connections, seconds=_ROUND_S)


def _best(take: Callable[..., ThroughputWindow], name: str, say: Say) -> int:
    """The number of callers with which a closed loop is fastest."""
    tried = {callers: take(callers, seconds=_TRIAL_S).per_s for callers in peers.USERS}
    say(f"{name}: " + ", ".join(f"{callers} callers {per_s:.0f}/s" for callers, per_s in tried.items()))
    return max(tried, key=lambda callers: tried[callers])


_PREPARE: Mapping[str, Callable[[NoopServer, Say], Contender]] = {
    "plait": _prepare_ours,
    "locust": _prepare_locust,
    "wrk": _prepare_wrk,
}
