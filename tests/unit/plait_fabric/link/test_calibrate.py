"""Calibration: perftest's output and CSV files become a link, or are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait_fabric.link.calibrate import BadMeasurement, LinkSample, Measurements, calibrate, parse_measurements
from plait_fabric.link.link import BadLink, Link
from plait_fabric.link.link_files import links_document, parse_links
from support.fabric_links import send_lat, shipped, write_bw

BASE = shipped()
FITTED = ("alpha_s", "bytes_per_s", "wire_s", "fetch_s", "small_s_per_byte", "gap_s")


def _calibrated(*texts: str) -> Link:
    return calibrate("mine", map(parse_measurements, texts), BASE, source="a test").link


@pytest.mark.parametrize("name", ["100g-same-switch", "100g-cross-pod", "200g-same-switch"])
def test_a_links_own_measurement_gives_it_back(name: str) -> None:
    """What ib_send_lat and ib_write_bw would print for a link, at their two decimals, is that link within 2 %."""
    link = shipped(name).link
    found = _calibrated(send_lat(link), write_bw(link))
    for field in FITTED:
        assert getattr(found, field) == pytest.approx(getattr(link, field), rel=0.02), field
    assert found.inline_bytes == link.inline_bytes


@given(st.floats(1e-6, 1e-4), st.floats(1e9, 1e11))
@example(1e-6, 1367731261.7109375)  # 188 bytes at its reciprocal round to less than 188 bytes divided by it
def test_alpha_and_beta_come_from_latencies_alone(alpha_s: float, bytes_per_s: float) -> None:
    """Large latencies that lie on a line give its two parameters, whatever they are."""
    sizes = (8_192, 65_536, 1 << 20, 1 << 24)
    samples = tuple(LinkSample(nbytes=n, latency_s=alpha_s + n / bytes_per_s) for n in sizes)
    link = calibrate("mine", [Measurements(samples=samples)], BASE, source="a test").link
    assert link.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)


def test_gigabits_are_read_as_such() -> None:
    """ib_write_bw --report_gbits has another unit in its head."""
    head = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
    text = f"{head}\n 65536      5000             97.70              97.60              0.186\n"
    assert _calibrated(text).bytes_per_s == pytest.approx(12.2e9)


def test_what_was_not_measured_says_so() -> None:
    """Each parameter's source tells a fitted value from one that was taken over, and the file reads back."""
    sourced = calibrate("mine", [parse_measurements(write_bw(BASE.link))], BASE, source="write_bw.txt")
    assert sourced.sources["bytes_per_s"] == "fitted to write_bw.txt"
    assert sourced.sources["alpha_s"] == "not measured; as 100g-same-switch"
    assert parse_links(links_document({"mine": sourced})) == {"mine": sourced}


_LAT = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither perftest's output nor a CSV"),
        ("bytes,latency_us\n", "no line below the head"),
        ("bytes,latency_us\n64,fast\n", "line 2: latency_us: 'fast' is no number"),
        ("bytes,latency_us\n64,-1\n", "line 2: latency_us: '-1' is absurd"),
        ("bytes,latency_us\n-64,1\n", "line 2: bytes: '-64' is no number of bytes"),
        ("bytes,latency_us\n64,1,2\n", "line 2: more cells than columns"),
        ("bytes,latency_us\n64,1\n", "too few sizes"),
        (_LAT, "no line of results"),
        (_LAT + " 64 1000 0.8 0.9\n", "line 2: 4 numbers under 5 columns"),
        ("RDMA_Read Latency Test\n" + _LAT + " 64 1000 1 1 1\n", "READ and atomic"),
        ("bytes,latency_us\n8192,3\n65536,2\n", "bytes_per_s: larger messages do not take longer"),
        ("bytes,latency_us\n8192,3\n16384,90\n32768,4\n1048576,900\n", "not one link's times"),
        ("bytes,latency_us\n2,0.05\n64,0.06\n128,0.08\n", "wire_s"),  # nothing is left for the wire
    ],
)
def test_bad_measurements_are_refused_by_name(text: str, why: str) -> None:
    """What cannot be read, is absurd, or does not fit any link is refused with its line or its parameter."""
    with pytest.raises((BadMeasurement, BadLink), match=why):
        _calibrated(text)
