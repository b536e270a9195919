"""How much load a search takes: short looks first, against runs of full length for every trial. In virtual time.

The made-up services of `synthetic` stand under load: Poisson arrivals at one server with gamma service times, whose
rate is the capacity of the configuration. Both systems search with the designer `plait` and the same seeds; `looks`
measures by `plait_autoconfig.looks`, `whole` as plait did before: up to five runs of full length, at twice or half the
rate until one held and another did not, then at the geometric mean. Both end a run that is beyond hope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from plait_autoconfig.designers import make_designer
from plait_autoconfig.looks import Look, LookPlan, best_look, expected_rate, look_for_capacity
from plait_autoconfig.objective import GOODPUT_PER_COST
from plait_autoconfig.values import Config, Trial, TrialOutcome
from plait_bench.autoconfig import synthetic
from plait_bench.autoconfig.play import ranked
from plait_bench.autoconfig.tasks import TuningTask
from plait_bench.benchmark import Metric, Reading, Say, Subject, Workload

__all__ = ["Loads", "VirtualLoad", "search_whole"]

OURS, BEFORE = "looks", "whole"
_TRIALS = 12
_PEAK_PER_S = 200.0  # capacity of a service's best configuration
_FIRST_PER_S = 60.0
_SLO_S, _SHARE = 0.25, 0.95
_LONG_S, _SHORT_S, _WARM_UP_S, _AGAIN_S = 16.0, 4.0, 2.0, 0.5
_SHAPE = 4.0  # of the gamma distribution of service times
_RUNS, _FACTOR, _TOLERANCE = 5, 2.0, 0.1
_NOTHING_HELD = 0.1


@dataclass
class VirtualLoad:
    """A server with a capacity, and the load that it was under, in seconds."""

    capacity_per_s: float
    rng: np.random.Generator
    load_s: float = 0.0
    runs: int = 0

    def run(self, rate_per_s: float, duration_s: float, *, needed_per_s: float, warm_up_s: float) -> Look:
        """Offer the rate and return what is seen; a run whose backlog cannot be answered any more ends early."""
        whole_s = warm_up_s + duration_s
        count = max(1, int(self.rng.poisson(rate_per_s * whole_s)))
        arrived_s = np.sort(self.rng.random(count)) * whole_s
        service_s = self.rng.gamma(_SHAPE, 1.0 / (_SHAPE * self.capacity_per_s), count)
        worked_s = np.cumsum(service_s)
        done_s = worked_s + np.maximum.accumulate(arrived_s - worked_s + service_s)
        measured = arrived_s >= warm_up_s
        late = done_s - arrived_s > _SLO_S
        ended_s = self._ended_s(arrived_s, done_s, warm_up_s, duration_s)
        self.load_s += ended_s
        self.runs += 1
        held = ended_s == whole_s and bool((~late[measured]).mean() >= _SHARE) if measured.any() else False
        return Look(
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            held=held,
            answered_per_s=int((done_s <= ended_s).sum()) / ended_s,
            needed_per_s=needed_per_s,
        )

    @staticmethod
    def _ended_s(arrived_s: np.ndarray, done_s: np.ndarray, warm_up_s: float, duration_s: float) -> float:
        whole_s = warm_up_s + duration_s
        for now_s in np.arange(max(warm_up_s + duration_s / 4, _SLO_S + 2.0), whole_s, 0.25):
            answered = int((done_s <= now_s).sum())
            waiting = int((arrived_s <= now_s).sum()) - answered
            if waiting > answered / now_s * (whole_s - now_s + _SLO_S):
                return float(now_s)
        return whole_s


def search_whole(run: Callable[[float, float], Look], first_per_s: float) -> list[Look]:
    """Return the runs of a search of which each has full length."""
    looks: list[Look] = []
    rate_per_s = first_per_s
    while len(looks) < _RUNS:
        looks.append(run(rate_per_s, _LONG_S))
        held = max((each.rate_per_s for each in looks if each.held), default=None)
        missed = min((each.rate_per_s for each in looks if not each.held), default=None)
        if held is None:
            rate_per_s /= _FACTOR
        elif missed is None:
            rate_per_s *= _FACTOR
        elif missed / held <= 1.0 + _TOLERANCE:
            break
        else:
            rate_per_s = (held * missed) ** 0.5
    return looks


class Loads(Workload):
    """Searches of both kinds on every service. A round is a seed."""

    name = "load"
    ours = OURS
    systems = (OURS, BEFORE)
    pairs = ((OURS, BEFORE),)
    compared = frozenset({"load_s"})
    metrics: Mapping[str, Metric] = {
        "load_s": Metric(unit="s", better="lower"),
        "runs": Metric(unit="runs", better="lower"),
        "regret_at_12": Metric(unit="share", better="lower"),
    }

    @contextmanager
    def session(self, say: Say) -> Iterator[None]:
        """Make the services."""
        self.tasks = synthetic.suite().tasks
        yield

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        """Open a way to measure."""
        yield _LoadSearches(self, system)


@dataclass(frozen=True)
class _LoadSearches:
    """Implements `Subject`."""

    workload: Loads
    system: str

    def warm_up(self) -> None:
        """Do nothing: time is virtual."""

    def measure(self, number: int, *, trial: bool = False) -> Sequence[Reading]:
        """Search every service with the seed `number - 1`."""
        found = [_searched(task, self.system, number - 1) for task in self.workload.tasks]
        means = [fmean(each[at] for each in found) for at in range(3)]
        names = ("load_s", "runs", "regret_at_12")
        return [Reading(metric=name, value=value, kind="modelled") for name, value in zip(names, means, strict=True)]


def _searched(task: TuningTask, system: str, seed: int) -> tuple[float, float, float]:
    """Return the seconds of load, the runs, and the regret of what would be applied after a search."""
    service, rng = task.service, np.random.default_rng([seed, 4])
    designer = make_designer("plait", service.space, service.objective, seed=seed, library=task.library)
    played: list[Trial] = []
    seen: list[tuple[Config, float]] = []
    load_s, runs = 0.0, 0
    for number in range(_TRIALS):
        config = designer.ask()
        at = service.index[service.space.key(config)]
        outcome = service.truth[at]
        if outcome.failure is None:
            load = VirtualLoad(_PEAK_PER_S * service.values[at] / service.values.max(), rng)
            goodput = _measured(load, system, *_known(task, seen, config))
            load_s, runs = load_s + load.load_s, runs + load.runs
            if goodput > _NOTHING_HELD:
                seen.append((config, goodput))
            outcome = TrialOutcome.measured(**{GOODPUT_PER_COST: goodput})
        played.append(Trial(number=number, config=config, outcome=outcome))
        designer.tell(played[-1])
    best = ranked(designer, service.objective, played)
    regret = service.regret(service.index[service.space.key(best[0])]) if best else 1.0
    return load_s, float(runs), regret


def _known(task: TuningTask, seen: Sequence[tuple[Config, float]], config: Config) -> tuple[float, float]:
    """Return what to expect and what to beat; 0 if nothing is known."""
    if not seen:
        return 0.0, 0.0
    rows = task.service.space.encode([config, *(each for each, _ in seen)])
    rates = [goodput for _, goodput in seen]
    return expected_rate(np.abs(rows[1:] - rows[0]).sum(1), rates), max(rates)


def _measured(load: VirtualLoad, system: str, expected_per_s: float, to_beat: float) -> float:
    """Return the goodput at the capacity that one way to measure finds."""

    def run(rate_per_s: float, duration_s: float) -> Look:
        again = load.runs > 0 and system == OURS
        return load.run(rate_per_s, duration_s, needed_per_s=to_beat, warm_up_s=_AGAIN_S if again else _WARM_UP_S)

    if system == BEFORE:
        looks = search_whole(run, _FIRST_PER_S)
        held = [each.rate_per_s for each in looks if each.held]
        return max(held, default=_NOTHING_HELD)
    plan = LookPlan.of(_FIRST_PER_S, expected_per_s=expected_per_s, short_s=_SHORT_S, long_s=_LONG_S)
    looks = look_for_capacity(run, plan)
    best = looks[best_look(looks)]
    return best.rate_per_s if best.held else _NOTHING_HELD
