"""How many runs a trial takes, how long they are, and which of them counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_autoconfig.objective import Goal
from plait_autoconfig.trial_load import Look, LookPlan, best_look, look_for_capacity, next_look, surely_loses

SHORT_S, LONG_S = 4.0, 16.0


def searched(
    capacity: float, first: float, *, expected: bool = True, needed: float = 0.0, whole: bool = False,
    busy: frozenset[int] = frozenset(),
) -> list[Look]:  # fmt: skip
    """The runs of a search on a server that answers so many a second and no more; those of a busy host say nothing."""
    looks: list[Look] = []

    def run(rate_per_s: float, duration_s: float) -> Look:
        valid = len(looks) not in busy
        looks.append(
            Look(
                rate_per_s=rate_per_s, duration_s=duration_s, held=valid and rate_per_s <= capacity,
                answered_per_s=min(rate_per_s, capacity) if valid else 1.0, needed_per_s=needed, valid=valid,
            )
        )  # fmt: skip
        return looks[-1]

    expected_per_s = first if expected else 0.0
    plan = LookPlan.of(first, expected_per_s=expected_per_s, short_s=SHORT_S, long_s=LONG_S, whole=whole)
    return look_for_capacity(run, plan)


@given(capacity=st.floats(5.0, 400.0), far=st.floats(0.3, 3.0))
def test_what_may_win_is_known_to_the_tolerance(capacity: float, far: float) -> None:
    """From an expectation that is off by a factor of three either way; what counts is a run of full length."""
    looks = searched(capacity, capacity * far)
    best = looks[best_look(looks)]
    assert best.held
    assert best.duration_s == LONG_S
    assert capacity / 1.3 < best.rate_per_s <= capacity


@given(capacity=st.floats(5.0, 400.0), first=st.floats(1.0, 500.0))
def test_without_an_expectation_it_still_ends_with_a_rate_that_held(capacity: float, first: float) -> None:
    """A server that answers as many as it can shows where to look after one miss."""
    looks = searched(capacity, first, expected=False)
    assert len(looks) <= 10
    assert looks[best_look(looks)].held


@pytest.mark.parametrize("far", [0.6, 0.9, 1.0, 1.1, 1.5])
def test_what_cannot_win_costs_a_few_short_looks(far: float) -> None:
    """The best so far needs twice its capacity: no run of full length, and a rate that held all the same."""
    looks = searched(100.0, 100.0 * far, needed=200.0)
    assert {look.duration_s for look in looks} == {SHORT_S}
    assert sum(look.duration_s for look in looks) <= LONG_S
    assert looks[best_look(looks)].held


def test_a_busy_host_moves_nothing() -> None:
    """A run that says nothing about the server is made again; without those the search is what it is on an idle
    host."""
    idle, busy = searched(100.0, 90.0), searched(100.0, 90.0, busy=frozenset({0, 2, 3}))
    assert [look for look in busy if look.valid] == idle
    assert busy[1].rate_per_s == busy[0].rate_per_s
    assert busy[best_look(busy)] == idle[best_look(idle)]


def test_a_host_that_stays_busy_makes_the_whole_search_invalid() -> None:
    """What held before may be far from the capacity."""
    looks = searched(100.0, 90.0, busy=frozenset({1, 2, 3}))
    assert [look.valid for look in looks] == [True, False, False, False]
    assert len({look.rate_per_s for look in looks[1:]}) == 1
    assert not looks[best_look(looks)].valid


def test_what_others_are_compared_with_is_measured_by_runs_of_full_length() -> None:
    """Two of them, where the expectation was right: one that holds and one that does not."""
    looks = searched(104.0, 100.0, whole=True)
    assert [(look.rate_per_s, look.duration_s) for look in looks] == [(100.0, LONG_S), (pytest.approx(110.0), LONG_S)]


def test_a_longer_run_outweighs_shorter_ones() -> None:
    """A short look may hold by luck; what missed in a run of full length has missed."""
    plan = LookPlan.of(10.0, expected_per_s=10.0, short_s=SHORT_S, long_s=LONG_S)
    lucky = Look(rate_per_s=10.0, duration_s=SHORT_S, held=True, answered_per_s=10.0)
    above = Look(rate_per_s=11.5, duration_s=SHORT_S, held=False, answered_per_s=9.0)
    missed = Look(rate_per_s=10.0, duration_s=LONG_S, held=False, answered_per_s=9.0)
    assert next_look(plan, [lucky, above]) == (10.0, LONG_S)
    wanted = next_look(plan, [lucky, above, missed])
    assert wanted[0] < 10.0
    unlucky = Look(rate_per_s=9.5, duration_s=SHORT_S, held=False, answered_per_s=9.0)
    held = Look(rate_per_s=10.0, duration_s=LONG_S, held=True, answered_per_s=10.0)
    looks = [lucky, unlucky, held, above]
    assert looks[best_look(looks)] is held


def test_nothing_that_held_counts_as_the_lowest_rate() -> None:
    """It came nearest, and its metrics say that it missed."""
    looks = [Look(rate_per_s=rate, duration_s=1.0, held=False, answered_per_s=0.0) for rate in (8.0, 4.0, 6.0)]
    assert best_look(looks) == 1


def test_a_look_at_a_fixed_rate_must_be_much_worse_to_lose() -> None:
    """Short runs of one configuration differ by some percent."""
    cheap, quick = Goal("cost_per_hour", "min"), Goal("p99_ms", "min")
    assert not surely_loses(cheap, 110.0, 100.0)
    assert surely_loses(cheap, 130.0, 100.0)
    assert not surely_loses(quick, 130.0, 100.0)  # the tail of a short run is a request or two
    assert surely_loses(quick, 160.0, 100.0)
    assert not surely_loses(Goal("goodput_per_s", "max"), 90.0, 100.0)
    assert surely_loses(Goal("goodput_per_s", "max"), 70.0, 100.0)
