"""Which batches share a program, from how many rows on it pays, and how a trial measures."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch

from plait_disagg.dense.trial import Bucket, bucket_of, difference, medians, pays_from


def test_a_bucket_holds_every_batch_between_its_ends():
    """However many users and rows, the bucket's ends are around them, and at most half is filled up. They are few."""
    assert len({bucket_of(1, rows, 1) for rows in range(1, 1025)}) == 20
    for users in range(1, 70):
        for rows in range(users, 700, 7):
            bucket = bucket_of(users, rows, 1)
            assert bucket.fewest_users <= users <= bucket.users
            assert bucket.fewest_rows <= rows <= bucket.rows < max(2, 1.5 * rows)
            assert bucket_of(bucket.fewest_users, bucket.fewest_rows, 1) == bucket


@pytest.mark.parametrize(
    ("program_s", "torch_min_s", "torch_max_s", "wanted"),
    [
        (0.5, 1.0, 2.0, 49),  # faster than torch is at the fewest rows: always
        (1.5, 1.0, 2.0, 58),  # at 1.5 / .95 = 1.58 s torch would be at 49 + .58 * 15 rows
        (1.95, 1.0, 2.0, None),  # not clearly faster than torch at the most rows
        (3.0, 1.0, 2.0, None),
        (1.0, 2.0, 2.0, 49),  # noise: torch may be no slower for more rows, or faster
        (2.0, 2.0, 2.0, None),
        (2.0, 3.0, 1.0, None),
    ],
)
def test_a_program_pays_from_where_torch_takes_longer(program_s, torch_min_s, torch_max_s, wanted):
    """By the line between torch's two times."""
    times = {"program_s": program_s, "torch_min_s": torch_min_s, "torch_max_s": torch_max_s}
    assert pays_from(Bucket(1, 64, 1), **times) == wanted


def test_a_trial_leaves_out_the_first_call_of_each_turn():
    """One that finds cold caches (9 s) never counts; the median of the others does."""
    now_s = [0.0]

    def taking(*seconds: float) -> Callable[[], None]:
        turns = cycle(seconds)

        def run() -> None:
            now_s[0] += next(turns)

        return run

    taken_s = medians({"a": taking(9.0, 1.0, 1.0, 1.2, 1.4), "b": taking(5.0)}, lambda: now_s[0])
    assert taken_s == pytest.approx({"a": 1.1, "b": 5.0})


def test_a_difference_is_relative_only_to_outputs_above_one():
    """Scores of 0 to 1 count as they are, and NaN is never small."""
    small, large = torch.tensor([0.5]), torch.tensor([200.0])
    assert difference({"s": small + 1e-3}, {"s": small}) == pytest.approx(1e-3, rel=1e-3)
    assert difference({"s": large + 1e-3}, {"s": large}) == pytest.approx(5e-6, rel=0.1)
    nan = torch.tensor([float("nan")])
    for first, second in ((nan, large), (small, nan)):
        assert not difference({"s": first, "t": second}, {"s": small, "t": large}) <= 1.0
        assert not difference({"s": small, "t": large}, {"s": first, "t": second}) <= 1.0
