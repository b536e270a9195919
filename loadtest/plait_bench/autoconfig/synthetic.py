"""Families of made-up services with a known optimum, noise, and configurations that run out of memory.

A service is a roofline: a batch costs a fixed time plus time per request, threads speed it up by Amdahl's law,
replicas multiply it until they share too few cores, and half precision speeds it up by a factor of its own. Goodput
counts only what is in time. Memory grows with replicas, batch and precision; beyond the machine's memory a
configuration fails. The services of a family differ in all these constants, so that no single order of
configurations fits all of them.

Every service has a noise of its own, from 1 to 10 %, that no designer knows. Each is new once, with past jobs on
the others as its library: 80 cells, the better ones measured up to three times, with noise like any trial. Variants:
*features* (services come with numbers that determine their shape), *noisy* (10 % everywhere), *glitch* (one library
trial in twenty shows 31 times the rest), and libraries that mislead: *negated* (only the worst configurations are
good) and *shuffled* (values belong to other configurations); *cold* has none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np

from plait_autoconfig.designers.base import ServiceContext
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import GOODPUT_PER_COST, Goal, Objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, FailureKind, Trial, TrialOutcome
from plait_bench.autoconfig.services import Service, Suite, leave_one_out

FAMILIES = {
    family: f"synthetic-{family}".removesuffix("-")
    for family in ("", "features", "noisy", "glitch", "cold", "negated", "shuffled")
}

MISLEADING = ("negated", "shuffled")

_CORES, _SERVICES = 8, 12
_NOISES, _MUCH_NOISE = (0.01, 0.1), 0.1
_GLITCHES, _GLITCH = 0.05, 31.0
_REMEMBERED = 80  # cells of each past service
_INFEASIBLE = 0.3  # of the cells of every service
_TRIALS = 30

SPACE = Space(
    (
        ChoiceKnob(name="batch", values=(1, 2, 4, 8, 16, 32, 64), ordered=True),
        IntKnob(name="threads", low=1, high=8),
        IntKnob(name="replicas", low=1, high=4),
        ChoiceKnob(name="wait_ms", values=(0, 2, 5, 10, 20), ordered=True, unit="ms"),
        ChoiceKnob(name="precision", values=("fp32", "bf16"), ordered=True),
    ),
    ("threads * replicas <= 16",),
)
OBJECTIVE = Objective((Goal(GOODPUT_PER_COST, "max"),))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constants:
    """The constants of one service. Times are in ms for one request on one thread at fp32."""

    fixed_ms: float
    request_ms: float
    parallel: float
    bf16_gain: float
    slo_ms: float
    weights: float
    activations: float
    idle_cost: float

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> _Constants:
        def between(low: float, high: float) -> float:
            return float(np.exp(rng.uniform(np.log(low), np.log(high))))

        return cls(
            fixed_ms=between(2.0, 40.0), request_ms=between(0.5, 10.0), parallel=float(rng.uniform(0.6, 0.97)),
            bf16_gain=between(0.8, 2.0), slo_ms=between(60.0, 400.0), weights=between(0.5, 4.0),
            activations=between(0.02, 0.3), idle_cost=between(0.5, 3.0),
        )  # fmt: skip

    def goodput_per_cost(self, config: Config) -> float:
        """Return the goodput per cost of a configuration, assuming that it fits into memory."""
        batch, threads, replicas = (float(config[name]) for name in ("batch", "threads", "replicas"))
        speed = 1.0 / ((1.0 - self.parallel) + self.parallel / threads)
        speed *= self.bf16_gain if config["precision"] == "bf16" else 1.0
        speed *= min(1.0, _CORES / (threads * replicas)) ** 1.2  # oversubscribed cores also lose to switching
        wait_ms = float(config["wait_ms"])
        filled = 1.0 + (batch - 1.0) * (1.0 - np.exp(-(wait_ms + 3.0) / 6.0))
        step_ms = (self.fixed_ms + filled * self.request_ms) / speed
        in_time = 1.0 / (1.0 + (1.6 * (step_ms + wait_ms) / self.slo_ms) ** 6)
        per_s = 1e3 * replicas * filled / step_ms * in_time
        return float(per_s / (self.idle_cost + min(_CORES, threads * replicas) + 0.5 * replicas))

    def features(self) -> dict[str, float]:
        """Return what somebody who knows the service could write down about it."""
        return {name: float(np.log(value)) for name, value in asdict(self).items()}

    def memory(self, config: Config) -> float:
        """Return the memory that a configuration needs, in arbitrary units."""
        each = self.weights + self.activations * float(config["batch"])
        return float(config["replicas"]) * each * (0.6 if config["precision"] == "bf16" else 1.0)


def _service(constants: _Constants, name: str, rng: np.random.Generator) -> Service:
    cells = SPACE.cells()
    memory = np.array([constants.memory(cell) for cell in cells])
    limit = float(np.quantile(memory, 1.0 - _INFEASIBLE))
    oom = TrialOutcome.failed(FailureKind.OUT_OF_MEMORY, "more than the machine has")
    truth = tuple(
        oom if need > limit else TrialOutcome.measured(**{GOODPUT_PER_COST: constants.goodput_per_cost(cell)})
        for cell, need in zip(cells, memory, strict=True)
    )
    noise = float(np.exp(rng.uniform(*np.log(_NOISES))))
    context = ServiceContext(service=name, workload=constants.features())
    return Service(space=SPACE, objective=OBJECTIVE, truth=truth, context=context, noise=noise)


def suite(family: str = "") -> Suite:
    """Make one of `FAMILIES`: the same services in each, tuned with different libraries."""
    rng = np.random.default_rng(0)
    drawn = [_service(_Constants.drawn(rng), f"synthetic-{n}", rng) for n in range(_SERVICES)]
    if family == "noisy":
        drawn = [replace(each, noise=_MUCH_NOISE) for each in drawn]
    if family != "features":
        drawn = [replace(each, context=replace(each.context, workload={})) for each in drawn]
    past = drawn
    if family == "negated":
        past = [_upside_down(each) for each in drawn]
    if family == "shuffled":
        past = [_shuffled(each, rng) for each in drawn]
    runs = [_remembered(each, rng, _GLITCHES if family == "glitch" else 0.0) for each in past]
    return Suite(services=leave_one_out(drawn, [] if family == "cold" else runs), trials=_TRIALS)


def _remembered(service: Service, rng: np.random.Generator, glitches: float) -> LibraryRun:
    """Return a past job on the service: half of its cells drawn from the good ones, half from all; the good ones were
    measured up to three times, and a share of `glitches` of all trials shows `_GLITCH` times the rest."""
    best = np.argsort(-service.values, kind="stable")[: len(service.values) // 5]
    good = set(rng.permutation(best)[: _REMEMBERED // 2].tolist())
    cells = sorted(good | set(rng.permutation(len(service.values))[: _REMEMBERED // 2].tolist()))
    configs = service.space.cells()
    trials: list[Trial] = []
    for at in cells:
        for repeat in range(int(rng.integers(1, 4)) if at in good else 1):
            shown = service.show(at, repeat, rng)
            if shown.failure is None and rng.random() < glitches:
                shown = TrialOutcome(metrics={name: _GLITCH * value for name, value in shown.metrics.items()})
            trials.append(Trial(number=len(trials), config=configs[at], outcome=shown, repeat=repeat))
    return replace(service.as_run(), trials=tuple(trials))


def _upside_down(service: Service) -> Service:
    """Return the same service with good and bad swapped. What failed still fails."""
    known = service.values[service.values > 0]
    turn = float(known.min() * known.max())
    truth = tuple(
        each
        if each.failure is not None
        else TrialOutcome.measured(**{GOODPUT_PER_COST: turn / each.metrics[GOODPUT_PER_COST]})
        for each in service.truth
    )
    return replace(service, truth=truth)


def _shuffled(service: Service, rng: np.random.Generator) -> Service:
    """Return the same service with the outcomes of its configurations exchanged at random."""
    return replace(service, truth=tuple(service.truth[at] for at in rng.permutation(len(service.truth))))
