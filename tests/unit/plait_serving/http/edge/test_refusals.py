"""How long a refusal stands, and who finds out whether it still does; in virtual time."""

from __future__ import annotations

from heapq import heappop, heappush

import pytest

from plait_serving.http.edge.refusals import FIRST_TRIES, HELD_S, RecentRefusals
from plait_serving.http.edge.repeating import RequestPace


def test_a_refusal_holds_for_a_moment():
    """And says how long ago it was; others are not held up."""
    now = [100.0]
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    recent.note("a", "full")
    now[0] += 0.1
    standing = recent.standing("a")
    assert (standing.refusal, standing.ago_s) == ("full", pytest.approx(0.1))
    assert recent.standing("b") is None
    now[0] += HELD_S
    assert recent.standing("a") is None


def test_few_find_out_whether_there_is_room_again():
    """A hundred clients that ask every ten milliseconds, and an engine that takes fifty to refuse: for five seconds,
    then it has room. It is asked by a few in each moment, and soon after by all."""
    now, in_flight, reached = [0.0], [], []
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    for tick in range(700):
        now[0] = tick / 100
        while in_flight and in_flight[0] <= now[0]:
            in_flight.pop(0)
            recent.note("a", "full")
        for _ in range(100):
            if recent.standing("a") is None:
                reached.append(now[0])
                if now[0] < 5.0:
                    in_flight.append(now[0] + 0.05)
    first = sum(at_s < 0.05 for at_s in reached)
    assert first == 500  # nothing was known yet
    assert 40 <= sum(0.1 < at_s < 5.0 for at_s in reached) <= 400  # of 49,000
    assert sum(at_s >= 6.0 for at_s in reached) == 100 * 100
    assert recent.take_held("a") == 70_000 - len(reached)
    assert recent.take_held("a") == 0


@pytest.mark.parametrize("service_s", [0.002, 0.01, 0.03])
def test_a_flood_does_not_pile_up_behind_its_own_tries(service_s):
    """Five hundred clients that ask again a tenth of a second after each refusal, of an engine that is full and refuses
    one after the other: 99 in 100 refusals take less than two seconds."""
    now = [0.0]
    recent: RecentRefusals[str] = RecentRefusals(lambda: now[0])
    pace = RequestPace()
    latencies: list[float] = []
    free_s = 0.0
    events = [(client * 1e-4, client, "asks", client * 1e-4) for client in range(500)]
    while events[0][0] < 30.0:
        now[0], client, what, asked_s = heappop(events)
        if what == "asks":
            is_held = recent.standing("a") is not None
            turn_s = 0.0 if is_held else pace.wait_s("a", now[0])
            following = "is held" if is_held else "goes"
            heappush(events, (now[0] + turn_s, client, following, asked_s))
        elif what == "goes" and recent.held("a") is None:
            free_s = max(free_s, now[0]) + service_s
            heappush(events, (free_s, client, f"is refused {now[0]}", asked_s))
        else:
            if what.startswith("is refused"):
                recent.note("a", "full", took_s=now[0] - float(what.split()[-1]))
            latencies.append(now[0] - asked_s)
            heappush(events, (now[0] + 0.1, client, "asks", now[0] + 0.1))
    latencies.sort()
    assert latencies[int(0.99 * len(latencies))] < 2.0
    assert len(latencies) > 50_000


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
