"""The conformance suite of the designers: what each of them guarantees, as an importable test class.

To check designers, name them in a fixture `make` and subclass it.

The services here are pure functions of the configuration, so every test is fast and exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import optuna
import pytest

from plait_autoconfig.designers.base import Designer, ServiceContext
from plait_autoconfig.errors import Exhausted, ObjectiveError, OutsideSpace, TrialFailed
from plait_autoconfig.knobs import ChoiceKnob, FloatKnob, IntKnob
from plait_autoconfig.library import LibraryRun
from plait_autoconfig.objective import Goal, Limit, Objective
from plait_autoconfig.optuna_forms import quiet
from plait_autoconfig.sampler import DesignerSampler, report
from plait_autoconfig.space import Space
from plait_autoconfig.values import Config, FailureKind, Hardware, Trial, TrialOutcome

__all__ = ["CONDITIONAL", "OBJECTIVE", "SMALL", "DesignerConformance", "past_run", "run_trials", "service"]

SMALL = Space(
    (
        IntKnob(name="cpu", low=1, high=4, unit="cores"),
        ChoiceKnob(name="batch", values=(4, 8, 16), ordered=True),
    )
)
"""A space of 12 cells."""
CONDITIONAL = Space(
    (
        ChoiceKnob(name="device", values=("cpu", "small", "large")),
        FloatKnob(name="share", low=0.25, high=1.0, step=0.25, when={"device": ("small", "large")}),
        IntKnob(name="cpu", low=1, high=4),
        ChoiceKnob(name="batch", values=(4, 8, 16), ordered=True),
    ),
    ("cpu * share <= 2", "batch <= 8 or device != 'cpu'"),
)
"""A space with one of everything: a conditional knob, constraints, an unordered choice."""
OBJECTIVE = Objective((Goal("rate_per_s", "max"),), (Limit("p99_ms", "at_most", 30.0),))


def service(config: Config) -> TrialOutcome:
    """Run out of memory for the largest batch on the fewest CPUs; half of the others violate `p99_ms <= 30`."""
    cpu, batch = float(config["cpu"]), float(config["batch"])
    if batch >= 16 and cpu <= 1:
        return TrialOutcome.failed(FailureKind.OUT_OF_MEMORY)
    speed = {"small": 2.0, "large": 4.0}.get(str(config.get("device")), 1.0) * float(config.get("share", 1.0))
    return TrialOutcome.measured(
        rate_per_s=speed * cpu * batch**0.5, p99_ms=8.0 * batch / cpu, cost_per_hour=cpu * speed
    )


def run_trials(
    designer: Designer, count: int, measure: Callable[[Config], TrialOutcome] = service, *, first: int = 0
) -> list[Config]:
    """Ask, measure and tell `count` times; return the configurations."""
    configs = []
    for number in range(first, first + count):
        config = designer.ask()
        configs.append(config)
        designer.tell(Trial(number=number, config=config, outcome=measure(config), duration_s=1.0))
    return configs


def past_run(space: Space, name: str = "past", measure: Callable[[Config], TrialOutcome] = service) -> LibraryRun:
    """Return a library run that measured every cell of a space."""
    trials = (
        Trial(number=number, config=config, outcome=measure(config), duration_s=1.0)
        for number, config in enumerate(space.cells())
    )
    units = {knob.name: knob.unit for knob in space.knobs}
    return LibraryRun(run_id=name, service=name, trials=tuple(trials), units=units, hardware=Hardware(cpus=2))


class DesignerConformance:
    """The guarantees of every designer, one per test."""

    @pytest.fixture
    def library(self) -> Sequence[LibraryRun]:
        """Return past runs in both spaces: a designer uses those that fit."""
        return [past_run(SMALL, "one"), past_run(CONDITIONAL, "two")]

    def test_visits_every_cell_once(self, make: type[Designer], library: Sequence[LibraryRun]) -> None:
        """No cell is proposed twice, all are proposed, and then every further `ask` raises `Exhausted`."""
        designer = make(SMALL, OBJECTIVE, seed=3, library=library)
        configs = run_trials(designer, len(SMALL.cells()))
        assert len(configs) == len(set(map(SMALL.key, configs)))
        assert set(map(SMALL.key, configs)) == set(map(SMALL.key, SMALL.cells()))
        for _ in range(2):
            with pytest.raises(Exhausted):
                designer.ask()

    def test_conditions_and_constraints_hold(self, make: type[Designer], library: Sequence[LibraryRun]) -> None:
        """Every proposal is a valid configuration in the space's own form, also with an empty library."""
        for some in (library, ()):
            designer = make(CONDITIONAL, OBJECTIVE, seed=4, library=some)
            for config in run_trials(designer, 11):
                assert CONDITIONAL.check(config) == config

    def test_asked_ahead(self, make: type[Designer]) -> None:
        """Several cells asked for ahead of any result are all different, and results may arrive in any order."""
        designer = make(SMALL, OBJECTIVE, seed=5)
        run_trials(designer, 2)
        ahead = [designer.ask() for _ in range(4)]
        for number, config in enumerate(reversed(ahead)):
            designer.tell(Trial(number=number, config=config, outcome=service(config)))
        rest = run_trials(designer, 6)
        assert len({SMALL.key(config) for config in [*ahead, *rest]}) == 10

    def test_a_seed_fixes_everything(self, make: type[Designer], library: Sequence[LibraryRun]) -> None:
        """The same seed and trials give the same proposals."""
        runs = [run_trials(make(CONDITIONAL, OBJECTIVE, seed=6, library=library), 11) for _ in range(2)]
        assert runs[0] == runs[1]

    def test_it_moves_on_whatever_is_measured(self, make: type[Designer], library: Sequence[LibraryRun]) -> None:
        """No cell is repeated where everything fails, in any way, where nothing is feasible, or with two goals."""
        kinds = itertools.cycle(kind for kind in FailureKind if kind is not FailureKind.INVALID)
        two_goals = Objective((Goal("rate_per_s", "max"), Goal("cost_per_hour", "min")), OBJECTIVE.limits)
        for objective, measure in (
            (OBJECTIVE, lambda _: TrialOutcome.failed(next(kinds))),
            (OBJECTIVE, lambda _: TrialOutcome.measured(rate_per_s=1.0, p99_ms=99.0)),
            (two_goals, service),
        ):
            configs = run_trials(make(SMALL, objective, seed=7, library=library), 12, measure)
            assert len({SMALL.key(config) for config in configs}) == 12

    def test_invalid_comes_at_most_once_more(self, make: type[Designer]) -> None:
        """An invalid measurement is no evidence about the cell, which is proposed again, but only once."""
        designer = make(SMALL, OBJECTIVE, seed=9)
        configs = run_trials(designer, 24, lambda _: TrialOutcome.failed(FailureKind.INVALID))
        keys = [SMALL.key(config) for config in configs]
        assert all(keys.count(key) == 2 for key in keys)
        with pytest.raises(Exhausted):
            designer.ask()

    def test_repeats_and_strangers(self, make: type[Designer]) -> None:
        """Trials that were never asked for are learned from: repeats, and cells that are then not proposed."""
        designer = make(SMALL, OBJECTIVE, seed=10)
        own = SMALL.cells()[5]
        for repeat, rate_per_s in enumerate((9.0, 11.0, 10.0)):
            outcome = TrialOutcome.measured(rate_per_s=rate_per_s, p99_ms=20.0)
            designer.tell(Trial(number=repeat, config=own, outcome=outcome, repeat=repeat))
        keys = {SMALL.key(config) for config in run_trials(designer, 11)}
        assert len(keys) == 11
        assert SMALL.key(own) not in keys

    def test_what_is_measured_is_not_proposed(self, make: type[Designer]) -> None:
        """Whoever asked for it, until that is done, or given up. What was asked for and is measured by nobody is open
        again; what was measured stays closed."""
        designer = make(SMALL, OBJECTIVE, seed=11)
        measured, asked = run_trials(designer, 1)[0], designer.ask()
        theirs = next(cell for cell in SMALL.cells() if cell not in (measured, asked))
        designer.expect([theirs, measured, {"cpu": 9, "batch": 4}])
        keys = {SMALL.key(config) for config in run_trials(designer, 10)}
        assert len(keys) == 10
        assert SMALL.key(asked) in keys
        assert not keys & {SMALL.key(theirs), SMALL.key(measured)}
        designer.expect([])
        assert run_trials(designer, 1) == [theirs]

    def test_bad_trials_change_nothing(self, make: type[Designer]) -> None:
        """A configuration of another space or a missing metric is rejected by name, and the search is unaffected."""
        designer, twin = (make(SMALL, OBJECTIVE, seed=12) for _ in range(2))
        run_trials(designer, 2)
        outcome = TrialOutcome.measured(rate_per_s=1.0, p99_ms=1.0)
        with pytest.raises(OutsideSpace, match="cpu"):
            designer.tell(Trial(number=2, config={"cpu": 99, "batch": 4}, outcome=outcome))
        outcome = TrialOutcome.measured(rate_per_s=1.0)
        with pytest.raises(ObjectiveError, match="p99_ms"):
            designer.tell(Trial(number=2, config={"cpu": 1, "batch": 4}, outcome=outcome))
        run_trials(twin, 2)
        assert run_trials(designer, 4) == run_trials(twin, 4)

    def test_an_unrelated_library_is_ignored(self, make: type[Designer]) -> None:
        """Runs of another space or without the objective's metrics, and an unknown machine, break no guarantee."""
        other = Space((IntKnob(name="threads", low=1, high=4),))
        runs = [past_run(other, "other", lambda _: TrialOutcome.measured(rate_per_s=1.0, p99_ms=1.0))]
        runs.append(past_run(SMALL, "unmeasured", lambda _: TrialOutcome.measured(watts=1.0)))
        context = ServiceContext(service="new", workload={"rows": 3.0}, hardware=Hardware(cpus=4), at="2026-11-21")
        designer = make(SMALL, OBJECTIVE, seed=13, library=runs, context=context)
        assert len({SMALL.key(config) for config in run_trials(designer, 12)}) == 12

    def test_one_cell(self, make: type[Designer]) -> None:
        """A space with a single cell is searched in one trial."""
        space = Space((IntKnob(name="cpu", low=2, high=2), ChoiceKnob(name="batch", values=(8,))))
        designer = make(space, OBJECTIVE, seed=14)
        assert run_trials(designer, 1) == [{"cpu": 2, "batch": 8}]
        with pytest.raises(Exhausted):
            designer.ask()

    def test_a_continuous_space(self, make: type[Designer]) -> None:
        """A space that cannot be listed is searched on its sample."""
        space = Space((FloatKnob(name="cpu", low=1.0, high=8.0), ChoiceKnob(name="batch", values=(4, 8), ordered=True)))
        configs = run_trials(make(space, OBJECTIVE, seed=15), 11)
        assert len({space.key(config) for config in configs}) == 11
        assert all(space.check(config) == config for config in configs)

    def test_as_an_optuna_sampler(self, make: type[Designer], library: Sequence[LibraryRun]) -> None:
        """As an Optuna sampler it searches as with ask and tell, learns of failures, and ends when exhausted."""
        direct, designer = (make(SMALL, OBJECTIVE, seed=17, library=library) for _ in range(2))
        with quiet():
            study = optuna.create_study(direction="maximize", sampler=DesignerSampler(designer, SMALL, OBJECTIVE))
            study.optimize(_optuna_objective, n_trials=12, catch=(TrialFailed,))
            with pytest.raises(Exhausted):
                study.optimize(_optuna_objective, n_trials=1)
        assert [trial.params for trial in study.trials if trial.params] == run_trials(direct, 12)
        ran = [trial for trial in study.trials if trial.state == optuna.trial.TrialState.COMPLETE]
        failed = [trial for trial in study.trials if trial.user_attrs.get("failure") == "out_of_memory"]
        assert (len(ran), len(failed)) == (11, 1)
        best = max(cell.metrics["rate_per_s"] for cell in map(service, SMALL.cells()) if OBJECTIVE.feasible(cell))
        assert study.best_value == best


def _optuna_objective(trial: optuna.Trial) -> float:
    config: dict[str, bool | int | float | str] = {
        "cpu": trial.suggest_int("cpu", 1, 4),
        "batch": trial.suggest_categorical("batch", (4, 8, 16)),
    }
    return report(trial, OBJECTIVE, service(config))[0]
