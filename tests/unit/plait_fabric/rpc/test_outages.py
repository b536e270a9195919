"""How long a client should wait for a service that is away."""

from __future__ import annotations

from plait_fabric.rpc.outages import Outages
from support.waiting import Clock


def made(**options: float) -> tuple[Outages, Clock]:
    clock = Clock()
    return Outages(clock=clock, **options), clock


def test_the_wait_is_what_is_left_of_the_last_outage() -> None:
    """Within a factor of two of the truth until a moment before the end (finding 10)."""
    outages, clock = made(first_guess_s=3.0)
    outages.found()
    outages.lost()
    clock.now_s += 12
    outages.found()
    outages.lost()
    for away_s in range(12):
        left_s = 12 - away_s
        assert left_s / 2 <= outages.back_in_s() <= max(2 * left_s, 2.2), f"after {away_s} s"
        clock.now_s += 1


def test_before_the_first_outage_a_replicas_start_is_the_guess() -> None:
    """It knows how long it took; what was measured later counts more."""
    outages, clock = made(first_guess_s=10.0)
    outages.expect(None)
    outages.found()
    outages.lost()
    assert outages.back_in_s() == 10.0
    outages.expect(30.0)
    assert outages.back_in_s() == 30.0
    clock.now_s += 20
    assert outages.back_in_s() == 10.0
    outages.found()
    outages.expect(30.0)
    outages.lost()
    assert outages.back_in_s() == 20.0


def test_the_first_start_of_all_is_no_outage() -> None:
    """Then everything starts at once, and clients were there long before."""
    outages, clock = made(first_guess_s=8.0)
    assert outages.back_in_s() == 8.0
    clock.now_s += 300
    assert outages.back_in_s() == 60.0
    outages.found()
    outages.lost()
    assert outages.back_in_s() == 8.0


def test_another_replica_that_answers_at_once_is_no_measure_of_a_start() -> None:
    """With two of a kind, one that dies is not missed; then both die."""
    outages, clock = made(first_guess_s=9.0)
    outages.found()
    outages.lost()
    clock.now_s += 0.1
    outages.found()
    assert outages.back_in_s() == 1.0
    outages.lost()
    outages.lost()
    assert outages.back_in_s() == 9.0


def test_who_is_overdue_is_asked_less_and_less_often() -> None:
    """A minute after it should have been back, nobody expects it within the second."""
    outages, clock = made(first_guess_s=5.0)
    outages.found()
    outages.lost()
    clock.now_s += 60
    assert outages.back_in_s() == 12.0
