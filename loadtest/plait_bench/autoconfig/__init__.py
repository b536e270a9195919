"""Designers on services whose every configuration is known: how many trials until a good one is found?

Workloads: ``falcon`` and ``llm-pilot`` (published tables, read from the folder with the data), ``synthetic`` (made-up
services with noise and configurations that fail; also without a library and with a misleading one), and our own engine
and recommender as they were measured (``own-images``, ``own-recommend``: `tables`). All designers have equal trials and
the same seeds; every service is tuned with the others as its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from plait_autoconfig.space import Space
from plait_autoconfig.starter_library import starter_runs
from plait_bench.autoconfig import falcon, judged, llm_pilot, synthetic, tables, zero_shot
from plait_bench.autoconfig.contenders import MAX_SEEDS, OURS, SYSTEMS, Maker
from plait_bench.autoconfig.play import Curve, ask_after_s, play
from plait_bench.autoconfig.tasks import Suite
from plait_bench.benchmark import ResultRow
from plait_bench.errors import BenchError
from plait_bench.runner import Result

NAME = "autoconfig"
SEEDS, QUICK_SEEDS = 20, 2
COLD, MISLED = "synthetic-cold", "synthetic-misled"
GIVEN, OWN = ("falcon", "llm-pilot", "synthetic", COLD, MISLED), ("own-images", "own-recommend")
NAMES = (*GIVEN, *OWN)
_MANY_TRIALS, _MANY_SEEDS = 100, 3
_ZERO_SHOT_SEEDS = 1  # a nested selection takes a minute or two
_TAKING_PART: Mapping[str, frozenset[str]] = {
    COLD: frozenset({OURS, "random", "optuna-tpe", "optuna-gp"}),
    MISLED: frozenset({OURS, "portfolio", "morphling", "rgpe"}),
}
"""Where not everybody does: without a library those that need none, misled those that can be."""

Say = Callable[[str], None]


def measure(
    *, rounds: int, only: Sequence[str], systems: Sequence[str], data: Path | None, recorded: Sequence[Path], say: Say
) -> Iterator[Result]:
    """Every workload in turn. ``rounds`` are seeds; ``recorded``: files of runs in place of the starter library.

    Raises `BenchError`.
    """
    own = recorded or not only or set(only) & set(OWN)
    runs = tables.recorded_runs(recorded) if recorded else list(starter_runs()) if own else []
    suites = tables.recorded_suites(runs, _spaces()) if own else []
    named = (*GIVEN, *(suite.name for suite in suites))
    for wanted, there, what in ((only, named, "workload"), (systems, SYSTEMS, "system")):
        unknown = sorted(set(wanted) - set(there))
        if unknown:
            raise BenchError(f"there is no {what} {unknown[0]!r}; there are {', '.join(there)}")
    cold: Sequence[Sequence[Curve]] = ()
    for name in (each for each in named if not only or each in only):
        reason = _missing(name, data)
        if reason:
            say(f"left out: {reason}")
            yield Result(rows=(), ratios={}, left_out={name: reason})
            continue
        suite = next((each for each in suites if each.name == name), None) or _suite(name, data)
        found, played = _play_all(suite, rounds, systems, say)
        if name == COLD:
            cold = played.get(OURS, ())
        if name == MISLED and cold and OURS in played:
            found.append(judged.extra_trials(played[OURS], cold, MISLED, OURS))
        if name == "falcon":
            found += _ask_after_many(suite, played)
        if name == "llm-pilot":
            found += _scores(llm_pilot.read(_folder(name, data)), suite, played, say)
        yield Result(
            rows=(*found, *judged.rows(suite, played), *judged.tests(suite, played, OURS)),
            ratios=judged.ratios(suite, played, OURS),
            left_out={},
        )


def _spaces() -> dict[str, Space]:
    from plait_bench.cells.workloads import WORKLOADS  # with all of the engine

    return {name: workload.space for name, workload in WORKLOADS.items()}


def _folder(name: str, data: Path | None) -> Path:
    assert data is not None
    return data / name


def _missing(name: str, data: Path | None) -> str:
    """Why a workload can not take part; empty if it can."""
    if name not in {"falcon", "llm-pilot"}:
        return ""
    if data is None:
        return f"{name} needs the folder with the published tables (--data)"
    return "" if (data / name).is_dir() else f"{name}: {data} has no folder of that name"


def _suite(name: str, data: Path | None) -> Suite:
    if name == "falcon":
        return falcon.suite(_folder(name, data))
    if name == "llm-pilot":
        return llm_pilot.suite(llm_pilot.read(_folder(name, data)))
    return next(suite for suite in synthetic.suites() if suite.name == name)


def _play_all(
    suite: Suite, seeds: int, systems: Sequence[str], say: Say
) -> tuple[list[ResultRow], dict[str, list[list[Curve]]]]:
    """All searches of a suite, seed by seed and designer by designer in turn, and what pre-training took."""
    wanted = [
        name for name in SYSTEMS if (not systems or name in systems) and name in _TAKING_PART.get(suite.name, SYSTEMS)
    ]
    makers = {name: Maker(name=name, shared=suite.shared) for name in wanted}
    played: dict[str, list[list[Curve]]] = {name: [] for name in wanted}
    for seed in range(seeds):
        for name in wanted:
            if seed < MAX_SEEDS.get(name, seeds):
                played[name].append([play(makers[name], task, seed=seed, trials=suite.trials) for task in suite.tasks])
        said = ", ".join(
            f"{name} {fmean(curve.trials_to(0.05) for curve in done[-1]):.1f}"
            for name, done in played.items()
            if len(done) > seed
        )
        say(f"{suite.name}: seed {seed + 1} of {seeds}: trials to 5 %: {said}")
    took = [
        ResultRow(
            system=name, workload=suite.name, metric="pretrain_s", unit="s", value=max(times), p20=min(times),
            p80=max(times), n=len(times),
        )
        for name, times in ((name, maker.pretrain_s) for name, maker in makers.items())
        if times
    ]  # fmt: skip
    return took, played


def _ask_after_many(suite: Suite, played: Mapping[str, Sequence[Sequence[Curve]]]) -> list[ResultRow]:
    """How long a proposal takes when there is much to think about."""
    found = []
    for name in played:
        maker = Maker(name=name, shared=suite.shared)
        taken_ms = [
            1e3 * ask_after_s(maker, suite.tasks[0], seed=seed, trials=_MANY_TRIALS) for seed in range(_MANY_SEEDS)
        ]
        found.append(judged.row(name, suite.name, "ask_ms_after_100", "ms", taken_ms))
    return found


def _scores(
    data: llm_pilot.PilotData, suite: Suite, played: Mapping[str, Sequence[Sequence[Curve]]], say: Say
) -> list[ResultRow]:
    """S/O scores after three measured cells of each model, and with none."""
    found = []
    for name, seeds in played.items():
        scores = [
            llm_pilot.score_of_regrets([curve.regret_at(min(3, suite.trials)) for curve in seed]) for seed in seeds
        ]
        found.append(judged.row(name, suite.name, "so_score_3_trials", "score", scores))
    if OURS in played:
        models = sorted(data.curves)
        scores = []
        for seed in range(_ZERO_SHOT_SEEDS):
            say("llm-pilot: recommending without any trial, by nested selection")
            advice = {model: zero_shot.advise(data, model, seed=seed) for model in models}
            scores.append(llm_pilot.so_score(data, advice))
        found.append(judged.row(OURS, suite.name, "so_score_zero_shot", "score", scores))
        static = llm_pilot.best_static(data, models)
        found.append(judged.row("best_static", suite.name, "so_score_zero_shot", "score", [static]))
    return found
