"""Arrivals of a trace: numbers or dates, plain or gzip, and errors that name the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from plait_loadtest.arrivals import schedule
from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import TraceArrivals
from plait_loadtest.traces import read_times


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    "lines",
    [
        ("what,at", "a,1003.5", "b,1001", "", "c,1002"),
        ("at", "2024-11-15 16:57:50", "2024-11-15T16:57:52.5Z", "2024-11-15T17:57:51+01:00"),
    ],
)
def test_times_are_numbers_or_dates_in_any_order(tmp_path, lines):
    """Sorted, and counted from the earliest; other columns and blank lines do not matter. Dates are ISO 8601, with a
    space for the T as databases write it; no zone means UTC."""
    path = write(tmp_path / "t.csv", *lines)
    assert read_times(path, "at").tolist() == [0.0, 1.0, 2.5]
    (packed := tmp_path / "t.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_times(packed, "at").tolist() == [0.0, 1.0, 2.5]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("at\n1\n2\nthree\n", "line 4: 'three' is not a number of seconds$"),
        ("at\n2024-11-15\n17\nx\n", "line 3: '17' is not a date$"),
        ("at,b\n1,1\n\n,2\n", "line 4: '' is not a number"),
        ("b,at\n1,1\n2\n", "line 3: '' is not a number"),
        ("at\nnan\n", "line 2: 'nan' is not a number of seconds or a date"),
        ("at\n1\ninf\n", "line 3: 'inf' is not a number"),
        ("when,what\n1,2\n", "no column 'at'; its columns are when, what$"),
        ("", "no column 'at'"),
        ("at\n", "no row below its header"),
    ],
)
def test_what_can_not_be_read_is_named_by_line(tmp_path, content, says):
    """One sentence with file, line and what is wrong."""
    path = tmp_path / "t.csv"
    path.write_text(content)
    with pytest.raises(ScenarioError, match=says) as caught:
        read_times(path, "at")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"plain text", gzip.compress(b"at\n1\n" * 999, mtime=0)[:-30], b"\x1f\x8b\x08\x00" + b"\xff" * 40]
)
def test_a_damaged_file_is_no_traceback(tmp_path, content):
    """Not gzip, cut short, or garbage inside: `ScenarioError`."""
    path = tmp_path / "t.csv.gz"
    path.write_bytes(content)
    with pytest.raises(ScenarioError, match=r"arrivals\.file"):
        read_times(path, "at")
    binary = tmp_path / "t.csv"
    binary.write_bytes(b"at\n\xff\xfe\n")
    with pytest.raises(ScenarioError, match="is not a CSV file"):
        read_times(binary, "at")


def trace(path, **settings) -> TraceArrivals:
    return TraceArrivals(file=path, column="at", **settings)


def test_offset_speed_and_warm_up_choose_the_window(tmp_path):
    """Seconds 10 to 18 of the trace at double speed: one second of warm-up and three measured."""
    path = write(tmp_path / "t.csv", "at", *(str(100 + i) for i in range(30)))
    times, warm_up = schedule(trace(path, offset_s=10, speed=2), duration_s=3, warm_up_s=1, count=None, seed=0)
    assert (times / 1e9).tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    assert warm_up == 2


def test_a_count_takes_so_many_of_the_trace(tmp_path):
    """Exactly so many after the warm-up; too many are an error that says so."""
    path = write(tmp_path / "t.csv", "at", *(str(i) for i in range(30)))
    times, warm_up = schedule(trace(path), duration_s=1, warm_up_s=5, count=7, seed=0)
    assert (warm_up, times.size) == (5, 12)
    with pytest.raises(ScenarioError, match=r"t\.csv: fewer than count = 26 requests"):
        schedule(trace(path), duration_s=1, warm_up_s=5, count=26, seed=0)


def test_an_empty_window_is_an_error(tmp_path):
    """A run that would measure nothing is refused before it starts."""
    path = write(tmp_path / "t.csv", "at", "0", "100")
    for settings in ({"offset_s": 10}, {"offset_s": 1000}):
        with pytest.raises(ScenarioError, match=r"no arrival in the part that is measured; change arrivals\.offset_s"):
            schedule(trace(path, **settings), duration_s=5, warm_up_s=0, count=None, seed=0)
