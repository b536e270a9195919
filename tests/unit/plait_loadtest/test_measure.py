"""Records -> summary, on synthetic runs with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from plait_loadtest.measure import summarise
from plait_loadtest.scenario import ClosedLoopCallers, ImageClass, LoadTarget, RawClass, Slo
from plait_loadtest.values import RequestOutcome
from support.loadtest_records import MS, records, result, scenario

EVERY_10_MS = np.arange(1000) / 100.0


def codes(summary):
    return [reason.code for reason in summary.reasons]


def test_latency_counts_from_the_scheduled_time():
    """A stall that delays sending shows in latency, not in the time from sending."""
    rows = records(EVERY_10_MS, 500.0, lag_ms=490.0)
    total = summarise(result(rows), scenario()).total
    assert total.latency_ms.p50 == pytest.approx(500.0, rel=1e-3)
    assert total.service_ms.p50 == pytest.approx(10.0, rel=1e-3)


def test_rates_goodput_and_attainment():
    """1000 requests in 10 s, a tenth of them late: 100/s offered, 90/s good, attainment 0.9, and a p95 SLO missed."""
    rows = records(EVERY_10_MS, np.where(np.arange(1000) % 10 == 0, 200.0, 20.0))
    summary = summarise(result(rows), scenario())
    total = summary.total
    assert (total.offered_per_s, total.goodput_per_s, total.attainment) == pytest.approx((100.0, 90.0, 0.9))
    assert total.slo_met is False
    assert summary.valid
    assert summarise(result(rows), scenario(slo=Slo(latency_ms=100.0, percentile=90.0))).total.slo_met is True


def test_achieved_counts_successes_that_came_in_time():
    """A server that does 50/s of 100/s achieves 50/s, also if the rest comes later."""
    done_ms = (np.arange(1000) + 1) * 20.0
    rows = records(EVERY_10_MS, done_ms - EVERY_10_MS * 1e3)
    total = summarise(result(rows), scenario()).total
    assert total.achieved_per_s == pytest.approx(50.0, rel=0.01)
    assert total.succeeded == 1000


def test_the_warm_up_is_not_measured():
    """Neither its latency, nor its errors, nor its requests."""
    rows = records(np.arange(1200) / 100.0, np.where(np.arange(1200) < 200, 9000.0, 20.0))
    rows["warm_up"][:200] = True
    rows["outcome"][:100] = RequestOutcome.HTTP_5XX
    total = summarise(result(rows), scenario(warm_up_s=2.0)).total
    assert (total.requests, total.error_rate, total.errors) == (1000, 0.0, {})
    assert total.latency_ms.max == pytest.approx(20.0)
    assert total.offered_per_s == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("outcome", "has_latency", "is_error"),
    [
        (RequestOutcome.OK, True, False), (RequestOutcome.NOT_SENT, False, True), (RequestOutcome.CONNECT, False, True),
        (RequestOutcome.DNS, False, True), (RequestOutcome.TIMEOUT, True, True), (RequestOutcome.RESET, False, True),
        (RequestOutcome.TRUNCATED, True, True), (RequestOutcome.GARBLED, True, True), (RequestOutcome.HTTP_4XX, True,
        True), (RequestOutcome.HTTP_5XX, True, True), (RequestOutcome.HTTP_OTHER, True, True), (RequestOutcome.CHECK,
        True, True), (RequestOutcome.UNFINISHED, True, True), (RequestOutcome.CANCELLED, False, False),
    ],
)  # fmt: skip
def test_what_each_outcome_counts_as(outcome, has_latency, is_error):
    """Of 100 requests 10 end in an outcome: whether that has a latency, is an error, and is never good."""
    rows = records(np.arange(100) / 10.0, 20.0, outcome=np.where(np.arange(100) < 10, outcome, RequestOutcome.OK))
    total = summarise(result(rows), scenario()).total
    assert total.latency_ms.n == (100 if outcome is RequestOutcome.OK else 90)
    assert total.latency_all_ms.n == (100 if has_latency else 90)
    assert total.error_rate == pytest.approx(0.1 if is_error else 0.0)
    assert total.errors == ({} if outcome is RequestOutcome.OK else {outcome.name.lower(): 10})
    assert total.good == (100 if outcome is RequestOutcome.OK else 90)


def test_quick_failures_do_not_make_a_server_quick():
    """All latencies that are judged are of successes; of all answers there is one that says so."""
    is_refused = np.arange(1000) % 5 < 3
    rows = records(EVERY_10_MS, np.where(is_refused, 2.0, 600.0))
    rows["outcome"][is_refused] = RequestOutcome.HTTP_5XX
    rows["first_part_ns"] = rows["done_ns"]
    total = summarise(result(rows), scenario()).total
    quick = [total.first_byte_ms.p50, total.first_part_ms.p50, total.service_ms.p50]
    assert [total.latency_ms.p50, *quick] == pytest.approx([600.0] * 4, rel=1e-3)
    assert total.latency_all_ms.p50 == pytest.approx(2.0, rel=1e-3)


def test_the_commonest_reasons_of_each_error():
    """Three of each class of errors, of measured requests only; what has no known reason is none."""
    rows = records(np.arange(100) / 10.0, 20.0)
    rows["outcome"][:60], rows["outcome"][60:70] = RequestOutcome.HTTP_5XX, RequestOutcome.RESET
    rows["why"][:60] = np.repeat([1, 2, 3, 4, 0], [5, 30, 10, 5, 10])
    rows["why"][60:70] = 5
    rows["warm_up"][60:64] = True
    whys = ("", "500: a", "503: b", "502: c", "500: b", "closed")
    failures = summarise(result(rows, whys=whys), scenario()).total.failures
    told = {name: [(one.count, one.why) for one in each] for name, each in failures.items()}
    assert told == {"http_5xx": [(30, "503: b"), (10, "502: c"), (5, "500: a")], "reset": [(6, "closed")]}


def test_what_nobody_knows_is_not_judged_and_what_is_already_late_is():
    """Under way when the run was ended early: a miss if it had waited longer than the SLO, else left out."""
    rows = records(np.arange(100) / 10.0, 20.0)
    rows["outcome"][:2] = RequestOutcome.INTERRUPTED
    rows["done_ns"][0] = rows["scheduled_ns"][0] + 150 * MS
    rows["done_ns"][1] = rows["scheduled_ns"][1] + 50 * MS
    summary = summarise(result(rows, interrupted=True), scenario())
    assert (summary.total.judged, summary.total.good) == (99, 98)
    assert codes(summary) == ["interrupted"]


def test_an_interrupted_run_ends_when_it_was_interrupted():
    """What was not yet due does not count, and the rates are those of the time that passed."""
    rows = records(EVERY_10_MS, 20.0)
    rows["outcome"][500:] = RequestOutcome.INTERRUPTED
    rows["done_ns"][500:] = -1
    summary = summarise(result(rows, interrupted=True, wall_s=5.0), scenario())
    assert (summary.total.requests, summary.seconds) == (500, 5.0)
    assert summary.total.offered_per_s == pytest.approx(100.0)
    assert codes(summary) == ["interrupted"]


@pytest.mark.parametrize(
    ("slo_ms", "lag_ms", "code"),
    [(100.0, 4.9, None), (100.0, 5.1, "send_lag"), (1000.0, 49.0, None), (1000.0, 51.0, "send_lag")],
)
def test_late_sending_makes_a_run_invalid(slo_ms, lag_ms, code):
    """The limit of the p99 lag is max(5 ms, 5 % of the SLO)."""
    rows = records(EVERY_10_MS, 60.0, lag_ms=np.where(np.arange(1000) % 50 == 0, lag_ms, 0.1))
    summary = summarise(result(rows), scenario(slo=Slo(latency_ms=slo_ms)))
    assert codes(summary) == ([] if code is None else [code])


def test_other_reasons_for_an_invalid_run():
    """A slow host, requests that found no room, a dead worker, nothing measured."""
    rows = records(EVERY_10_MS, 20.0)
    assert codes(summarise(result(rows, echo_ms=6.0), scenario())) == ["echo"]
    assert codes(summarise(result(rows, problems=("worker 0 died",)), scenario())) == ["generator"]
    rows["outcome"][0] = RequestOutcome.NOT_SENT
    assert codes(summarise(result(rows), scenario())) == ["limit"]
    assert codes(summarise(result(rows[:0]), scenario())) == ["too_few"]


def test_classes_are_judged_by_their_own_slos():
    """Two classes, two SLOs: the total is met only if both are, and its attainment counts each by its own."""
    mix = (ImageClass(name="quick"), ImageClass(name="slow"))
    rows = records(EVERY_10_MS, np.where(np.arange(1000) % 2 == 0, 50.0, 500.0), kind=np.arange(1000) % 2)
    slos = {"quick": Slo(latency_ms=100.0), "slow": Slo(latency_ms=1000.0)}
    chosen = scenario(mix=mix, slo=None, slos=slos)
    summary = summarise(result(rows), chosen)
    assert [each.slo_met for each in summary.classes] == [True, True]
    assert (summary.total.slo_met, summary.total.attainment) == (True, 1.0)
    strict = scenario(mix=mix, slo=None, slos=slos | {"slow": Slo(latency_ms=400.0)})
    summary = summarise(result(rows), strict)
    assert (summary.total.slo_met, summary.total.attainment) == (False, 0.5)
    assert [each.goodput_per_s for each in summary.classes] == pytest.approx([50.0, 0.0])


def test_few_requests_show_a_miss_but_not_that_the_slo_was_met():
    """19 requests cannot show a p95, 20 can; 12 late ones of 15 show a miss, one late one does not."""
    for late, met in ((12, False), (1, None)):
        rows = records(np.arange(15) / 2.0, np.where(np.arange(15) < late, 500.0, 20.0))
        assert summarise(result(rows), scenario()).total.slo_met is met
    for n, met in ((19, None), (20, True)):
        summary = summarise(result(records(np.arange(n) / 2.0, 20.0)), scenario())
        assert summary.total.slo_met is met


def test_a_run_by_count_lasts_as_long_as_its_requests():
    """100 requests at 10/s are 10/s, whatever the scenario's duration says; a closed loop is measured by time."""
    rows = records(np.arange(100) / 10.0, 20.0)
    total = summarise(result(rows), scenario(count=100, duration_s=3600.0)).total
    assert total.offered_per_s == pytest.approx(10.0)
    closed = scenario(arrivals=ClosedLoopCallers(concurrency=4), duration_s=10.0)
    assert summarise(result(rows), closed).total.offered_per_s == pytest.approx(10.0)


def test_times_that_the_server_and_the_stream_tell():
    """Server-reported ms, first byte and first part are percentiles of those that have them. What no time is that a
    server says is none."""
    rows = records(EVERY_10_MS, 40.0)
    rows["server_ms"][:500] = 12.5
    rows["server_ms"][500:503] = np.inf, 1e30, -1.0
    rows["first_part_ns"][:10] = rows["scheduled_ns"][:10] + 7 * MS
    total = summarise(result(rows), scenario()).total
    assert (total.server_ms.n, total.server_ms.p50) == (500, pytest.approx(12.5, rel=1e-3))
    assert (total.first_part_ms.n, total.first_part_ms.p99) == (10, pytest.approx(7.0, rel=1e-3))
    assert total.first_byte_ms.p50 == pytest.approx(40.0, rel=1e-3)


def test_images_per_second():
    """Images that came within the measured time, also of answers that lack one; other APIs have none."""
    rows = records(EVERY_10_MS, 20.0)
    rows["outcome"][::2], rows["images"][::2], rows["images"][1::2] = RequestOutcome.CHECK, 1, 4
    assert summarise(result(rows), scenario()).images_per_s == pytest.approx(250.0, rel=0.01)
    raw = scenario(target=LoadTarget(api="raw"), mix=(RawClass(),))
    assert summarise(result(rows), raw).images_per_s is None
