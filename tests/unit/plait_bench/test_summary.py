"""Percentiles of the benchmarks."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait_bench.benchmark import ResultRow, percentile


def summarise(values):
    """The row of some rounds."""
    return ResultRow.of(values, system="", workload="", metric="", unit="")


values = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50)


def test_percentiles_are_linear_between_neighbours():
    """Of 0, 10, 20, 30, 40, 50: one fifth is 10, one half 25."""
    ordered = [50.0, 0.0, 30.0, 10.0, 40.0, 20.0]
    assert [percentile(ordered, share) for share in (0.0, 0.2, 0.5, 1.0)] == [0.0, 10.0, 25.0, 50.0]


@given(values)
def test_the_summary_is_ordered_and_its_value_the_median(taken):
    """p20 <= median <= p80, all inside the values; the median is the library's."""
    summary = summarise(taken)
    assert min(taken) <= summary.p20 <= summary.value <= summary.p80 <= max(taken)
    assert summary.value == pytest.approx(statistics.median(taken))
    assert summary.n == len(taken)


def test_nothing_is_made_up():
    """Without values there is no summary."""
    with pytest.raises(ValueError, match="no values"):
        summarise([])
