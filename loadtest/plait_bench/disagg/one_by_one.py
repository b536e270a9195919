"""One request after the other through Ray Serve's proxy: plait cut in two, and Serve's own composition of the halves.

Both servers run the whole time; they are asked in turn, a block of requests each, so that what disturbs one disturbs
the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from plait_bench.benchmark import Row
from plait_bench.disagg.bodies import write_bodies
from plait_bench.disagg.packages import packaged
from plait_bench.disagg.scores import compare
from plait_bench.disagg.serving import Served, serving
from plait_bench.runner import Result
from plait_bench.summary import pairwise_ratio

__all__ = ["NAME", "result"]

NAME = "serve-one-by-one"
"""The workload."""

OURS, PEER = "plait_split", "serve_composition"
_MODEL, _SCALE = "rm1", 0.125
_BLOCK = 100
"""Requests; their p99 is the second largest."""

_CONFIG = """
images: null
recommend: {{models: {{model: {{folder: {folder}, mode: split}}}}}}
"""


def result(*, rounds: int, say: Callable[[str], None]) -> Result:
    """Median and p99 latency of single requests of one candidate."""
    package = packaged(_MODEL, _SCALE, say=say)
    with tempfile.TemporaryDirectory(prefix="plait-bench-") as scratch, ExitStack() as stack:
        bodies = write_bodies(Path(scratch), package, _MODEL, 1, seed=1)
        contents = [path.read_bytes() for path in bodies]
        servers = {
            PEER: stack.enter_context(_composed(package, contents[0])),
            OURS: stack.enter_context(_plait(Path(scratch), package, contents[0])),
        }
        compare(servers, bodies)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
        for server in servers.values():
            _block(server, contents)
        for number in range(1, rounds + 1):
            for name, server in servers.items():
                taken[name].append(_block(server, contents))
                p50_ms, p99_ms = taken[name][-1]
                say(f"{NAME}: round {number} of {rounds}: {name} p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms")
    return _result(taken)


def _result(taken: dict[str, list[tuple[float, float]]]) -> Result:
    rows, ratios = [], {}
    for i, metric in enumerate(("latency_p50_ms", "latency_p99_ms")):
        values = {name: [pair[i] for pair in pairs] for name, pairs in taken.items()}
        rows += [Row.of(values[name], system=name, workload=NAME, metric=metric, unit="ms") for name in taken]
        ratios[f"{NAME}:{metric}:{OURS}/{PEER}"] = pairwise_ratio(values[OURS], values[PEER])
    return Result(rows=tuple(rows), ratios=ratios, left_out={})


def _block(server: Served, contents: Sequence[bytes]) -> tuple[float, float]:
    """Median and p99 in milliseconds."""
    taken_ms = []
    for number in range(_BLOCK):
        started_s = time.perf_counter()
        server.ask(contents[number % len(contents)])
        taken_ms.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(taken_ms), statistics.quantiles(taken_ms, n=100, method="inclusive")[98]


def _composed(package: Path, body: bytes) -> AbstractContextManager[Served]:
    return serving(("plait_bench.disagg.composed", str(package)), body, has_children=True)


@contextmanager
def _plait(folder: Path, package: Path, body: bytes) -> Iterator[Served]:
    """``plait serve`` with the package cut in two."""
    config = folder / "plait.yaml"
    config.write_text(_CONFIG.format(folder=package), encoding="utf-8")
    command = ("plait.cli.main", "serve", str(config), "--port", "0")
    environ = {"PLAIT_STATE_DIR": str(folder / "state")}
    with serving(command, body, environ=environ, has_children=True) as server:
        yield server
