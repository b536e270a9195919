"""Sequential requests through Ray Serve's proxy: plait cut in two, and Serve's own composition of the halves.

Also measured: the same plait without the proxy, at its `server.direct_port`. All servers run the whole time. A round
is a block of requests.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from plait_bench.benchmark import Metric, Reading, ResultRow, Say, Subject, Workload
from plait_bench.disagg.load.bodies import write_bodies
from plait_bench.disagg.load.packages import packaged
from plait_bench.disagg.load.scores import compare
from plait_bench.disagg.systems.serving import BenchServer, free_port, serving

__all__ = ["ServeOneByOne"]

NAME = "serve-one-by-one"
OURS, PEER, DIRECT = "plait_split", "serve_composition", "plait_split_direct"
_MODEL, _SCALE = "rm1", 0.125
_BLOCK = 100
"""The number of requests per measurement; their p99 is the second largest value."""

_CONFIG = """
server: {{direct_port: {direct_port}}}
images: null
recommend: {{models: {{model: {{folder: {folder}, mode: split}}}}}}
"""


class ServeOneByOne(Workload):
    """Median and p99 latency of single requests with one candidate."""

    name = NAME
    systems = (PEER, OURS, DIRECT)
    ours = OURS
    pairs = ((OURS, PEER), (DIRECT, PEER))
    metrics: Mapping[str, Metric] = {
        "latency_p50_ms": Metric(unit="ms", better="lower"),
        "latency_p99_ms": Metric(unit="ms", better="lower"),
    }

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once; servers that were started end with the session."""
        self._package = packaged(_MODEL, _SCALE, say=say)
        self._servers: dict[str, BenchServer] = {}
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch, ExitStack() as self._stack:
            self._scratch = Path(scratch)
            self._bodies = write_bodies(self._scratch, self._package, _MODEL, 1, seed=1)
            self.contents = [path.read_bytes() for path in self._bodies]
            yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Start the system's server, unless it already runs for its other port."""
        if system not in self._servers:
            if system == PEER:
                self._servers[PEER] = self._stack.enter_context(_composed(self._package, self.contents[0]))
            else:
                both = _plait(self._scratch, self._package, self.contents[0])
                self._servers |= self._stack.enter_context(both)
        yield _ServedBlock(self._servers[system], self.contents)

    def check(self, subjects: Mapping[str, Subject]) -> Sequence[ResultRow]:
        """Compare the scores of the first bodies."""
        compare({name: self._servers[name] for name in subjects}, self._bodies)
        return ()


@dataclass(frozen=True)
class _ServedBlock:
    """Implements `Subject`."""

    server: BenchServer
    contents: Sequence[bytes]

    def warm_up(self) -> None:
        self.measure(0)

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        taken_ms = []
        for request in range(_BLOCK):
            started_s = time.perf_counter()
            self.server.ask(self.contents[request % len(self.contents)])
            taken_ms.append((time.perf_counter() - started_s) * 1e3)
        p99_ms = statistics.quantiles(taken_ms, n=100, method="inclusive")[98]
        return [
            Reading(metric="latency_p50_ms", value=statistics.median(taken_ms)),
            Reading(metric="latency_p99_ms", value=p99_ms),
        ]


def _composed(package: Path, body: bytes) -> AbstractContextManager[BenchServer]:
    return serving(("plait_bench.disagg.systems.composed", str(package)), body, has_children=True)


@contextmanager
def _plait(folder: Path, package: Path, body: bytes) -> Iterator[dict[str, BenchServer]]:
    """Run `plait serve` with the package cut in two; yield it at both of its ports."""
    config, direct_port = folder / "plait.yaml", free_port()
    config.write_text(_CONFIG.format(folder=package, direct_port=direct_port), encoding="utf-8")
    command = ("plait.cli.main", "serve", str(config), "--port", "0")
    environ = {"PLAIT_STATE_DIR": str(folder / "state")}
    with serving(command, body, environ=environ, has_children=True) as server, httpx2.Client() as client:
        yield {OURS: server, DIRECT: replace(server, url=f"http://127.0.0.1:{direct_port}", client=client)}
