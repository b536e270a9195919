"""Arrival times: the laws they follow, the warm-up, counts, and traces: numbers or dates, plain or gzip, with errors
that name the line.

Statistical tests on fixed seeds are deterministic; their seed (0) was not chosen, and a right generator had a
chance of 1e-3 to need another. Tests on fresh seeds fail by chance once in a million runs.
"""

from __future__ import annotations

import gzip
import secrets
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from plait_loadtest.arrivals import MAX_REQUESTS, rate_profile, read_times, schedule
from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import (
    ConstantArrivals,
    GammaArrivals,
    PoissonArrivals,
    RampArrivals,
    StepArrivals,
    TraceArrivals,
)

FIXED, FRESH = 1e-3, 1e-6


def draw(arrivals, *, duration_s=20.0, warm_up_s=0.0, count=None, seed=0):
    """Seconds, and the number of warm-up requests."""
    times, warm_up = schedule(arrivals, duration_s=duration_s, warm_up_s=warm_up_s, count=count, seed=seed)
    assert times.dtype == np.int64
    return times / 1e9, warm_up


def seeds_and_chances():
    return [(0, FIXED), (secrets.randbits(62), FRESH)]


def gaps(times_s):
    return np.diff(times_s, prepend=0.0)


def test_poisson_gaps_are_exponential():
    """Kolmogorov-Smirnov of some 20,000 gaps against the exponential law."""
    for seed, chance in seeds_and_chances():
        times, _ = draw(PoissonArrivals(rate_per_s=1000), seed=seed)
        assert stats.kstest(gaps(times), stats.expon(scale=1e-3).cdf).pvalue > chance, f"seed {seed}"


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_gaps_are_gamma(burstiness):
    """Kolmogorov-Smirnov against the gamma law of that shape and mean."""
    for seed, chance in seeds_and_chances():
        # One a second: at high rates bursts have many gaps below the nanosecond that times are rounded to.
        times, _ = draw(GammaArrivals(rate_per_s=1, burstiness=burstiness), duration_s=20_000, seed=seed)
        law = stats.gamma(burstiness, scale=1 / burstiness)
        assert stats.kstest(gaps(times), law.cdf).pvalue > chance, f"seed {seed}"


@pytest.mark.parametrize(("start", "end"), [(0.0, 2000.0), (2000.0, 0.1)])
def test_a_ramp_is_a_poisson_process_of_that_rate(start, end):
    """Time-rescaled by the expected number of requests, gaps are exponential of mean 1 (Kolmogorov-Smirnov)."""
    for seed, chance in seeds_and_chances():
        times, _ = draw(RampArrivals(rate_per_s=start, to_rate_per_s=end), seed=seed)
        expected = start * times + (end - start) * times**2 / 40
        assert stats.kstest(gaps(expected), stats.expon.cdf).pvalue > chance, f"seed {seed}"


def test_a_step_has_the_rate_of_each_stage():
    """Requests of each stage are Poisson numbers of its rate times its length; each bound fails once in a million."""
    times, _ = draw(StepArrivals(stages=((2, 1000), (3, 0), (1, 50))), duration_s=10, seed=secrets.randbits(62))
    counts = np.histogram(times, bins=[0, 2, 5, 10])[0]
    assert counts[1] == 0
    for count, mean in ((counts[0], 2000), (counts[2], 250)):
        assert stats.poisson(mean).ppf(FRESH / 2) <= count <= stats.poisson(mean).isf(FRESH / 2)


def test_constant_arrivals_have_equal_gaps_and_start_at_once():
    """Ten a second are at 0, 0.1, ...: exactly ten in each second."""
    times, warm_up = draw(ConstantArrivals(rate_per_s=10), duration_s=2, warm_up_s=1)
    assert times.tolist() == [i / 10 for i in range(30)]
    assert warm_up == 10


@pytest.mark.parametrize(
    "arrivals",
    [
        ConstantArrivals(rate_per_s=37),
        PoissonArrivals(rate_per_s=37),
        GammaArrivals(rate_per_s=37, burstiness=0.3),
        RampArrivals(rate_per_s=10, to_rate_per_s=60),
        StepArrivals(stages=((1, 20), (1, 60))),
    ],
    ids=lambda arrivals: arrivals.kind,
)
def test_a_seed_says_everything(arrivals):
    """Same seed, same times; another seed, others (but for equal gaps); a longer run begins alike."""
    times, _ = draw(arrivals, seed=5)
    assert np.array_equal(times, draw(arrivals, seed=5)[0])
    assert np.array_equal(times, draw(arrivals, seed=6)[0]) == (arrivals.kind == "constant")
    if arrivals.kind != "ramp":  # its slope goes by the duration
        longer, _ = draw(arrivals, duration_s=30, seed=5)
        assert np.array_equal(times, longer[: times.size])


def test_ramps_and_steps_begin_after_the_warm_up():
    """The warm-up runs at the first rate; the ramp ends at its last rate."""
    ramp = rate_profile(RampArrivals(rate_per_s=10, to_rate_per_s=30), duration_s=20, warm_up_s=5)
    assert ramp.expected(5) == 50
    assert ramp.expected(25) == 50 + 20 * 20
    assert ramp.expected(26) == 50 + 20 * 20 + 30
    step = rate_profile(StepArrivals(stages=((2, 10), (1, 40))), duration_s=20, warm_up_s=5)
    assert [step.expected(time_s) for time_s in (5, 7, 8)] == [50, 70, 110]


def test_what_can_not_be_scheduled_is_refused():
    """A plan too large for memory, a count that is never reached."""
    with pytest.raises(ScenarioError, match="more than 50,000,000"):
        draw(PoissonArrivals(rate_per_s=MAX_REQUESTS), duration_s=2)
    with pytest.raises(ScenarioError, match="fewer than count = 100 requests"):
        draw(StepArrivals(stages=((1, 10), (1, 0))), count=100)


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
