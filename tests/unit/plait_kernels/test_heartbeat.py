"""A thread that hangs is noticed; one that takes long is not."""

from __future__ import annotations

import pytest

from plait_kernels.heartbeat import Stuck, ThreadHeartbeat
from support.waiting import Clock

PERIOD_S = 5.0


def survives(heartbeat: ThreadHeartbeat, clock: Clock, seconds: float) -> None:
    """Check every few seconds, as Serve does, for that long."""
    until_s = clock.now_s + seconds
    while clock.now_s < until_s:
        clock.now_s += PERIOD_S
        heartbeat.check()


def made() -> tuple[ThreadHeartbeat, Clock]:
    clock = Clock()
    return ThreadHeartbeat(clock), clock


def test_a_step_that_hangs_is_noticed_by_its_measured_time() -> None:
    """A minute is nothing to worry about; minutes on a step of half a second are (finding 9)."""
    heartbeat, clock = made()
    heartbeat.begin("a step of 4 rows", 0.5)
    survives(heartbeat, clock, 60)
    with pytest.raises(Stuck, match=r"a step of 4 rows has not ended within .* s; usual are 0.5 s"):
        survives(heartbeat, clock, 60)
    with pytest.raises(Stuck):  # and stays so, until Serve has heard it often enough
        survives(heartbeat, clock, PERIOD_S)


def test_a_long_step_is_not_taken_for_a_stuck_one() -> None:
    """Steps of twenty seconds may take minutes on a busy host, but not half an hour."""
    heartbeat, clock = made()
    heartbeat.begin("a step", 20.0)
    survives(heartbeat, clock, 300)
    with pytest.raises(Stuck):
        survives(heartbeat, clock, 1_500)


def test_what_was_never_measured_gets_much_time() -> None:
    """The first step of a shape may compile for minutes."""
    heartbeat, clock = made()
    heartbeat.begin("a step")
    survives(heartbeat, clock, 800)
    with pytest.raises(Stuck, match="never measured"):
        survives(heartbeat, clock, 200)


def test_every_step_begins_anew_and_waiting_is_no_hanging() -> None:
    """Many short steps are progress; a thread without work may wait for a week."""
    heartbeat, clock = made()
    for _ in range(100):
        heartbeat.begin("a step", 0.5)
        survives(heartbeat, clock, 40)
    heartbeat.rest()
    survives(heartbeat, clock, 7 * 24 * 3600)
    heartbeat.begin("a step", 0.5)
    survives(heartbeat, clock, 40)


def test_a_process_that_was_stopped_for_long_is_not_stuck() -> None:
    """Its thread stood still as everything else: the time between two checks far apart counts little."""
    heartbeat, clock = made()
    heartbeat.begin("a step", 0.5)
    survives(heartbeat, clock, 20)
    clock.now_s += 3_600
    heartbeat.check()
    survives(heartbeat, clock, 20)


def test_a_part_that_may_take_long_does_not_count_as_the_whole() -> None:
    """A batch that must first load a newer version has its own time only afterwards."""
    heartbeat, clock = made()
    heartbeat.begin("a batch", 0.01)
    with heartbeat.unhurried("loading a newer version"):
        survives(heartbeat, clock, 300)
    survives(heartbeat, clock, 60)
    with pytest.raises(Stuck, match="a batch"):
        survives(heartbeat, clock, 60)
