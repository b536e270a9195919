"""The latency histogram: three digits, the same buckets as HdrHistogram, exact merging."""

from __future__ import annotations

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from plait_loadtest import histogram
from plait_loadtest.errors import ReportError


def latencies(n, seed=0):
    return np.random.default_rng(seed).lognormal(np.log(3e7), 1.0, n).astype(np.int64)


def test_buckets_are_those_of_hdrhistogram():
    """Each value falls into the bucket that the hdrhistogram package gives it, from 0 to 24 h."""
    hdr = HdrHistogram(1, histogram.HIGHEST_NS, histogram.DIGITS)
    edges = [0, 1, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 30_001, 10**6, 10**9, 3600 * 10**9, histogram.HIGHEST_NS]
    values = np.concatenate([np.array(edges), latencies(500)])
    assert histogram.bucket_of(values).tolist() == [hdr.get_counts_array_index(int(value)) for value in values]


def test_other_tools_read_a_stored_histogram():
    """HDR tools find the same percentiles in the text."""
    counted = histogram.of_ns(latencies(3000))
    theirs = HdrHistogram.decode(histogram.encoded(counted))
    assert theirs.get_total_count() == 3000
    assert theirs.get_value_at_percentile(99.0) == pytest.approx(counted.percentiles_ns([99.0])[0], rel=0.01)


@pytest.mark.parametrize("text", ["", "no base64 !", "HISTFAAAAAA=", "aGVsbG8gd29ybGQ="])
def test_garbage_is_an_error_of_ours(text):
    """What is no histogram is refused with a `ReportError`."""
    with pytest.raises(ReportError, match="histogram"):
        histogram.decoded(text)
