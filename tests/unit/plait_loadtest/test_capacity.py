"""The capacity search on simulated servers whose capacity is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from plait_loadtest.capacity import (
    CapacitySearch,
    ClassCount,
    ClassTarget,
    Observed,
    find_capacity,
    judge,
    observe,
    trial_s,
)
from plait_loadtest.confidence import doubt, is_refuted, is_shown, requests_needed
from plait_loadtest.measure import summarise
from plait_loadtest.scenario import Slo
from plait_loadtest.values import RequestOutcome
from support.loadtest_records import MS, queue, records, result, scenario


def search(**settings):
    needs = (ClassTarget(percentile=95.0, latency_ms=100.0, share=1.0),)
    return CapacitySearch(**({"needs": needs, "first_per_s": 10.0, "min_trial_s": 20.0} | settings))


def seen(good, judged, *, percentile=95.0, invalid=(), blamed=None):
    blamed = judged - good if blamed is None else blamed
    count = ClassCount(name="images", percentile=percentile, latency_ms=100.0, judged=judged, good=good, blamed=blamed)
    return Observed(classes=(count,), achieved_per_s=1.0, goodput_per_s=1.0, invalid=invalid)


def server(answers):
    """A server of which `answers(rate, n)` is seen when n requests come at a rate, and the rates that were tried."""
    tried = []

    def measure(rate_per_s, duration_s):
        tried.append(rate_per_s)
        return answers(rate_per_s, round(rate_per_s * duration_s))

    return measure, tried


def sharp(capacity_per_s):
    """A server that answers everything in time up to its capacity, and nothing above it."""
    return server(lambda rate, n: seen(n if rate <= capacity_per_s else 0, n))[0]


def test_the_stopping_rule_is_the_published_one():
    """MLPerf's at 99 %: 459 requests for a p99 and 90 for a p95 with none late; one fewer does not do. The doubt is the
    chance of t or fewer late ones among h + t if a share 1 - p is late."""
    assert (requests_needed(0.99), requests_needed(0.95)) == (459, 90)
    assert not is_shown(458, 0, 0.99)
    h, t, p = 150, 3, 0.95
    n = h + t
    tail = sum(math.comb(n, k) * (1 - p) ** k * p ** (n - k) for k in range(t + 1))
    assert doubt(h, t, p) == pytest.approx(tail)
    assert is_refuted(80, 20, 0.95)
    assert not is_refuted(95, 5, 0.95)


@pytest.mark.parametrize("first_per_s", [0.5, 10.0, 400.0])
@pytest.mark.parametrize("capacity_per_s", [1.3, 37.0, 250.0])
def test_a_sharp_limit_is_found_from_any_start(first_per_s, capacity_per_s):
    """The found rate is at most the capacity and within the tolerance (5 %) below it; the next rate up was refused."""
    found = find_capacity(sharp(capacity_per_s), search(first_per_s=first_per_s))
    assert found.confirmed
    assert capacity_per_s / 1.051 <= found.rate_per_s <= capacity_per_s
    refused_per_s = min(trial.rate_per_s for trial in found.trials if trial.verdict == "missed")
    assert capacity_per_s < refused_per_s <= found.rate_per_s * 1.051
    assert found.trials[-1].purpose == "confirm"
    assert all(trial.why for trial in found.trials if trial.verdict != "held")
    assert all(not trial.why for trial in found.trials if trial.verdict == "held")
    assert "99% confidence" in found.statement


def test_a_queue_finds_its_known_capacity():
    """M/M/1 with 10 ms mean service: sojourn times are exponential with rate mu - lambda, so 95 % are within 100 ms up
    to lambda = mu - ln(20) / 0.1 s = 70.0/s. The search ends between 0.8 and 1.1 times that. (40 searches with other
    seeds ended between 0.92 and 1.003; the seeds are fixed, so the test fails with a change of the search, not by
    chance.)
    """
    limit = 100.0 - math.log(20.0) / 0.1
    seeds = iter(range(100))

    def measure(rate_per_s, duration_s):
        rows = queue(rate_per_s, duration_s, mean_service_ms=10.0, seed=next(seeds))
        chosen = scenario(duration_s=duration_s, slo=Slo(latency_ms=100.0, percentile=95.0))
        return observe(summarise(result(rows), chosen))

    found = find_capacity(measure, search(first_per_s=20.0, min_trial_s=120.0))
    assert found.confirmed
    assert 0.8 * limit <= found.rate_per_s <= 1.1 * limit


def test_trials_are_long_enough():
    """A p95 with two late ones takes so many requests; at 1000/s ten SLOs' time; a rare class takes longer."""
    assert trial_s(1.0, search()) >= requests_needed(0.95, late=2) > 90
    slow = ClassTarget(percentile=95.0, latency_ms=10_000.0, share=1.0)
    assert trial_s(1000.0, search(needs=(slow,))) == 100.0
    rare = ClassTarget(percentile=95.0, latency_ms=100.0, share=0.1)
    assert trial_s(10.0, search(needs=(rare,))) == pytest.approx(trial_s(1.0, search()))


def test_verdicts_of_a_trial():
    """Held, missed, unproven (too few), invalid: and a miss stays a miss on an invalid run."""
    assert judge(seen(100, 100)) == ("held", "")
    assert judge(seen(80, 100))[0] == "missed"
    assert judge(seen(60, 60))[0] == "unproven"
    assert judge(seen(100, 100, invalid=(("send_lag", "late"),))) == ("invalid", "late")
    verdict, why = judge(seen(10, 100, invalid=(("limit", "no room"),)))
    assert verdict == "missed"
    assert "10 of 100" in why
    assert "no room" in why


def test_a_slow_generator_is_a_bound_of_its_own():
    """Rates that the generator cannot offer are tried three times, refused, and the result says whose limit it is."""
    late = (("send_lag", "requests left late"),)
    measure, tried = server(lambda rate, n: seen(n, n, invalid=late if rate > 50.0 else ()))
    found = find_capacity(measure, search())
    assert found.by_generator
    assert "generator" in found.statement
    assert found.rate_per_s <= 50.0
    assert all(tried.count(rate) == 3 for rate in tried if rate > 50.0)


def test_a_host_that_is_busy_without_any_load_ends_the_search():
    """Lower rates would be spoiled as well, and say nothing about the server; what held before still counts."""
    slow = (("echo", "this machine was slow"),)
    measure, tried = server(lambda _, n: seen(n, n, invalid=slow if len(tried) > 1 else ()))
    found = find_capacity(measure, search(), is_busy=lambda: True)
    assert tried == [10.0, 20.0, 20.0, 20.0]
    assert (found.rate_per_s, found.confirmed) == (10.0, False)
    assert "this machine is busy without any load" in found.statement


@pytest.mark.parametrize("within_s", [None, 60.0])
@pytest.mark.parametrize("capacity_per_s", [0.02, 3.0, 37.0])
def test_a_search_ends_within_the_time_that_it_states_first(capacity_per_s, within_s):
    """Also where each trial takes hours, because so few requests come; runs take longer than they should."""
    passed_s, said = [0.0], []

    def measure(rate_per_s, duration_s):
        passed_s[0] += duration_s + 7.0
        return sharp(capacity_per_s)(rate_per_s, duration_s)

    asked = search(spare_s=7.0, within_s=within_s)
    found = find_capacity(measure, asked, say=said.append, clock=lambda: passed_s[0])
    stated_min = float(said[0].removeprefix("the search takes at most ").split()[0])
    assert passed_s[0] <= 60.0 * stated_min * 1.01
    assert found.confirmed or "have no room" in found.statement
    assert found.confirmed == (within_s is None and capacity_per_s > 1.0)


@pytest.mark.parametrize("code", ["limit", "send_lag", "echo", "generator"])
def test_what_the_generator_did_is_not_blamed_on_the_server(code):
    """Requests that were late or not sent through the generator do not show that a rate does not hold; those that were
    late after sending do, also then."""
    late = ((code, "this generator ends here"),)
    assert judge(seen(60, 180, blamed=0, invalid=late)) == ("invalid", "this generator ends here")
    assert judge(seen(60, 180, blamed=60, invalid=late))[0] == "missed"


def test_a_capacity_that_the_generator_ends_is_a_lower_bound():
    """Above 16/s it runs out of descriptors, while the server would answer: at least the rate that was shown, and why
    no more. A limit is met again, so that no rate is tried twice for it."""
    full = (("limit", "out of file descriptors: 9 requests were not sent"),)
    measure, tried = server(lambda rate, n: seen(n, n) if rate <= 16.0 else seen(n // 3, n, blamed=0, invalid=full))
    found = find_capacity(measure, search())
    assert (found.confirmed, found.by_generator) == (True, True)
    assert 16.0 / 1.05 <= found.rate_per_s <= 16.0
    assert found.statement.startswith(f"at least {found.rate_per_s:.4g}/s, this generator ends there: ")
    assert found.statement.endswith(" did not hold: out of file descriptors: 9 requests were not sent")
    assert all(tried.count(rate) == 1 for rate in tried if rate > 16.0)


def test_blame_counts_from_sending():
    """Requests that left 300 ms late and took 20 ms miss an SLO of 100 ms, and the server has no part in it; one that
    took 200 ms, one that was reset and one that had no answer for 200 ms are its own; one that was not sent is not."""
    rows = records(np.arange(100) / 10.0, 320.0, lag_ms=300.0)
    rows["done_ns"][0] = rows["sent_ns"][0] + 200 * MS
    rows["outcome"][1] = RequestOutcome.RESET
    rows["outcome"][2] = RequestOutcome.INTERRUPTED
    rows["done_ns"][2] = rows["sent_ns"][2] + 200 * MS
    rows["outcome"][3], rows["sent_ns"][3] = RequestOutcome.NOT_SENT, -1
    rows["outcome"][4] = RequestOutcome.INTERRUPTED
    observed = observe(summarise(result(rows), scenario(slo=Slo(latency_ms=100.0, percentile=95.0))))
    assert (observed.classes[0].good, observed.classes[0].blamed) == (0, 3)
    assert {code for code, _ in observed.invalid} >= {"send_lag", "limit"}
    assert judge(observed)[0] == "invalid"


def test_a_lucky_rate_is_not_confirmed():
    """A rate that held by luck and fails its longer run is given up for a lower one."""
    lucky = [True, True]
    measure, _ = server(lambda rate, n: seen(n if rate <= 30.0 or (rate < 50.0 and lucky and lucky.pop()) else 0, n))
    found = find_capacity(measure, search())
    assert found.confirmed
    assert found.rate_per_s <= 30.0
    assert any(trial.purpose == "confirm" and trial.verdict != "held" for trial in found.trials)


def test_an_unproven_trial_is_repeated_twice_as_long():
    """Too few requests by chance are no reason to refuse a rate."""
    counts = []

    def answers(rate, n):
        counts.append(n)
        return seen(50, 50) if len(counts) == 1 else seen(n if rate <= 15.0 else 0, n)

    measure, tried = server(answers)
    find_capacity(measure, search())
    assert (tried[:2], counts[1]) == ([10.0, 10.0], pytest.approx(2 * counts[0], abs=1))


def test_nothing_holds_and_interruption():
    """A dead server: no rate, and it ends. Ctrl-C: the search ends with what it has, unconfirmed."""
    dead = find_capacity(lambda rate, s: seen(0, 100), search(min_per_s=0.1))
    assert (dead.rate_per_s, dead.confirmed) == (None, False)
    assert len(dead.trials) < 12
    over = (("interrupted", "it was interrupted"),)
    interrupted_third, tried = server(lambda *_: seen(1000, 1000, invalid=over if len(tried) == 3 else ()))
    stopped = find_capacity(interrupted_third, search())
    assert (len(tried), stopped.confirmed, stopped.rate_per_s) == (3, False, 20.0)


def test_beyond_is_tried_after_the_confirmation():
    """`--confirm`: the last trial is at 1.3 times the found rate, and here it misses."""
    found = find_capacity(sharp(37.0), search(beyond=1.3))
    assert found.trials[-1].purpose == "beyond"
    assert found.trials[-1].rate_per_s == pytest.approx(1.3 * found.rate_per_s)
    assert found.trials[-1].verdict == "missed"


def test_a_search_that_did_not_show_what_lies_beyond_says_so():
    """The rate is confirmed, but 1.3 times that held as well; or there was no time left to try it."""
    odd, _ = server(lambda rate, n: seen(n if rate <= 37.0 or 45.0 < rate < 70.0 else 0, n))
    found = find_capacity(odd, search(beyond=1.3))
    assert (found.confirmed, found.trials[-1].purpose, found.trials[-1].verdict) == (True, "beyond", "held")
    assert f"{1.3 * found.rate_per_s:.4g}/s held, too" in found.statement
    whole = find_capacity(sharp(37.0), search(beyond=1.3))
    assert whole.statement.endswith("did not hold")
    now_s = [0.0]

    def measure(rate_per_s, duration_s):
        now_s[0] += duration_s
        return sharp(37.0)(rate_per_s, duration_s)

    within_s = sum(trial.duration_s for trial in whole.trials[:-1]) + 1.0
    found = find_capacity(measure, search(beyond=1.3, within_s=within_s), clock=lambda: now_s[0])
    assert (found.confirmed, found.rate_per_s) == (True, whole.rate_per_s)
    assert f"{1.3 * found.rate_per_s:.4g}/s was not tried: the" in found.statement


def failing(outcome, *, but=0):
    """Every request of a run ends so, but the first few."""

    def measure(rate_per_s, duration_s):
        rows = queue(rate_per_s, duration_s, mean_service_ms=1.0, seed=1)
        rows["outcome"][but:] = outcome
        tried.append(rate_per_s)
        return observe(summarise(result(rows), scenario(duration_s=duration_s, slo=Slo(latency_ms=100.0))))

    tried: list[float] = []
    return measure, tried


@pytest.mark.parametrize("outcome", [RequestOutcome.CONNECT, RequestOutcome.HTTP_4XX])
def test_a_search_against_nobody_ends_at_once(outcome):
    """Halving the rate down to one in a thousand seconds would take hours, and say no more."""
    measure, tried = failing(outcome)
    found = find_capacity(measure, search())
    assert (len(tried), found.rate_per_s, found.confirmed) == (1, None, False)
    assert f"not one request succeeded ({found.trials[0].observed.classes[0].judged} {outcome.name.lower()})" in (
        found.statement
    )


@pytest.mark.parametrize(
    ("outcome", "but"), [(RequestOutcome.TIMEOUT, 0), (RequestOutcome.HTTP_5XX, 0), (RequestOutcome.CONNECT, 3)]
)
def test_an_overloaded_server_is_tried_with_less(outcome, but):
    """It may answer nothing in time, or refuse most: a lower rate may hold."""
    measure, tried = failing(outcome, but=but)
    find_capacity(measure, search(max_trials=4))
    assert tried[:2] == [10.0, 5.0]
