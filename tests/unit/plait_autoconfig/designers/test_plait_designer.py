"""plait's designer on small spaces: what they learn from a library, from trials, and from failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from plait_autoconfig.designers.base import Designer, ServiceContext
from plait_autoconfig.designers.plait_designer import PlaitDesigner
from plait_autoconfig.knobs import ChoiceKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Goal, Limit, Objective, parse_objective
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, FailureKind, Trial, TrialOutcome
from suites.designers import past_run, run_trials

SPACE = Space(
    (
        ChoiceKnob(name="batch", values=(1, 2, 4, 8, 16), ordered=True),
        IntKnob(name="threads", low=1, high=6),
        ChoiceKnob(name="device", values=("a", "b", "c")),
    )
)
"""90 cells."""
OBJECTIVE = parse_objective("max goodput_per_cost")

Serve = Callable[[Config], TrialOutcome]


def serving(*, peak: float = 4.0, device: str = "b", most: float = np.inf, factor: float = 1.0) -> Serve:
    """A service that is best at about ``peak`` threads on one device with large batches, and runs out of memory where
    batch times threads is more than ``most``."""

    def serve(config: Config) -> TrialOutcome:
        batch, threads = float(config["batch"]), float(config["threads"])
        if batch * threads > most:
            return TrialOutcome.failed(FailureKind.OUT_OF_MEMORY)
        good = batch**0.4 * np.exp(-(((threads - peak) / 2.0) ** 2)) * (2.0 if config["device"] == device else 1.0)
        return TrialOutcome.measured(goodput_per_cost=factor * float(good))

    return serve


def search(designer: Designer, serve: Serve, count: int) -> Sequence[Trial]:
    """All trials, after so many more."""
    run_trials(designer, count, serve, first=len(designer.trials))
    return designer.trials


def regret(trials: Sequence[Trial], serve: Serve) -> float:
    """1 - best found / best there is."""
    found = max(trial.outcome.metrics.get("goodput_per_cost", 0.0) for trial in trials)
    return 1.0 - found / max(serve(cell).metrics.get("goodput_per_cost", 0.0) for cell in SPACE.cells())


RELATIVES = [past_run(SPACE, f"peak {peak}", serving(peak=peak)) for peak in (3.5, 4.0, 4.5)]


def plait(library: Sequence[LibraryRun] = (), *, seed: int = 0, context: ServiceContext | None = None) -> PlaitDesigner:
    """On the space above."""
    return PlaitDesigner(SPACE, OBJECTIVE, seed=seed, library=library, context=context)


def test_the_first_trial_is_what_earlier_services_liked():
    """With a library of relatives one trial is enough for a good configuration."""
    assert regret(search(plait(RELATIVES), serving(), 1), serving()) < 0.05


def test_without_a_library_it_learns_from_trials_alone():
    """Cold, a sixth of the space is enough to come within 10 %."""
    assert regret(search(plait(), serving(), 16), serving()) < 0.1


def test_a_misleading_library_costs_little():
    """Services with their optimum elsewhere: the search still arrives, and trusts them less than before."""
    foreign = [past_run(SPACE, f"{peak}", serving(peak=peak, device="c")) for peak in (0.5, 1.0, 1.5)]
    new = serving(peak=6.0, device="a")
    designer = plait(foreign)
    believed = designer.beliefs().loss.trust
    trials = search(designer, new, 18)
    assert regret(trials, new) < 0.1
    assert designer.beliefs().loss.trust < believed


def test_failures_teach_where_not_to_go():
    """Relatives ran out of memory at large batches on many threads: the new service is hardly sent there."""
    relatives = [past_run(SPACE, f"{most}", serving(most=most)) for most in (16.0, 20.0, 24.0)]
    failed = [trial for trial in search(plait(relatives), serving(most=20.0), 15) if trial.outcome.failure]
    assert len(failed) <= 2


def test_failures_are_learned_without_a_library_too():
    """Later trials fail no more often than the space does (a quarter of it), though the best lies beside what fails."""
    late = [trial for seed in range(3) for trial in search(plait(seed=seed), serving(most=20.0), 16)[8:]]
    assert sum(trial.outcome.failure is not None for trial in late) <= len(late) / 4


def test_an_optimum_that_touches_a_limit_is_found():
    """Half as many users on the best device are worth half: what only may keep the limit is tried as well."""
    space = Space(
        (
            ChoiceKnob(name="users", values=(1, 2, 4, 8, 16, 32, 64, 128), ordered=True),
            ChoiceKnob(name="device", values=("a", "b", "c", "d")),
            ChoiceKnob(name="devices", values=(1, 2, 4), ordered=True),
        )
    )
    objective = Objective((Goal("users_per_price", "max"),), (Limit("p99_ms", "at_most", 50.0),))
    price, idle_ms = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 12.0}, {"a": 30.0, "b": 20.0, "c": 10.0, "d": 5.56}

    def serve(config: Config) -> TrialOutcome:
        device, each = str(config["device"]), float(config["users"]) / float(config["devices"])
        return TrialOutcome.measured(users_per_price=each / price[device], p99_ms=idle_ms[device] * (1.0 + each / 16.0))

    for seed in range(3):
        best = objective.best(search(PlaitDesigner(space, objective, seed=seed), serve, 16))
        assert best.outcome.metrics == {"users_per_price": 16.0, "p99_ms": 50.0}, seed


def test_what_a_library_taught_can_be_handed_on():
    """`pretrained` spares the next instance the learning, and changes nothing."""
    first = plait(RELATIVES)
    second = PlaitDesigner(SPACE, OBJECTIVE, seed=0, library=RELATIVES, pretrained=first.pretrained)
    assert [t.config for t in search(first, serving(), 4)] == [t.config for t in search(second, serving(), 4)]


def test_expected_regret_falls_as_the_search_goes_on():
    """Infinite at first, small at the end: a stop rule can read it."""
    designer = plait(RELATIVES)
    assert designer.expected_regret() == float("inf")
    search(designer, serving(), 2)
    early = designer.expected_regret()
    for number, cell in enumerate(SPACE.cells()):
        designer.tell(Trial(number=number, config=cell, outcome=serving()(cell)))
    assert designer.expected_regret() < min(early, 0.05)


def frugal(config: Config) -> TrialOutcome:
    """40/s at one thread already, so only the threads' cost tells configurations apart; small batches are too slow."""
    cost = float(config["threads"])
    enough = float(config["batch"]) >= 4
    return TrialOutcome.measured(
        goodput_per_s=40.0 if enough else 20.0,
        attainment=1.0 if enough else 0.5,
        cost_per_hour=cost,
        goodput_per_cost=(40.0 if enough else 20.0) / cost,
    )


def test_a_known_cost_need_not_be_searched_for():
    """After the default, the cheapest that works is found at once: what all cost is known, and that one was enough."""
    objective = parse_objective("max goodput_per_cost", ["attainment >= 0.95"])
    context = ServiceContext(costs=tuple(float(cell["threads"]) for cell in SPACE.cells()))
    for seed in range(2):
        designer = PlaitDesigner(SPACE, objective, seed=seed, context=context)
        default: Config = {"batch": 8, "threads": 6, "device": "a"}
        designer.tell(Trial(number=0, config=default, outcome=frugal(default)))
        best = objective.best(search(designer, frugal, 4))
        assert best.config["threads"] == 1


def test_what_memory_costs_is_learned():
    """The cores of a cell are known beforehand, its memory is not: it shows in trials, and is no secret then."""
    space = Space(tuple(IntKnob(name=name, low=1, high=6) for name in ("replicas", "gib")))

    def measure(config: Config) -> TrialOutcome:
        cost = 0.04 * float(config["replicas"]) * (1.0 + 2.0 * float(config["gib"]))
        goodput = 10.0 * float(config["replicas"]) * (1.0 + 0.1 * float(config["gib"]))
        return TrialOutcome.measured(goodput_per_s=goodput, cost_per_hour=cost, goodput_per_cost=goodput / cost)

    context = ServiceContext(costs=tuple(0.04 * float(cell["replicas"]) for cell in space.cells()))
    for seed in range(2):
        designer = PlaitDesigner(space, parse_objective("max goodput_per_cost"), seed=seed, context=context)
        trials = search(designer, measure, 10)
        assert sum(trial.config["gib"] == 1 for trial in trials) == 6, seed  # all that there are


def test_costs_of_a_library_run_that_measured_none_are_no_obstacle():
    """It then says nothing about goodput, and is no reason to fail."""
    context = ServiceContext(costs=tuple(float(cell["threads"]) for cell in SPACE.cells()))
    trials = search(plait(RELATIVES, context=context), frugal, 6)
    assert len({tuple(trial.config.values()) for trial in trials}) == 6


def test_the_level_of_a_service_is_no_feature_of_its_cells():
    """The same service in other units is searched in the same way."""
    for library in ((), RELATIVES):
        searches = [[trial.config for trial in search(plait(library), serving(factor=by), 10)] for by in (1.0, 1e6)]
        assert searches[0] == searches[1]


def test_several_goals_find_the_ends_of_the_front():
    """Goodput and cost at once: the search sees cheap configurations and fast ones."""

    def serve(config: Config) -> TrialOutcome:
        return TrialOutcome.measured(**serving(peak=6.0)(config).metrics, cost_per_hour=float(config["threads"]))

    objective = Objective((Goal("goodput_per_cost", "max"), Goal("cost_per_hour", "min")))
    designer = PlaitDesigner(SPACE, objective, seed=2)
    trials = search(designer, serve, 16)
    threads = {cell.config["threads"] for cell in objective.front(trials)}
    assert {1, 6} <= threads
    assert len(threads) >= 3


def test_a_configuration_outside_the_sample_is_learned_from():
    """In a space too large to list, what users try themselves counts as well."""
    large = Space(tuple(IntKnob(name=f"k{n}", low=0, high=20) for n in range(5)))
    designer = PlaitDesigner(large, Objective((Goal("v", "max"),)), seed=0)
    inside = {tuple(cell.values()) for cell in designer.cells}
    own = next(c for c in ({f"k{n}": v for n in range(5)} for v in range(20)) if tuple(c.values()) not in inside)
    designer.tell(Trial(number=0, config=own, outcome=TrialOutcome.measured(v=3.0)))
    assert len(designer.beliefs().feasible) == len(large.cells()) + 1
    assert designer.expected_regret() > 0.0
