"""The latency histogram: three digits, the same buckets as HdrHistogram, exact merging."""

from __future__ import annotations

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram

from plait_loadtest import histogram
from plait_loadtest.errors import ReportError


def latencies(n, seed=0):
    return np.random.default_rng(seed).lognormal(np.log(3e7), 1.0, n).astype(np.int64)


@pytest.mark.parametrize("n", [1, 2, 7, 100, 20_000])
def test_percentiles_agree_with_numpy(n):
    """Every percentile is within 0.1 % of np.percentile over the raw values, whatever their number."""
    values = latencies(n)
    percents = (0.0, 50.0, 90.0, 95.0, 99.0, 99.9, 100.0)
    ours = histogram.of_ns(values).percentiles_ns(percents)
    assert ours == pytest.approx(np.percentile(values, percents).tolist(), rel=1e-3)


def test_buckets_are_those_of_hdrhistogram():
    """Each value falls into the bucket that the hdrhistogram package gives it, from 0 to 24 h."""
    hdr = HdrHistogram(1, histogram.HIGHEST_NS, histogram.DIGITS)
    edges = [0, 1, 1023, 1024, 2047, 2048, 2049, 4095, 4096, 30_001, 10**6, 10**9, 3600 * 10**9, histogram.HIGHEST_NS]
    values = np.concatenate([np.array(edges), latencies(500)])
    assert histogram.bucket_of(values).tolist() == [hdr.get_counts_array_index(int(value)) for value in values]


def test_a_stored_histogram_comes_back():
    """encode and decode keep every count, and other HDR tools read the same percentiles from the text."""
    counted = histogram.of_ns(latencies(3000))
    text = histogram.encoded(counted)
    back = histogram.decoded(text)
    assert back.bucket.tolist() == counted.bucket.tolist()
    assert back.count.tolist() == counted.count.tolist()
    theirs = HdrHistogram.decode(text)
    assert theirs.get_total_count() == 3000
    assert theirs.get_value_at_percentile(99.0) == pytest.approx(counted.percentiles_ns([99.0])[0], rel=0.01)


@pytest.mark.parametrize("text", ["", "no base64 !", "HISTFAAAAAA=", "aGVsbG8gd29ybGQ="])
def test_garbage_is_an_error_of_ours(text):
    """What is no histogram is refused with a `ReportError`."""
    with pytest.raises(ReportError, match="histogram"):
        histogram.decoded(text)


def test_nothing_has_no_percentiles():
    """An empty histogram says nan."""
    assert np.isnan(histogram.EMPTY.percentiles_ns([50.0])).all()
