"""How long a refusal stands, and who finds out whether it still does; in virtual time."""

from __future__ import annotations

import pytest

from plait_serving.http.edge.refusals import FIRST_TRIES, HELD_S, TRY_S, RecentRefusals


def test_a_refusal_holds_for_a_moment():
    """And says when it was; others are not held up."""
    now = [100.0]
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    recent.note("a", "full")
    now[0] += 0.1
    standing = recent.standing("a")
    assert (standing.refusal, standing.at_s) == ("full", 100.0)
    assert recent.standing("b") is None
    now[0] += HELD_S
    assert recent.standing("a") is None


def test_those_that_were_let_through_learn_of_a_refusal():
    """Of many that come at once the first is refused; the others are told, without using up a try."""
    now = [0.0]
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    assert [recent.standing("a") for _ in range(3)] == [None] * 3
    assert recent.held("a") is None
    recent.note("a", "full")
    assert recent.held("a").refusal == "full"
    now[0] = HELD_S
    assert [recent.held("a") for _ in range(20)] == [None] * 20
    assert [recent.standing("a") is None for _ in range(FIRST_TRIES + 1)] == [True] * FIRST_TRIES + [False]


@pytest.mark.parametrize(("took_s", "try_s"), [(0.0, TRY_S), (0.5, 1.0)])
def test_few_find_out_whether_there_is_room_again(took_s, try_s):
    """They do not pile up behind slow refusals: twice as many try only after a time without one, twice as long as the
    last took; soon after there is room nobody is held. Those who were are counted once."""
    now, tried = [0.0], []
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    recent.note("a", "full", took_s=took_s)
    for periods in (0.0, 0.9, 1.1, 2.0, 2.2, 12.0):
        now[0] = HELD_S + periods * try_s
        tried.append(sum(recent.standing("a") is None for _ in range(100)))
    assert tried == [FIRST_TRIES, 0, 2 * FIRST_TRIES, 0, 4 * FIRST_TRIES, 100]
    assert [recent.take_held("a") for _ in range(2)] == [600 - sum(tried), 0]


def test_refusals_of_many_names_are_bounded():
    """Old ones give way; with none that is old, new ones are not remembered (finding 12: dicts that only grow)."""
    now = [0.0]
    recent: RecentRefusals[int] = RecentRefusals(lambda: now[0], max_names=10)
    for name in range(50):
        recent.note(str(name), name)
    assert [name for name in range(50) if recent.standing(str(name))] == list(range(10))
    now[0] += 10.0
    recent.note("new", 1)
    assert recent.standing("new") is not None
    assert [name for name in range(50) if recent.standing(str(name))] == []
