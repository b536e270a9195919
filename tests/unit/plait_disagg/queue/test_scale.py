"""How many CNs and HNs there should be: pressures from counters, and decisions with hysteresis."""

from __future__ import annotations

import itertools

import pytest

from plait_disagg.queue.scale import Gauge, ScaleState, Scaling, cn_pressure, decide, hn_pressure

SCALING = Scaling(min_replicas=1, max_replicas=6, up_after_s=2.0, down_after_s=20.0)


class Fleet:
    """Workers that share a load alike; a new one starts for ``start_s``. One decision every half second."""

    def __init__(self, scaling: Scaling = SCALING, *, start_s: float = 3.0) -> None:
        self.scaling, self.start_s = scaling, start_s
        self.state, self.now_s = ScaleState(), 0.0
        self.ready_s = [0.0]
        self.changes: list[tuple[float, int]] = []

    def run(self, load: float, seconds: float, *, wobble: float = 0.0) -> int:
        """``load`` in workers. Returns how many there are in the end."""
        until_s, signs = self.now_s + seconds, itertools.cycle((1.0, -1.0))
        while self.now_s < until_s:
            ready = sum(moment <= self.now_s for moment in self.ready_s)
            pressure = min(2.0, load * (1.0 + wobble * next(signs)) / ready)
            wanted, self.state = decide(
                [pressure] * ready, replicas=len(self.ready_s), scaling=self.scaling, state=self.state, now_s=self.now_s
            )
            if wanted != len(self.ready_s):
                self.changes.append((self.now_s, wanted))
                self.ready_s = (self.ready_s + [self.now_s + self.start_s] * wanted)[:wanted]
            self.now_s += 0.5
        return len(self.ready_s)


def test_a_step_up_and_down_is_followed_without_flapping() -> None:
    """More workers soon after the load came, fewer long after it went, each in a few changes, then quiet."""
    fleet = Fleet()
    assert fleet.run(0.4, 60.0) == 1
    assert fleet.changes == []
    assert fleet.run(2.4, 60.0) == 4
    assert fleet.changes[0][0] - 60.0 <= 3.0
    assert len(fleet.changes) <= 3
    before = len(fleet.changes)
    assert fleet.run(0.3, 120.0) == 1
    assert fleet.changes[before][0] - 120.0 >= 20.0
    assert len(fleet.changes) - before <= 2


@pytest.mark.parametrize("load", [0.5, 0.9, 1.5, 2.1, 3.3, 10.0])
def test_a_steady_load_that_wobbles_ends_all_changes(load: float) -> None:
    """Whatever the load, after a minute nothing changes any more: the band is wider than what a change moves."""
    fleet = Fleet()
    fleet.run(load, 60.0, wobble=0.15)
    before = list(fleet.changes)
    fleet.run(load, 600.0, wobble=0.15)
    assert fleet.changes == before


def test_a_short_peak_changes_nothing() -> None:
    """Less than ``up_after_s`` above, or ``down_after_s`` below."""
    fleet = Fleet()
    fleet.run(0.5, 10.0)
    fleet.run(3.0, 1.5)
    fleet.run(0.5, 10.0)
    assert fleet.changes == []
    fleet.run(2.4, 30.0)
    count = fleet.run(2.4, 1.0)
    fleet.run(0.1, 15.0)
    assert fleet.run(2.4, 10.0) == count


def test_bounds_hold_and_silence_changes_nothing() -> None:
    """Never fewer than least or more than most, also if the bounds changed; without news, no change."""
    fleet = Fleet()
    assert fleet.run(100.0, 60.0) == SCALING.max_replicas
    wanted, _ = decide([], replicas=3, scaling=SCALING, state=ScaleState(side=1), now_s=99.0)
    assert wanted == 3
    wanted, _ = decide([0.6] * 9, replicas=9, scaling=SCALING, state=ScaleState(), now_s=0.0)
    assert wanted == SCALING.max_replicas


def test_workers_that_still_start_are_not_asked_for_twice() -> None:
    """While they start, the old ones stay full; that is no reason for more."""
    fleet = Fleet(start_s=60.0)
    fleet.run(1.1, 50.0)
    assert [count for _, count in fleet.changes] == [2]


def test_a_cn_is_pressed_by_its_own_work() -> None:
    """Computing counts; a queue doubles that at most, so slow HNs do not call for CNs."""
    busy = {"busy_seconds_total": 9.0, "requests_total": 100.0, "queued_seconds_total": 0.1}
    assert cn_pressure({}, busy, 10.0) == pytest.approx(0.9)
    assert cn_pressure({}, {**busy, "queued_seconds_total": 100.0}, 10.0) == pytest.approx(1.8)
    assert cn_pressure({}, {**busy, "busy_seconds_total": 1.0, "queued_seconds_total": 1e3}, 10.0) <= 0.2
    assert cn_pressure(busy, busy, 10.0) == 0.0


def test_an_hn_is_pressed_by_full_windows_or_full_batches() -> None:
    """Whichever is fuller; an HN that nobody asks is not pressed."""
    windows = {"window": 4.0, "stay_seconds_total": 36.0, "batches_total": 10.0, "rows_total": 640.0}
    assert hn_pressure({}, windows, 10.0, largest_batch_rows=4_096) == pytest.approx(0.9)
    full = {"window": 4.0, "busy_seconds_total": 9.0, "batches_total": 10.0, "rows_total": 40_960.0}
    assert hn_pressure({}, full, 10.0, largest_batch_rows=4_096) == pytest.approx(0.9)
    assert hn_pressure({}, {}, 10.0, largest_batch_rows=4_096) == 0.0
    assert hn_pressure({}, {"window": 1.0, "stay_seconds_total": 1e6}, 10.0, largest_batch_rows=1) == 2.0


def test_a_gauge_reads_the_time_since_it_was_read() -> None:
    """Counters grow; what it says is of the last interval, and the same again at the same moment."""
    counters, now_s = {"busy_seconds_total": 0.0}, [0.0]
    gauge = Gauge(lambda: counters, cn_pressure, clock=lambda: now_s[0])
    now_s[0], counters["busy_seconds_total"] = 10.0, 5.0
    assert gauge.read() == gauge.read() == pytest.approx(0.5)
    now_s[0] = 20.0
    assert gauge.read() == 0.0
