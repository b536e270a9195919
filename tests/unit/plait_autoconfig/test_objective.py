"""Goals, limits, the front, and what is said when nothing is feasible."""

from __future__ import annotations

import pytest

from plait_autoconfig.errors import ObjectiveError
from plait_autoconfig.objective import Goal, Limit, Objective, parse_objective
from plait_autoconfig.values import FailureKind, TrialOutcome
from support.autoconfig import failed, measured

BOTH = Objective((Goal("rate", "max"), Goal("cost", "min")))
LIMITED = Objective((Goal("rate", "max"),), (Limit("p99_ms", "at_most", 50.0), Limit("recall", "at_least", 0.9)))


def test_loss_is_lower_for_better():
    """A metric to make large counts negative; a failed trial has no loss, a missing metric is named."""
    assert LIMITED.losses(TrialOutcome.failed(FailureKind.CRASH)) is None
    assert BOTH.losses(TrialOutcome.measured(rate=3.0, cost=2.0)) == (-3.0, 2.0)
    with pytest.raises(ObjectiveError, match="needs rate, but a trial measured only cost"):
        LIMITED.losses(TrialOutcome.measured(cost=1.0))
    with pytest.raises(ObjectiveError, match="needs one goal, but the objective has 2: max rate, min cost"):
        BOTH.require_one_goal()


def test_limits_are_relative_and_include_their_value():
    """Excesses are shares of the limit; below 0 they say how much room is left."""
    outcome = TrialOutcome.measured(rate=1.0, p99_ms=60.0, recall=0.945)
    assert LIMITED.excesses(outcome) == pytest.approx({"p99_ms <= 50": 0.2, "recall >= 0.9": -0.05})
    assert not LIMITED.feasible(outcome)
    assert LIMITED.feasible(TrialOutcome.measured(rate=1.0, p99_ms=50.0, recall=0.9))
    assert not LIMITED.feasible(TrialOutcome.failed(FailureKind.TIME_OUT))
    assert Limit("errors", "at_most", 0.0).excess({"errors": 0.25}) == 0.25


@pytest.mark.parametrize(
    "limit",
    [Limit("m", "at_most", 4.0), Limit("m", "at_least", 4.0), Limit("m", "at_most", 0.0), Limit("m", "at_least", -2.0)],
)
def test_excess_can_be_turned_back(limit):
    """The metric follows from the excess, which is what an Optuna study keeps."""
    for value in (-3.0, 0.0, 4.0, 5.5):
        assert limit.metric_at(limit.excess({"m": value})) == pytest.approx(value)


def test_best_is_feasible_and_averaged():
    """The best cell keeps the limits, repeats count by their mean, and of equals the first wins."""
    trials = [
        measured(0, {"cpu": 1}, rate=9.0, p99_ms=70.0, recall=1.0),
        measured(1, {"cpu": 2}, rate=8.0, p99_ms=20.0, recall=1.0),
        measured(2, {"cpu": 2}, rate=2.0, p99_ms=20.0, recall=1.0),
        measured(3, {"cpu": 3}, rate=5.0, p99_ms=20.0, recall=1.0),
        measured(4, {"cpu": 4}, rate=6.0, p99_ms=20.0, recall=1.0),
        failed(5, {"cpu": 4}),
    ]
    best = LIMITED.best(trials)
    assert best.config == {"cpu": 2}
    assert best.outcome.metrics["rate"] == 5.0
    assert LIMITED.best(trials[:1]) is None


def test_the_front_keeps_ties():
    """Nobody on the front is beaten; equals stay; limits still count."""
    rows = [(5.0, 3.0), (5.0, 3.0), (4.0, 3.0), (6.0, 4.0), (1.0, 1.0), (1.0, 2.0)]
    trials = [measured(n, {"cpu": n}, rate=rate, cost=cost) for n, (rate, cost) in enumerate(rows)]
    assert [cell.config["cpu"] for cell in BOTH.front(trials)] == [0, 1, 3, 4]
    cheap = Objective(BOTH.goals, (Limit("cost", "at_most", 2.0),))
    assert [cell.config["cpu"] for cell in cheap.front(trials)] == [4]
    assert BOTH.front([failed(0, {"cpu": 1})]) == ()


def test_why_none_names_the_limit_that_binds():
    """Failures are counted by kind, and each limit says how often and by how much it was missed."""
    trials = [
        measured(0, {"cpu": 1}, rate=1.0, p99_ms=75.0, recall=0.8),
        measured(1, {"cpu": 2}, rate=1.0, p99_ms=56.0, recall=0.95),
        failed(2, {"cpu": 3}, FailureKind.OUT_OF_MEMORY),
        failed(3, {"cpu": 4}, FailureKind.INVALID),
    ]
    assert LIMITED.why_none(trials) == (
        "none of 3 configurations is feasible: 1 ended with out of memory; p99_ms <= 50 was missed by all 2 that ran, "
        "the nearest had 56 (12 % beyond); recall >= 0.9 was missed by 1 of the 2 that ran"
    )
    assert LIMITED.why_none([*trials, measured(4, {"cpu": 5}, rate=1.0, p99_ms=1.0, recall=1.0)]) == ""
    assert LIMITED.why_none([]) == "nothing was measured yet"
    assert LIMITED.why_none(trials[3:]) == "none of 1 trials gave a valid measurement"
    assert LIMITED.why_none(trials[2:3]) == "none of 1 configurations is feasible: 1 ended with out of memory"


def test_the_named_objectives():
    """What the command line calls them stands for goals and limits."""
    assert parse_objective("max goodput_per_cost") == Objective((Goal("goodput_per_cost", "max"),))
    cheapest = Objective((Goal("cost_per_hour", "min"),), (Limit("goodput_per_s", "at_least", 20.0),))
    in_time = (*cheapest.limits, Limit("p99_ms", "at_most", 50.0))
    assert parse_objective("min cost at rate 20", ["p99_ms <= 50"]) == Objective(cheapest.goals, in_time)
    fastest = Objective((Goal("p99_ms", "min"),), (Limit("goodput_per_s", "at_least", 25.0),))
    assert parse_objective("min p99 at rate 2.5e1") == fastest
    assert parse_objective("max rate,min watts", ["recall>=0.9"]) == Objective(
        (Goal("rate", "max"), Goal("watts", "min")), (Limit("recall", "at_least", 0.9),)
    )
    assert str(cheapest) == "min cost_per_hour with goodput_per_s >= 20"


@pytest.mark.parametrize(
    ("text", "limits", "said"),
    [
        ("most goodput", [], "the goal 'most goodput' cannot be read"),
        ("min cost at rate 1e", [], "'1e' is no number"),
        ("min cost at rate 0", [], "'min cost at rate 0' needs a rate above 0"),
        ("max a", ["p99 < 5"], "the limit 'p99 < 5' cannot be read"),
        ("max a", ["p99 <= 1e999"], "'1e999' is no number"),
        ("max a, min a", [], "a is the metric of 2 goals"),
        ("max a", ["p99 <= 50", "p99 >= 60"], "limits p99 >= 60 and p99 <= 50 contradict each other"),
    ],
)
def test_unreadable_objectives_are_quoted(text, limits, said):
    """A text that is no objective is quoted, and what is asked for twice or leaves nothing is named."""
    with pytest.raises(ObjectiveError, match=said):
        parse_objective(text, limits)
    with pytest.raises(ObjectiveError, match="no goal"):
        Objective(())
