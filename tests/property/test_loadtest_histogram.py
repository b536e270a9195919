"""Histograms are true to the values, and to what is stored of them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait_loadtest import histogram

values = st.lists(st.integers(0, 2 * histogram.HIGHEST_NS), max_size=60)


@given(st.lists(st.integers(0, histogram.HIGHEST_NS), min_size=1, max_size=60), st.floats(0.0, 100.0))
def test_a_percentile_lies_among_the_values(taken, percent):
    """Within half a bucket (0.05 %) of numpy's."""
    (ours,) = histogram.of_ns(np.array(taken, dtype=np.int64)).percentiles_ns([percent])
    theirs = float(np.percentile(np.array(taken, dtype=np.float64), percent))
    assert abs(ours - theirs) <= 0.001 * max(taken) + 1e-6
    assert min(taken) * 0.999 <= ours <= max(taken) * 1.001 + 1e-6


@given(values)
def test_the_stored_text_is_the_histogram(taken):
    """decode(encode(h)) == h for any values."""
    counted = histogram.of_ns(np.array(taken, dtype=np.int64))
    back = histogram.decoded(histogram.encoded(counted))
    assert (back.bucket.tolist(), back.count.tolist()) == (counted.bucket.tolist(), counted.count.tolist())
