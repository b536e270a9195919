"""The window of batches on their way to an HN, and what it does to many CNs that send to one."""

from __future__ import annotations

import pytest

from plait_disagg.queue.window import Window
from support.rank_incast import run_incast


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
    assert far.sizes[0] >= 6
    assert far.batches_per_s > 5 * 80  # one at a time: 80


def test_a_window_that_is_not_used_does_not_grow() -> None:
    """One batch at a time says nothing about what two would meet."""
    window = Window(max_size=16)
    for _ in range(100):
        window.answered(queued_s=0.0, dense_s=0.001, open_now=1)
    assert window.size == 4


def test_a_window_shrinks_once_per_round_and_never_below_one() -> None:
    """Answers to what was sent before a decrease do not count again."""
    window = Window(max_size=64)
    for _ in range(2_000):
        window.answered(queued_s=0.0, dense_s=0.001, open_now=64)
    before = window.size
    assert before > 32
    for _ in range(before - 1):
        window.answered(queued_s=1.0, dense_s=0.001, open_now=before)
    assert window.size == int(before * 0.7)
    for _ in range(1_000):
        window.answered(queued_s=1.0, dense_s=0.001, open_now=1)
    assert window.size == 1


def test_a_fixed_window_stays() -> None:
    """As the knob says, whatever the HN reports; knobs change it at once."""
    window = Window(max_size=4, adapts=False)
    window.answered(queued_s=1.0, dense_s=0.001, open_now=4)
    assert window.size == 4
    window.max_size = 2
    assert window.size == 2
