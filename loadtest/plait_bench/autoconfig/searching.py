"""The workloads: a round is a seed, in which every service of the suite is searched once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

from plait_bench.autoconfig import judged, llm_pilot, zero_shot
from plait_bench.autoconfig.contenders import LEARNERS, OURS, SYSTEMS, Maker
from plait_bench.autoconfig.play import Curve, ask_after_s, play
from plait_bench.autoconfig.tasks import Suite
from plait_bench.benchmark import Reading, ResultRow, Say, Subject, Workload, pairs_of

__all__ = ["Falcon", "LlmPilot", "Searching"]

_MANY_TRIALS, _MANY_SEEDS = 100, 3
_ZERO_SHOT_SEEDS = 1  # a nested selection takes a minute or two


class Searching(Workload):
    """A suite as a workload. `cold`: the same services without a library, if this suite's library misleads: then every
    designer is compared with its own searches there, and only those that a library changes take part."""

    ours = OURS
    compared = frozenset({"trials_to_5pct"})
    suite: Suite

    def __init__(self, name: str, load: Callable[[], Suite], *, cold: Searching | None = None) -> None:
        self.name, self._load = name, load
        self.systems = SYSTEMS if cold is None else LEARNERS
        self.pairs = pairs_of(OURS, self.systems)
        self.cold = cold
        self.played: dict[str, dict[int, list[Curve]]] = {}
        self._makers: dict[str, Maker] = {}
        self._say: Say = lambda _: None

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Load the suite. Raises `SystemUnavailable` without its data."""
        self._say = say
        self.suite = self._load()
        self.metrics = judged.units(self.suite)
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Make the factory of the designers with that name."""
        self._makers[system] = Maker(name=system, shared=self.suite.shared)
        yield _Designing(self, system, self._makers[system])

    def readings(self, system: str, seed: int, curves: Sequence[Curve]) -> list[Reading]:
        """Summarise the searches of one seed over the services."""
        found = [
            Reading(metric=metric, value=together([number(curve) for curve in curves]))
            for metric, (_, together, number) in judged.metrics_of(self.suite).items()
        ]
        if self.cold is not None and seed in self.cold.played.get(system, {}):
            without = self.cold.played[system][seed]
            extra = _to_5pct(curves) - _to_5pct(without)
            found.append(Reading(metric="extra_trials_to_5pct", value=extra))
        return found

    def conclude(self) -> Sequence[ResultRow]:
        """Compare the designers over services, and report how long learning from the library took."""
        took = [
            ResultRow(
                system=name, workload=self.name, metric="pretrain_s", unit="s", value=max(times), p20=min(times),
                p80=max(times), n=len(times), rounds=tuple(times),
            )
            for name, times in ((name, maker.pretrain_s) for name, maker in self._makers.items())
            if times
        ]  # fmt: skip
        compared = [*judged.ranks(self.suite, self.played), *judged.tests(self.suite, self.played, OURS)]
        return [*took, *judged.optima(self.suite), *compared]


class Falcon(Searching):
    """The Falcon suite; also times proposals after many trials."""

    def conclude(self) -> Sequence[ResultRow]:
        """Time proposals after many trials."""
        found = []
        for name in self.played:
            maker = Maker(name=name, shared=self.suite.shared)
            taken_ms = [
                1e3 * ask_after_s(maker, self.suite.tasks[0], seed=seed, trials=_MANY_TRIALS)
                for seed in range(_MANY_SEEDS)
            ]
            found.append(judged.row(name, self.name, "ask_ms_after_100", "ms", taken_ms))
        return [*super().conclude(), *found]


class LlmPilot(Searching):
    """The LLM-Pilot suite; also computes S/O scores of the publication: after three measured cells of each model, and
    with none."""

    def __init__(self, name: str, read: Callable[[], llm_pilot.PilotData]) -> None:
        super().__init__(name, lambda: llm_pilot.suite(self._data))
        self._read = read

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Read the published data. Raises `SystemUnavailable` without it."""
        self._data = self._read()
        with super().session(say):
            yield

    def readings(self, system: str, seed: int, curves: Sequence[Curve]) -> list[Reading]:
        """Add the score after three trials."""
        score = llm_pilot.score_of_regrets([curve.regret_at(min(3, self.suite.trials)) for curve in curves])
        return [*super().readings(system, seed, curves), Reading(metric="so_score_3_trials", value=score)]

    def conclude(self) -> Sequence[ResultRow]:
        """Score the recommendations made without any trial."""
        found = list(super().conclude())
        if OURS in self.played:
            models = sorted(self._data.curves)
            scores = []
            for seed in range(_ZERO_SHOT_SEEDS):
                self._say("llm-pilot: recommending without any trial, by nested selection")
                advice = {model: zero_shot.advise(self._data, model, seed=seed) for model in models}
                scores.append(llm_pilot.so_score(self._data, advice))
            found.append(judged.row(OURS, self.name, "so_score_zero_shot", "score", scores))
            static = llm_pilot.best_static(self._data, models)
            found.append(judged.row("best_static", self.name, "so_score_zero_shot", "score", [static]))
        return found


@dataclass(frozen=True)
class _Designing:
    """Implements `Subject`."""

    workload: Searching
    system: str
    maker: Maker

    def warm_up(self) -> None:
        """Do nothing: learning from the library is part of what is measured."""

    def measure(self, number: int, *, trial: bool = False) -> list[Reading]:
        """Search every service with the seed `number - 1`."""
        seed, suite = number - 1, self.workload.suite
        curves = [play(self.maker, task, seed=seed, trials=suite.trials) for task in suite.tasks]
        self.workload.played.setdefault(self.system, {})[seed] = curves
        return self.workload.readings(self.system, seed, curves)


def _to_5pct(curves: Sequence[Curve]) -> float:
    return fmean(curve.trials_to(0.05) for curve in curves)
