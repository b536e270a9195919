"""Latency histograms with three significant digits: counted by numpy, stored and exchanged as HDR histograms.

Unit: nanoseconds, 1 to 24 h. (In whole microseconds a loopback reply of 200 us would already be rounded by 0.5 %.)

Symbols: k = index of a bucket, as HdrHistogram numbers them; bucket k >= 2048 holds values whose top 11 bits agree,
so it is at most 1/1024 of its value wide and its middle is at most 0.05 % away from any value in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from plait_loadtest.errors import ReportError

HIGHEST_NS = 24 * 3600 * 10**9
DIGITS = 3
_HALF = 1024  # HdrHistogram's half sub-bucket count for three digits
_BITS = 11  # of a value that choose its bucket

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histogram:
    """A histogram: `bucket` int64 (K,), ascending, without repeats; `count` int64 (K,), positive."""

    bucket: Ints
    count: Ints

    @property
    def n(self) -> int:
        """The number of values counted."""
        return int(self.count.sum())

    @property
    def middle_ns(self) -> Floats:
        """The middle of each bucket, float64 (K,)."""
        return middles_ns(self.bucket)

    def percentiles_ns(self, percents: Iterable[float]) -> list[float]:
        """Return percentiles with numpy's linear interpolation between ranks, within 0.05 %; nan without values."""
        n = self.n
        wanted = np.asarray(list(percents), dtype=np.float64)
        if n == 0:
            return [float("nan")] * wanted.size
        rank = wanted / 100.0 * (n - 1)
        below = np.floor(rank).astype(np.int64)
        upto, middle = np.cumsum(self.count), self.middle_ns
        low = middle[np.searchsorted(upto, below, side="right")]
        high = middle[np.searchsorted(upto, np.minimum(below + 1, n - 1), side="right")]
        return [float(value) for value in low + (rank - below) * (high - low)]


EMPTY = Histogram(bucket=np.zeros(0, np.int64), count=np.zeros(0, np.int64))


def of_ns(values_ns: npt.NDArray[np.integer[Any]]) -> Histogram:
    """Count int values (N,); negative ones count as 0, values above 24 h as 24 h."""
    bucket, count = np.unique(bucket_of(np.asarray(values_ns, dtype=np.int64)), return_counts=True)
    return Histogram(bucket=bucket, count=count.astype(np.int64))


def bucket_of(values_ns: Ints) -> Ints:
    """Return the bucket of each value, int64, same shape."""
    value = np.clip(values_ns, 0, HIGHEST_NS)
    # frexp gives the bit length exactly: every value is far below 2**53.
    shift = np.maximum(np.frexp(value.astype(np.float64))[1] - _BITS, 0).astype(np.int64)
    return np.asarray(shift * _HALF + (value >> shift))


def middles_ns(bucket: Ints) -> Floats:
    """Return the middle of each bucket, float64, same shape. Single-value buckets are exact."""
    shift = np.maximum(bucket // _HALF - 1, 0)
    lowest = (bucket - shift * _HALF) << shift
    return np.asarray(lowest + ((np.int64(1) << shift) - 1) / 2.0)


def encoded(histogram: Histogram) -> str:
    """Return the HdrHistogram V2 text (base64, compressed), readable by HdrHistogram tools of any language."""
    from hdrh.histogram import HdrHistogram  # type: ignore[import-untyped]

    hdr = HdrHistogram(1, HIGHEST_NS, DIGITS)
    for value, count in zip(histogram.middle_ns.tolist(), histogram.count.tolist(), strict=True):
        hdr.record_value(int(value), count)
    text = hdr.encode()
    return text.decode("ascii") if isinstance(text, bytes) else str(text)


def decoded(text: str) -> Histogram:
    """Decode the output of `encoded`. Raises `ReportError` if `text` is no such histogram."""
    from hdrh.histogram import HdrHistogram

    try:
        hdr = HdrHistogram.decode(text)
        counts = np.frombuffer(hdr.counts, dtype=np.int64)
    except Exception as error:  # the library raises its own kinds, zlib's and TypeError
        raise ReportError("a histogram in the report cannot be read") from error
    if hdr.significant_figures != DIGITS or hdr.unit_magnitude != 0:
        raise ReportError("a histogram in the report has another resolution than three digits of a nanosecond")
    bucket = np.flatnonzero(counts)
    return Histogram(bucket=bucket.astype(np.int64), count=counts[bucket].astype(np.int64))
