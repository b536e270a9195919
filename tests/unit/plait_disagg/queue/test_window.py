"""The window of batches on their way to an HN, and what it does to many CNs that send to one."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass

import pytest

from plait_disagg.queue.window import Window


@dataclass(frozen=True, kw_only=True)
class Incast:
    """What came of it once it had settled."""

    batches_per_s: float
    queued_s: float
    sizes: tuple[int, ...]


SECONDS = 1.5


def run_incast(cns: int, *, adapts: bool = True, dense_s: float = 1e-3, wire_s: float = 3e-4) -> Incast:
    """``cns`` CNs for `SECONDS`, of which the last two thirds are counted. Every CN has a batch ready whenever its
    window has room, made in no time. The HN computes one batch after the other."""
    chance, numbers, free_s = random.Random(1), itertools.count(), 0.0
    windows = [Window(max_size=16, adapts=adapts) for _ in range(cns)]
    open_now = [0] * cns
    waits: list[tuple[float, float]] = []
    events: list[tuple[float, int, int, float, dict[str, float]]] = []

    def send(cn: int, now_s: float) -> None:
        while open_now[cn] < windows[cn].size:
            open_now[cn] += 1
            heapq.heappush(events, (now_s + wire_s * (1.0 + chance.random()), next(numbers), cn, now_s, {}))

    for cn in range(cns):
        send(cn, chance.random() * dense_s)
    while events[0][0] < SECONDS:
        now_s, _, cn, sent_s, done = heapq.heappop(events)
        if done:
            windows[cn].answered(made_s=0.0, away_s=now_s - sent_s, open_now=open_now[cn], **done)
            open_now[cn] -= 1
            send(cn, now_s)
        else:
            begin_s, took_s = max(now_s, free_s), dense_s * (1.0 + 0.2 * chance.random())
            free_s = begin_s + took_s
            waits.append((begin_s, begin_s - now_s))
            done = {"queued_s": begin_s - now_s, "dense_s": took_s}
            heapq.heappush(events, (free_s + wire_s, next(numbers), cn, sent_s, done))
    counted = [wait_s for begin_s, wait_s in waits if begin_s > SECONDS / 3]
    return Incast(
        batches_per_s=len(counted) / (free_s - SECONDS / 3),
        queued_s=sum(counted) / len(counted),
        sizes=tuple(window.size for window in windows),
    )


def answered(window: Window, *, queued_s: float, dense_s: float, open_now: int) -> None:
    """A batch that was made in no time and is long on its way."""
    window.answered(made_s=1e-6, away_s=queued_s + 1.0, queued_s=queued_s, dense_s=dense_s, open_now=open_now)


@pytest.mark.parametrize("cns", [4, 12])
def test_incast_is_tamed_and_costs_no_throughput(cns: int) -> None:
    """A fixed window makes a queue of all CNs' windows; the adapted one of about a batch per CN, as fast."""
    fixed, adapted = run_incast(cns, adapts=False), run_incast(cns)
    assert fixed.queued_s > 12 * cns * 1e-3
    assert adapted.queued_s < 0.1 * fixed.queued_s
    assert adapted.batches_per_s > 0.98 * fixed.batches_per_s


def test_cns_get_about_the_same() -> None:
    """No CN keeps a large window while others have none."""
    sizes = run_incast(4, dense_s=1e-4, wire_s=1e-3).sizes
    assert max(sizes) - min(sizes) <= 5


def test_a_window_that_is_not_used_does_not_grow() -> None:
    """One batch at a time says nothing about what two would meet."""
    window = Window(max_size=16)
    for _ in range(100):
        answered(window, queued_s=0.0, dense_s=0.001, open_now=1)
    assert window.size == 4


def test_a_window_shrinks_once_per_round_and_never_below_one() -> None:
    """Answers to what was sent before a decrease do not count again."""
    window = Window(max_size=64)
    for _ in range(2_000):
        answered(window, queued_s=0.0, dense_s=0.001, open_now=64)
    before = window.size
    assert before > 32
    for _ in range(before - 1):
        answered(window, queued_s=1.0, dense_s=0.001, open_now=before)
    assert window.size == int(before * 0.7)
    for _ in range(1_000):
        answered(window, queued_s=1.0, dense_s=0.001, open_now=1)
    assert window.size == 1


def test_a_fixed_window_stays() -> None:
    """As the knob says, whatever the HN reports; knobs change it at once."""
    window = Window(max_size=4, adapts=False)
    answered(window, queued_s=1.0, dense_s=0.001, open_now=4)
    assert window.size == 4
    window.max_size = 2
    assert window.size == 2


@pytest.mark.parametrize(
    ("made_s", "away_s", "dense_s", "size"),
    [
        (4e-4, 3e-4, 1e-4, 1),  # the answer is back before the next batch is made: two would be smaller, not sooner
        (4e-4, 9e-4, 1e-4, 3),  # the way is long: so many keep the CN busy
        (4e-3, 3e-3, 2e-3, 2),  # both sides compute for long, so they should at once
        (1e-3, 9e-3, 8e-3, 2),  # the HN is the slower one: one there, one on its way
        (1e-4, 2e-2, 1e-4, 16),  # as far as the knob allows
    ],
)
def test_a_window_is_what_keeps_the_slower_side_busy(made_s: float, away_s: float, dense_s: float, size: int) -> None:
    """It grows no further, however little batches wait at the HN, and follows when times change."""
    window = Window(max_size=16)
    for _ in range(400):
        window.answered(made_s=made_s, away_s=away_s, queued_s=0.0, dense_s=dense_s, open_now=16)
    assert window.size == size
    for _ in range(100):
        window.answered(made_s=4e-4, away_s=3e-4, queued_s=0.0, dense_s=1e-4, open_now=1)
    assert window.size == 1
