"""The window of batches on their way to an HN, and what it does to many CNs that send to one."""

from __future__ import annotations

import pytest

from plait_disagg.queue.window import Window
from support.rank_incast import run_incast


def answered(window: Window, *, queued_s: float, dense_s: float, open_now: int) -> None:
    """A batch that was made in no time and is long on its way."""
    window.answered(made_s=1e-6, away_s=queued_s + 1.0, queued_s=queued_s, dense_s=dense_s, open_now=open_now)


@pytest.mark.parametrize("cns", [4, 12])
def test_incast_is_tamed_and_costs_no_throughput(cns: int) -> None:
    """A fixed window makes a queue of all CNs' windows; the adapted one of about a batch per CN, as fast."""
    fixed = run_incast(cns, most=16, adapts=False)
    adapted = run_incast(cns, most=16, adapts=True)
    assert fixed.queued_s > 12 * cns * 1e-3
    assert adapted.queued_s < 0.1 * fixed.queued_s
    assert adapted.batches_per_s > 0.98 * fixed.batches_per_s


def test_cns_get_about_the_same() -> None:
    """No CN keeps a large window while others have none."""
    sizes = run_incast(4, most=16, adapts=True, dense_s=1e-4, wire_s=1e-3).sizes
    assert max(sizes) - min(sizes) <= 5


def test_a_window_opens_where_the_way_is_long() -> None:
    """An HN that is far but quick is kept busy: more batches are on their way than one."""
    far = run_incast(1, most=16, adapts=True, dense_s=1e-3, wire_s=4e-3)
    assert far.sizes[0] >= 3
    assert far.batches_per_s > 5 * 80  # one at a time: 80


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
