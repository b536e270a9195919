"""One request after the other through Ray Serve's proxy: plait cut in two, and Serve's own composition of the halves.

Beside them, the same plait without the proxy, at its ``server.direct_port``. All servers run the whole time; they are
asked in turn, a block of requests each, so that what disturbs one disturbs the others.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx2

from plait_bench.benchmark import ResultRow
from plait_bench.disagg.bodies import write_bodies
from plait_bench.disagg.packages import packaged
from plait_bench.disagg.scores import compare
from plait_bench.disagg.serving import BenchServer, free_port, serving
from plait_bench.runner import Result
from plait_bench.summary import pairwise_ratio

__all__ = ["NAME", "result"]

NAME = "serve-one-by-one"
"""The workload."""

OURS, PEER, DIRECT = "plait_split", "serve_composition", "plait_split_direct"
_MODEL, _SCALE = "rm1", 0.125
_BLOCK = 100
"""Requests; their p99 is the second largest."""

_CONFIG = """
server: {{direct_port: {direct_port}}}
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
            **stack.enter_context(_plait(Path(scratch), package, contents[0])),
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
        rows += [ResultRow.of(values[name], system=name, workload=NAME, metric=metric, unit="ms") for name in taken]
        for name in (OURS, DIRECT):
            ratios[f"{NAME}:{metric}:{name}/{PEER}"] = pairwise_ratio(values[name], values[PEER])
    return Result(rows=tuple(rows), ratios=ratios, left_out={})


def _block(server: BenchServer, contents: Sequence[bytes]) -> tuple[float, float]:
    """Median and p99 in milliseconds."""
    taken_ms = []
    for number in range(_BLOCK):
        started_s = time.perf_counter()
        server.ask(contents[number % len(contents)])
        taken_ms.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(taken_ms), statistics.quantiles(taken_ms, n=100, method="inclusive")[98]


def _composed(package: Path, body: bytes) -> AbstractContextManager[BenchServer]:
    return serving(("plait_bench.disagg.composed", str(package)), body, has_children=True)


@contextmanager
def _plait(folder: Path, package: Path, body: bytes) -> Iterator[dict[str, BenchServer]]:
    """``plait serve`` with the package cut in two, at both of its doors."""
    config, direct_port = folder / "plait.yaml", free_port()
    config.write_text(_CONFIG.format(folder=package, direct_port=direct_port), encoding="utf-8")
    command = ("plait.cli.main", "serve", str(config), "--port", "0")
    environ = {"PLAIT_STATE_DIR": str(folder / "state")}
    with serving(command, body, environ=environ, has_children=True) as server, httpx2.Client() as client:
        yield {OURS: server, DIRECT: replace(server, url=f"http://127.0.0.1:{direct_port}", client=client)}
