"""Comparing two reports: real changes are found, noise is not."""

from __future__ import annotations

import json
from functools import cache

import pytest

from plait_loadtest import compare as comparing
from plait_loadtest.compare import as_document, as_text, compare
from plait_loadtest.errors import ReportError
from plait_loadtest.report.document import report
from plait_loadtest.values import RequestOutcome
from support.loadtest_records import queue, records, scenario, session


@cache
def of_queue(arrivals_seed, *, mean_service_ms=6.0, **settings):
    """A report of an M/M/1 server at 100/s: its requests share queues, as real ones do."""
    rows = queue(100.0, 30.0, mean_service_ms=mean_service_ms, seed=arrivals_seed)
    return report(session(rows, scenario(duration_s=30.0, **settings)))


def test_the_same_distribution_is_rarely_a_regression():
    """Three pairs of runs of one server: none. The nominal rate is 0.5 % a pair (1 % both ways); 150 other pairs had 1.
    The seeds are fixed."""
    assert not any(compare(of_queue(2 * i), of_queue(2 * i + 1)).regressed for i in range(3))


def test_a_real_regression_is_found():
    """A server that takes 30 % longer (load 0.6 -> 0.78: latency doubles) is worse; the other way round, better."""
    before, after = of_queue(0), of_queue(100, mean_service_ms=7.8)
    worse, better = compare(before, after), compare(after, before)
    assert worse.regressed
    assert not better.regressed
    assert {change.verdict for change in better.changes if change.metric == "p95_ms"} == {"better"}
    p95 = next(change for change in worse.changes if change.metric == "p95_ms")
    assert p95.low <= p95.change <= p95.high
    assert p95.low > 0.0


@pytest.mark.parametrize(
    ("share", "ends"), [(30, RequestOutcome.HTTP_5XX), (1, RequestOutcome.UNFINISHED), (20, RequestOutcome.UNFINISHED)]
)
def test_new_errors_are_a_regression(share, ends):
    """From none: compared by difference, there is no ratio. Requests that never ended are errors too, all of them or
    one in 20, whatever the others took."""
    at_s = [i / 100.0 for i in range(3000)]
    before, after = records(at_s, 20.0), records(at_s, 20.0)
    after["outcome"][::share] = ends
    outcome = compare(*(report(session(rows, scenario(duration_s=30.0))) for rows in (before, after)))
    worse = next(change for change in outcome.changes if change.metric == "error_rate")
    assert (outcome.regressed, worse.verdict, worse.after) == (True, "worse", pytest.approx(1 / share))


def test_the_p99_of_thirty_decides_nothing():
    """Thirty requests, the slowest a hundred times as slow: no p99 is compared."""
    before, after = (records([i / 10.0 for i in range(30)], 20.0) for _ in range(2))
    after["done_ns"][7] += 2_000_000_000
    outcome = compare(*(report(session(rows, scenario(slo=None, duration_s=3.0))) for rows in (before, after)))
    assert "p99_ms" not in {change.metric for change in outcome.changes}
    assert not outcome.regressed


def test_a_report_equals_itself():
    """Nothing changed, whatever was drawn; JSON and text say so."""
    one = json.loads(json.dumps(of_queue(7)))
    outcome = compare(one, one)
    assert not outcome.regressed
    assert {change.change for change in outcome.changes} == {0.0}
    assert outcome.differences == ()
    assert json.loads(as_document(outcome))["regressed"] is False
    assert as_text(outcome).endswith("no regression beyond noise")


def test_a_small_change_does_not_count_however_sure():
    """1 % slower, without any noise: below the least change of 5 %, but above one of 0.5 %."""
    at_s = [i / 100.0 for i in range(3000)]
    a, b = (report(session(records(at_s, ms), scenario(duration_s=30.0))) for ms in (20.0, 20.2))
    assert not compare(a, b).regressed
    assert compare(a, b, least_change=0.005).regressed


def test_invalid_runs_and_other_files_are_refused(tmp_path):
    """Comparing what proves nothing is an error, and so is what is no report."""
    valid = of_queue(1)
    invalid = report(session(queue(100.0, 30.0, mean_service_ms=6.0), scenario(duration_s=30.0), echo_ms=50.0))
    with pytest.raises(ReportError, match="B is an invalid run"):
        compare(valid, invalid)
    few = report(session(records([0.1, 0.2], 20.0)))
    with pytest.raises(ReportError, match="fewer than 30"):
        compare(few, few)
    for name, text in (("a.json", "{"), ("b.json", "[1]"), ("c.json", '{"format": "other"}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ReportError, match="report"):
            comparing.read(tmp_path / name)
    with pytest.raises(ReportError, match="cannot be read"):
        comparing.read(tmp_path / "absent.json")
    for damage in ({"valid": True}, valid | {"histograms": {}}, valid | {"classes": None}):
        with pytest.raises(ReportError, match="damaged"):
            compare(valid, damage)
