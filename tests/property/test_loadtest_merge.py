"""Histograms of any partition of a run, merged, are the histogram of the whole run."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from plait_loadtest import histogram

values = st.lists(st.integers(0, 2 * histogram.HIGHEST_NS), max_size=60)


@given(values, st.integers(1, 7), st.randoms(use_true_random=False))
def test_merging_any_partition_equals_the_whole(taken, parts, random):
    """Bucket for bucket, whichever process counted which request."""
    where = [random.randrange(parts) for _ in taken]
    pieces = [
        histogram.of_ns(np.array([v for v, w in zip(taken, where, strict=True) if w == i], dtype=np.int64))
        for i in range(parts)
    ]
    whole = histogram.of_ns(np.array(taken, dtype=np.int64))
    merged = histogram.merged(pieces)
    assert merged.bucket.tolist() == whole.bucket.tolist()
    assert merged.count.tolist() == whole.count.tolist()


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
