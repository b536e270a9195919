"""Link parameters from measurements: output of perftest (ib_send_lat, ib_write_lat, ib_send_bw, ib_write_bw) or a CSV.

Latencies are one-way (perftest prints half a round trip, and its median as `t_typical`). Small ones are fitted by
LogGP: two lines with one slope, below and above the inline limit; large ones by alpha + n / beta, with beta from a
bandwidth test if there is one. Errors are relative to the value, so that every size carries weight. Parameters that
no measurement of this kind can show are taken from a base link, and their source is recorded as such.

The CSV header has `bytes` and one or more of `latency_us`, `bandwidth_gbit_per_s`, `rate_per_s`; cells may
be empty.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from plait_fabric.link.link import PARAMETERS, Link
from plait_fabric.link.link_files import SourcedLink

_MIB = 0x100000
"""perftest's MB (perftest_parameters.c: FORMAT_MB 0x100000)."""
_MAX_ERROR = 0.5
"""The max relative error of a fit; beyond it the numbers describe something else, or two links."""
_LONGEST_TEXT = 1 << 20
_TINY_BYTES = 256
"""The message size up to which a bandwidth test shows the message rate."""
_LARGE_BYTES = 65_536
"""The message size from which a bandwidth test shows the line rate rather than the message rate."""


class BadMeasurement(ValueError):
    """A measurement file cannot be read or is inconsistent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One line of a measurement; values that were not measured are None."""

    nbytes: int
    latency_s: float | None = None
    bytes_per_s: float | None = None
    rate_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """The contents of a file. `inline_bytes`: the inline limit that it reports."""

    samples: tuple[LinkSample, ...]
    inline_bytes: int | None = None


def parse_measurements(text: str) -> Measurements:
    """Parse either kind of file. Raises `BadMeasurement`, which names the line."""
    if len(text) > _LONGEST_TEXT:
        raise BadMeasurement(f"longer than {_LONGEST_TEXT} characters")
    if "#bytes" in text:
        return _parse_perftest(text)
    return Measurements(samples=tuple(_parse_csv(text)))


def calibrate(name: str, found: Iterable[Measurements], base: SourcedLink, *, source: str) -> SourcedLink:
    """Return a link fitted to the measurements. `source`: what to call them. Raises `BadMeasurement`, `BadLink`."""
    found = tuple(found)
    samples = [sample for one in found for sample in one.samples]
    limits = [one.inline_bytes for one in found if one.inline_bytes is not None]
    inline_bytes = max(limits, default=base.link.inline_bytes)
    values: dict[str, Any] = {"inline_bytes": inline_bytes} if limits else {}
    latencies = sorted((s.nbytes, s.latency_s) for s in samples if s.latency_s is not None)
    small_bytes = base.link.small_bytes
    values |= _fit_large(samples, [pair for pair in latencies if pair[0] >= small_bytes])
    small = _fit_small([pair for pair in latencies if pair[0] <= small_bytes], inline_bytes, base.link, values)
    values |= small
    rates = [s.rate_per_s for s in samples if s.rate_per_s is not None and s.nbytes <= _TINY_BYTES]
    if rates:
        values["gap_s"] = 1 / max(rates)
    if not values.keys() - {"inline_bytes"}:
        raise BadMeasurement("there are too few sizes to fit anything: two latencies of small or of large messages")
    implied = {} if small else _implied_small(base.link, values)
    fitted: dict[str, Any] = {"name": name, **values, **implied}
    link = replace(base.link, **fitted)
    worst, nbytes = fit_error(link, latencies)
    if worst > _MAX_ERROR:
        raise BadMeasurement(
            f"the link that fits best is {worst:.0%} off at {nbytes} bytes: these are not one link's times"
        )
    sources = dict.fromkeys(PARAMETERS, f"not measured; as {base.link.name}")
    sources |= dict.fromkeys(values, f"fitted to {source}")
    sources |= dict.fromkeys(implied, f"not measured; follows from the large messages of {source}")
    return SourcedLink(link=link, sources=sources)


def fit_error(link: Link, latencies: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """Return the max relative error of `Link.one_way_s` over (bytes, seconds), and where it occurs."""
    errors = [(abs(link.one_way_s(nbytes) / latency_s - 1), nbytes) for nbytes, latency_s in latencies]
    return max(errors, default=(0.0, 0))


def _fit_large(samples: Sequence[LinkSample], latencies: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Fit `alpha_s` and `bytes_per_s`, or those of the two for which there are samples."""
    rates = [s.bytes_per_s for s in samples if s.bytes_per_s is not None and s.nbytes >= _LARGE_BYTES]
    if rates:
        bytes_per_s = max(rates)
        rest_s = [latency_s - nbytes / bytes_per_s for nbytes, latency_s in latencies]
        # Where the transfer itself is most of the time, what is left over is noise: the smallest sizes tell alpha.
        return {"bytes_per_s": bytes_per_s} | ({"alpha_s": float(np.median(rest_s[:4]))} if rest_s else {})
    if len({nbytes for nbytes, _ in latencies}) < 2:
        return {}
    alpha_s, s_per_byte = _least_squares([(1.0, nbytes) for nbytes, _ in latencies], [t for _, t in latencies])
    if not s_per_byte > 0:
        raise BadMeasurement("bytes_per_s: larger messages do not take longer")
    return {"alpha_s": alpha_s, "bytes_per_s": 1 / s_per_byte}


def _fit_small(
    latencies: Sequence[tuple[int, float]], inline_bytes: int, base: Link, large: Mapping[str, float]
) -> dict[str, float]:
    """Fit `wire_s`, `small_s_per_byte` and, if there are sizes on both sides of the inline limit, `fetch_s`."""
    if len({nbytes for nbytes, _ in latencies}) < 2:
        return {}
    both = latencies[0][0] <= inline_bytes < latencies[-1][0]
    rows: list[tuple[float, ...]] = [
        (1.0, nbytes - 1, float(both and nbytes > inline_bytes)) for nbytes, _ in latencies
    ]
    if not both:
        rows = [row[:2] for row in rows]
    fitted = _least_squares(rows, [latency_s for _, latency_s in latencies])
    slowest = 1 / large.get("bytes_per_s", base.bytes_per_s)
    fetch_s = fitted[2] if both else base.fetch_s
    starts_s = fitted[0] if both or latencies[-1][0] <= inline_bytes else fitted[0] - fetch_s
    values = {"wire_s": starts_s - base.sender_s - base.completion_s, "small_s_per_byte": max(fitted[1], slowest)}
    return values | ({"fetch_s": max(0.0, fetch_s)} if both else {})


def _implied_small(base: Link, large: Mapping[str, Any]) -> dict[str, float]:
    """Derive small-message parameters from large ones.

    What is farther for one is farther for the other, and no byte is faster than the line.
    """
    further_s = large.get("alpha_s", base.alpha_s) - base.alpha_s
    bytes_per_s = large.get("bytes_per_s", base.bytes_per_s)
    # Divided as `Link` divides: times the reciprocal can come out one rounding earlier than what it allows.
    min_s = max(large.get("gap_s", base.gap_s), large.get("inline_bytes", base.inline_bytes) / bytes_per_s)
    implied = {
        "wire_s": max(base.wire_s + further_s, min_s),
        "small_s_per_byte": max(base.small_s_per_byte, 1 / bytes_per_s),
    }
    return {name: value for name, value in implied.items() if value != getattr(base, name)}


def _least_squares(rows: Sequence[Sequence[float]], times_s: Sequence[float]) -> list[float]:
    """Return the factors that minimize the sum of squared relative errors."""
    wanted = np.array(times_s)
    scaled = np.array(rows) / wanted[:, None]
    # Columns differ by nine orders of magnitude; scaled to one they do not lose digits.
    widths = np.abs(scaled).max(axis=0)
    widths[widths == 0] = 1.0
    solution = np.linalg.lstsq(scaled / widths, np.ones(len(times_s)), rcond=None)[0]
    return [float(value) for value in solution / widths]


# Reading.

_COLUMNS: Mapping[str, tuple[str, float]] = {
    "t_typical[usec]": ("latency_s", 1e-6),
    "t_median[usec]": ("latency_s", 1e-6),
    "BW average[MB/sec]": ("bytes_per_s", _MIB),
    "BW average[Gb/sec]": ("bytes_per_s", 1e9 / 8),
    "MsgRate[Mpps]": ("rate_per_s", 1e6),
}
_CSV_COLUMNS: Mapping[str, tuple[str, float]] = {
    "latency_us": ("latency_s", 1e-6),
    "bandwidth_gbit_per_s": ("bytes_per_s", 1e9 / 8),
    "rate_per_s": ("rate_per_s", 1.0),
}
_RANGES: Mapping[str, tuple[float, float]] = {
    "latency_s": (1e-8, 10.0),
    "bytes_per_s": (1e3, 1e13),
    "rate_per_s": (1.0, 1e11),
}
_INLINE = re.compile(r"Max inline data\s*:\s*(\d+)")


def _parse_perftest(text: str) -> Measurements:
    if re.search(r"RDMA_Read|Atomic", text):
        raise BadMeasurement("READ and atomic tests print round trips; send and write tests are wanted")
    samples: list[LinkSample] = []
    head: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#bytes"):
            head = [cell.strip() for cell in re.findall(r"#bytes|#iterations|[^\s\[\]#][^\[\]]*?\[[^\]]*\]", line)]
            if not set(head) & set(_COLUMNS):
                raise BadMeasurement(f"line {number}: none of {', '.join(_COLUMNS)} is a column")
            continue
        cells = line.split()
        if head and cells and cells[0].isdigit():
            if len(cells) != len(head):
                raise BadMeasurement(f"line {number}: {len(cells)} numbers under {len(head)} columns")
            samples.append(_sample(number, dict(zip(head, cells, strict=True)), "#bytes", _COLUMNS))
    if not samples:
        raise BadMeasurement("there is no line of results below its columns")
    limit = _INLINE.search(text)
    return Measurements(samples=tuple(samples), inline_bytes=int(limit[1]) if limit else None)


def _parse_csv(text: str) -> Iterable[LinkSample]:
    reader = csv.DictReader(io.StringIO(text), restkey="too many")
    columns = set(reader.fieldnames or ())
    if "bytes" not in columns or not columns & set(_CSV_COLUMNS) or columns - {"bytes"} - set(_CSV_COLUMNS):
        raise BadMeasurement(f"neither perftest's output nor a CSV of bytes and some of {', '.join(_CSV_COLUMNS)}")
    samples = []
    for row in reader:
        if "too many" in row:
            raise BadMeasurement(f"line {reader.line_num}: more cells than columns")
        samples.append(_sample(reader.line_num, row, "bytes", _CSV_COLUMNS))
    if not samples:
        raise BadMeasurement("there is no line below the head")
    return samples


def _sample(
    number: int, row: Mapping[str, str | None], key: str, columns: Mapping[str, tuple[str, float]]
) -> LinkSample:
    cell = row.get(key) or ""
    if not (cell.strip().isascii() and cell.strip().isdigit()) or not 0 < int(cell) <= 1 << 40:
        raise BadMeasurement(f"line {number}: {key.lstrip('#')}: {cell!r} is no number of bytes")
    values = {}
    for column, (field, scale) in columns.items():
        cell = row.get(column) or ""
        if cell.strip():
            values[field] = _value(number, column, cell, scale, _RANGES[field])
    return LinkSample(nbytes=int(row[key] or 0), **values)


def _value(number: int, column: str, cell: str, scale: float, within: tuple[float, float]) -> float:
    try:
        value = float(cell) * scale
    except ValueError:
        raise BadMeasurement(f"line {number}: {column}: {cell!r} is no number") from None
    if not math.isfinite(value) or not within[0] <= value <= within[1]:
        raise BadMeasurement(f"line {number}: {column}: {cell!r} is absurd")
    return value
