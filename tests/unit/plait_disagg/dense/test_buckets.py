"""Which batches share a program, from how many rows on it pays, and how a trial measures."""

from __future__ import annotations

import pytest
import torch

from plait_disagg.dense.buckets import Bucket, bucket_of, fewest, filled_up, pays_from
from plait_disagg.dense.trial import difference, medians


def test_a_bucket_holds_every_batch_between_its_ends():
    """However many users and rows, the bucket's ends are around them, and at most half is filled up."""
    for users in range(1, 70):
        for rows in range(users, 700, 7):
            bucket = bucket_of(users, rows, 1)
            assert bucket.fewest_users <= users <= bucket.users
            assert bucket.fewest_rows <= rows <= bucket.rows < max(2, 1.5 * rows)
            assert bucket_of(bucket.fewest_users, bucket.fewest_rows, 1) == bucket


@pytest.mark.parametrize(
    ("program_s", "wanted"),
    [
        (0.5, 49),  # faster than torch is at the fewest rows: always
        (1.5, 58),  # at 1.5 / .95 = 1.58 s torch would be at 49 + .58 * 15 rows
        (1.95, None),  # not clearly faster than torch at the most rows
        (3.0, None),
    ],
)
def test_a_program_pays_from_where_torch_takes_longer(program_s, wanted):
    """By the line between torch's two times."""
    bucket = Bucket(1, 64, 1)
    assert pays_from(bucket, program_s=program_s, torch_min_s=1.0, torch_max_s=2.0) == wanted


def test_a_program_is_never_chosen_where_torch_is_faster_by_the_same_line():
    """For every number of rows of a bucket: chosen exactly if it takes at most .95 of torch's time there."""
    bucket = bucket_of(1, 100, 1)
    for program_s in (0.9, 1.2, 1.7, 2.6):
        first = pays_from(bucket, program_s=program_s, torch_min_s=1.0, torch_max_s=2.5)
        for rows in range(bucket.fewest_rows, bucket.rows + 1):
            share = (rows - bucket.fewest_rows) / (bucket.rows - bucket.fewest_rows)
            torch_s = 1.0 + 1.5 * share
            if first is not None and rows >= first:
                assert program_s <= 0.95 * torch_s + 1e-9
            elif first is not None:
                assert program_s >= 0.95 * (torch_s - 1.5 / (bucket.rows - bucket.fewest_rows)) - 1e-9


def test_torch_slower_for_few_rows_than_for_many_is_no_division_by_zero():
    """Noise: the line may fall."""
    assert pays_from(Bucket(1, 64, 1), program_s=1.0, torch_min_s=2.0, torch_max_s=2.0) == 49
    assert pays_from(Bucket(1, 64, 1), program_s=2.0, torch_min_s=2.0, torch_max_s=2.0) is None
    assert pays_from(Bucket(1, 64, 1), program_s=2.0, torch_min_s=3.0, torch_max_s=1.0) is None


class Clock:
    """Moves when something runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def taking(self, name, *seconds):
        """Something that takes these seconds in turn, again and again."""
        calls = iter(range(10**6))

        def run() -> None:
            self.order.append(name)
            self.now_s += seconds[next(calls) % len(seconds)]

        return run


def test_a_trial_takes_turns_and_leaves_out_the_first_call_of_each():
    """A first call that finds cold caches (9 s) never counts; the median of the others does."""
    clock = Clock()
    taken_s = medians({"a": clock.taking("a", 9.0, 1.0, 1.0, 1.2, 1.4), "b": clock.taking("b", 5.0)}, clock)
    assert taken_s == pytest.approx({"a": 1.1, "b": 5.0})
    assert clock.order == (["a"] * 5 + ["b"] * 5) * 2  # 0.15 s are long over after two turns


def test_a_quick_trial_ends_after_a_fixed_number_of_turns():
    """Microseconds each: no need for all the time."""
    clock = Clock()
    medians({"a": clock.taking("a", 1e-6)}, clock)
    assert len(clock.order) == 100


def test_a_difference_is_relative_only_to_outputs_above_one():
    """Scores of 0 to 1 count as they are, and NaN is never small."""
    small, large = torch.tensor([0.5]), torch.tensor([200.0])
    assert difference({"s": small + 1e-3}, {"s": small}) == pytest.approx(1e-3, rel=1e-3)
    assert difference({"s": large + 1e-3}, {"s": large}) == pytest.approx(5e-6, rel=0.1)
    assert not difference({"s": torch.tensor([float("nan")])}, {"s": small}) <= 1.0
    nan = torch.tensor([float("nan")])
    for first, second in ((nan, large), (small, nan)):
        assert not difference({"s": first, "t": second}, {"s": small, "t": large}) <= 1.0
        assert not difference({"s": small, "t": large}, {"s": first, "t": second}) <= 1.0


def test_row_counts_are_few_and_have_no_gaps():
    """Every number belongs to one of them."""
    counts = sorted({filled_up(rows) for rows in range(1, 1025)})
    assert counts == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    for before, count in zip([0, *counts], counts, strict=False):
        assert fewest(count) == before + 1
