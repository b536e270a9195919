"""Requests per second in time, over HTTP: plain PyTorch behind FastAPI, plait, and plait cut in two.

Goodput is the highest rate at which a server keeps its p99 within the limit; open loop, Poisson. The search and the
rule are the load generator's own (`plait_loadtest.capacity`): a rate holds when its run shows with 99 % confidence that
99 % of the answers are in time, which takes at least 459 requests (like MLPerf's early stopping); a rate that misses is
not retried; the rate that the search ends with is run once more, twice as long, and only that run's number counts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait_bench.benchmark import Reading, Say, Subject, Workload, cache_folder, cores, readings
from plait_bench.disagg import ours, peer
from plait_bench.disagg.peer import HEADERS, SEED, BenchServer, body, compare, serving
from plait_bench.errors import SystemFailed
from plait_disagg.models.configs import build, ids_per_bag, random_request
from plait_disagg.package.manifest import PackageError
from plait_disagg.package.read import Package, open_package
from plait_disagg.package.write import PackageOptions, write_package
from plait_disagg.values import RankRequest
from plait_loadtest.capacity import (
    RETRIED,
    CapacitySearch,
    ClassTarget,
    Measure,
    Observed,
    RateTrial,
    find_capacity,
    observe,
)
from plait_loadtest.measure import RunSummary
from plait_loadtest.scenario import (
    ClosedLoopCallers,
    GeneratorLimits,
    LoadTarget,
    PoissonArrivals,
    RawClass,
    Scenario,
    Slo,
)
from plait_loadtest.session import at_rate, run_scenario

METRIC = "goodput_per_s"

LIMIT_MS = 50.0
"""The default limit on a server's p99: production asks for tens of milliseconds (Prism), MLPerf's DLRM for 60."""

MAX_LOAD_S = 120.0
"""The max duration of a judged load, so a rate below 4 per second (459 requests in that time) cannot be shown to
hold."""

SCALES: Mapping[str, float] = {"rm1": 0.125, "rm2": 0.125, "criteo-kaggle": 0.25}
"""Scales that make half a gigabyte of tables each: far beyond every cache, and four of them fit on a small machine."""

_LIMITS_MS: Mapping[str, float] = {"rm2-512": 100.0}
"""Limits that differ from the default: one such request takes plain PyTorch tens of milliseconds on two cores, so at
50 ms it could hold no rate at all."""

_REQUESTS = 48
"""The number of distinct requests in a workload: enough that no cache holds the rows of all of them by chance."""

_BEGIN = 0.75
"""The first rate tried, as a share of a closed loop's throughput: open-loop arrivals come in bursts, and p99 misses
the limit well below that throughput."""

_CALLERS = 16
_PERCENTILE = 99.0
_MAX_SEARCH_FACTOR = 50.0
_LONGEST_S = 3600.0
"""A machine that is far slower than before is searched to its end."""
_CLOSED_S, _WARM_UP_S = 3.0, 0.3


def packaged(model: str, *, say: Say) -> Package:
    """Open a configuration's package in the cache, which is made if it is missing or no longer readable."""
    scale = SCALES[model]
    folder = cache_folder() / "disagg" / f"{model}-{scale:g}"
    try:
        return open_package(folder)
    except PackageError:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"packaging {model} with {scale:g} of its rows into {folder} (once)")
    module, inputs = build(model, rows_scale=scale, seed=SEED)
    write_package(folder, module, inputs, name="model", options=PackageOptions(ids_per_bag=ids_per_bag(model)))
    return open_package(folder)


def requests_of(package: Package, model: str, *, candidates: int, count: int, first_seed: int = 0) -> list[RankRequest]:
    """Make distinct requests with skewed ids (`models.configs.zipf`) for the configuration `model`."""
    manifest = package.manifest
    return [
        random_request(
            manifest.inputs, manifest.bounds, model=manifest.name, candidates=candidates,
            ids_per_bag=ids_per_bag(model), seed=first_seed + number,
        )
        for number in range(count)
    ]  # fmt: skip


def search_goodput(
    load: Measure, *, first_per_s: float, limit_ms: float, trial: bool, say: Callable[[str], None]
) -> RateTrial:
    """Search from a rate that should be about right; return the last run at the highest rate that held. A trial of a
    layout is coarser, by the same rule.

    Raises `SystemFailed` if next to no rate holds.
    """
    search = CapacitySearch(
        needs=(ClassTarget(percentile=_PERCENTILE, latency_ms=limit_ms, share=1.0),),
        first_per_s=first_per_s,
        min_per_s=first_per_s / _MAX_SEARCH_FACTOR,
        min_trial_s=2.0 if trial else 5.0,
        tolerance=0.2 if trial else 0.05,
        max_trials=10 if trial else 24,
        within_s=_LONGEST_S,
    )
    found = find_capacity(load, search, say=lambda line: say(f"  {line}"))
    if found.rate_per_s is None:
        raise SystemFailed(f"{found.statement}: p99 within {limit_ms:g} ms, from {first_per_s:.4g}/s down")
    held = [each for each in found.trials if each.rate_per_s == found.rate_per_s and each.verdict == "held"]
    return held[-1]


def load_on(url: str, bodies: Sequence[Path], *, limit_ms: float, seed: int, settle: Callable[[], object]) -> Measure:
    """Return what runs the load at a rate; every body is as likely as every other, each run's arrivals differ.

    `settle`: returns when the server has worked off what the last load left, which is not the next one's fault.

    Latency counts from the scheduled time, so what the generator does late, on cores that it shares with the server,
    counts too: alike for all systems.
    """
    scenario = _scenario(url, bodies, PoissonArrivals(rate_per_s=1.0), limit_ms=limit_ms)
    runs = 0

    def load(rate_per_s: float, duration_s: float) -> Observed:
        nonlocal runs
        runs += 1
        settle()
        at = at_rate(scenario, rate_per_s, min(duration_s, MAX_LOAD_S)).model_copy(update={"seed": seed + runs})
        return observed(run_scenario(at).summary)

    return load


def observed(summary: RunSummary) -> Observed:
    """Return what the search sees of a run: all bodies together, which are classes only because each is a file."""
    seen = observe(replace(summary, classes=(summary.total,)))
    return replace(seen, invalid=tuple(each for each in seen.invalid if each[0] not in RETRIED))


def _scenario(
    url: str, bodies: Sequence[Path], arrivals: PoissonArrivals | ClosedLoopCallers, *, limit_ms: float
) -> Scenario:
    kind = HEADERS["content-type"]
    headers = {name: value for name, value in HEADERS.items() if name != "content-type"}
    return Scenario(
        name="bench",
        target=LoadTarget(url=url, api="raw", path="/v2/models/model/infer"),
        mix=tuple(
            RawClass(name=path.stem, method="POST", body_file=path, content_type=kind, headers=headers)
            for path in bodies
        ),
        arrivals=arrivals,
        duration_s=_CLOSED_S,
        warm_up_s=_WARM_UP_S,
        seed=0,
        slo=Slo(latency_ms=limit_ms, percentile=_PERCENTILE),
        limits=GeneratorLimits(drain_s=3.0),
    )


class Goodput(Workload):
    """The goodput of all systems under requests of `candidates` for a configuration."""

    systems = ("plait", "pytorch", "plait_split")
    deciding = METRIC
    metrics: Mapping[str, str] = {METRIC: "requests/s"}

    def __init__(self, name: str, model: str, candidates: int) -> None:
        self.name, self.model, self.candidates = name, model, candidates
        self.limit_ms = _LIMITS_MS.get(self.name, LIMIT_MS)
        self.known_per_s: dict[tuple[str, str], float] = {}
        """By (system, layout): the rate that was held the last time, which is where the next search begins."""
        self._servers: dict[str, BenchServer] = {}

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Package the model once, and write the bodies."""
        self.say = say
        package = packaged(self.model, say=say)
        self._package = package.folder
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
            self.bodies = []
            for number, request in enumerate(
                requests_of(package, self.model, candidates=self.candidates, count=_REQUESTS, first_seed=_REQUESTS)
            ):
                self.bodies.append(Path(folder) / f"{self.name}-{number}.bin")
                self.bodies[-1].write_bytes(body(request))
            yield

    def layouts(self, system: str) -> Sequence[str]:
        """Return the names from `layouts_of`."""
        return list(layouts_of(self.model, system, self._package))

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Start the system's server."""
        with serving(layouts_of(self.model, system, self._package)[layout], self.bodies[0].read_bytes()) as server:
            self._servers[system] = server
            yield Subject(
                lambda number: self._searched(system, layout, number),
                warm_up=lambda: self._closed_loop(system, layout),
                trial=lambda number: self._searched(system, layout, number, trial=True),
            )

    def check(self, subjects: Mapping[str, Subject]) -> None:
        """Compare the scores of the first bodies."""
        servers = {name: self._servers[name] for name in subjects}
        compare(servers, {path.stem: path.read_bytes() for path in self.bodies[:4]})

    def _closed_loop(self, system: str, layout: str) -> None:
        """Warm up, which also gives a rate to start the search from."""
        arrivals = ClosedLoopCallers(concurrency=_CALLERS)
        scenario = _scenario(self._servers[system].url, self.bodies, arrivals, limit_ms=LIMIT_MS)
        closed_per_s = run_scenario(scenario).summary.total.achieved_per_s
        self.known_per_s.setdefault((system, layout), _BEGIN * closed_per_s)

    def _searched(self, system: str, layout: str, number: int, *, trial: bool = False) -> list[Reading]:
        """Search for the highest rate that holds; a trial in which none holds reads 0."""
        server, content = self._servers[system], self.bodies[0].read_bytes()
        load = load_on(
            server.url, self.bodies, limit_ms=self.limit_ms, seed=1000 * number, settle=lambda: server.ask(content)
        )
        first_per_s = self.known_per_s[system, layout]
        try:
            held = search_goodput(load, first_per_s=first_per_s, limit_ms=self.limit_ms, trial=trial, say=self.say)
        except SystemFailed:
            if not trial:
                raise
            return readings({METRIC: 0.0})
        self.known_per_s[system, layout] = held.rate_per_s
        remark = "" if held.purpose == "confirm" or trial else f"{layout}, not confirmed"
        return readings({METRIC: held.observed.goodput_per_s}, layout=remark)


def layouts_of(model: str, system: str, package: Path) -> dict[str, tuple[Any, ...]]:
    """Map the layouts to try to the function that serves in a process, and its arguments: as many threads as cores and
    one thread, HTTP in the model's process or in one of its own; for the split one thread for the CN and all cores for
    the HN, too."""
    counts = tuple(dict.fromkeys([1, cores()]))
    if system == "pytorch":
        return {
            f"{count} threads, {'inline' if inline else 'worker'}": (peer.serve, model, SCALES[model], count, inline)
            for count in counts
            for inline in (True, False)
        }
    if system == "plait":
        return {
            f"{count} threads{where}": (ours.serve, package, opened, count)
            for count in counts
            for where, opened in (("", ours.whole), (", model apart", ours.apart))
        }
    found = {f"{count} threads": (ours.serve, package, ours.split, count, (count,)) for count in counts}
    return found | {f"1+{count} threads": (ours.serve, package, ours.split, 1, (count,)) for count in counts[1:]}
