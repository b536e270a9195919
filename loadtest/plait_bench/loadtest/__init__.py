"""How much load one machine can generate: our generator and others against a server that does nothing.

Ours is an open loop, and counts only at a rate that it keeps on time; the peers are closed loops that send as fast as
replies come, which is easier. All share the machine's cores with the server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from plait_bench.benchmark import Benchmark, Reading, Say, Subject, Workload, readings, selected
from plait_bench.loadtest.generators import CONTENDERS, TRIAL_S, Generator
from plait_bench.loadtest.window import noop_server

_ROUND_S = 8.0


def benchmark(*, only: Sequence[str] = ()) -> Benchmark:
    """Make the benchmark. Raises `BenchError` for an unknown name."""
    return selected([NoopWorkload()], only)


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
