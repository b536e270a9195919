"""The load generators' benchmark: how the highest rate is found, and what is reported. The real run is by hand."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from plait_bench import job, loadtest
from plait_bench.errors import SystemFailed, SystemUnavailable
from plait_bench.loadtest.window import ThroughputWindow, measure, noop_server
from support.waiting import wait_for


def window(per_s, cpu_s_per_1000=0.05):
    """A window of ten seconds."""
    requests = int(per_s * 10)
    return ThroughputWindow(requests=requests, seconds=10.0, cpu_s=cpu_s_per_1000 * requests / 1000)


def machine(limit_per_s):
    """A machine that keeps up to so many requests per second."""

    def attempt(rate_per_s):
        late = rate_per_s > limit_per_s
        return loadtest.GeneratorTrial(
            rate_per_s=rate_per_s,
            window=window(min(rate_per_s, limit_per_s)),
            lag_p99_ms=50.0 if late else 1.0,
            errors=0,
        )

    return attempt


@pytest.mark.parametrize("limit_per_s", [4000, 9000, 23_456, 100_000])
def test_the_highest_rate_is_found_to_five_percent(limit_per_s):
    """Never more than the machine keeps, never less than 5 % below it; a round at a rate steps down as the search."""
    found = loadtest.highest_rate(machine(limit_per_s))
    assert limit_per_s / 1.05 <= found <= limit_per_s
    assert loadtest.hold(machine(found), found).is_valid


def test_a_machine_that_keeps_no_rate_is_an_error():
    """No rate means no number, not a wrong one."""
    with pytest.raises(SystemFailed, match="busy"):
        loadtest.highest_rate(machine(1000))


@pytest.mark.parametrize(
    ("lag_ms", "errors", "per_s", "valid"), [(5, 0, 985, 1), (5.1, 0, 1000, 0), (1, 1, 1000, 0), (1, 0, 970, 0)]
)
def test_only_what_is_on_time_complete_and_without_errors_counts(lag_ms, errors, per_s, valid):
    """p99 lag up to 5 ms, no errors, and the server saw the offered rate."""
    trial = loadtest.GeneratorTrial(rate_per_s=1000.0, window=window(per_s), lag_p99_ms=lag_ms, errors=errors)
    assert trial.is_valid is bool(valid)


def test_the_document_has_rows_and_ratios(monkeypatch):
    """A system that is not there is left out with its reason; ratios are taken round by round."""
    rates = {"plait": iter([30_000.0, 20_000.0, 24_000.0]), "locust": iter([15_000.0, 16_000.0, 10_000.0])}

    def prepare(name):
        def take(*_):
            return window(next(rates[name]))

        return lambda *_: SimpleNamespace(layouts=("2 processes",), take=take)

    def missing(*_):
        raise SystemUnavailable("wrk is not on PATH")

    monkeypatch.setattr(
        loadtest, "CONTENDERS", {"plait": prepare("plait"), "locust": prepare("locust"), "wrk": missing}
    )
    written = job.measure("loadtest", say=lambda _: None, rounds=3)
    assert written["left_out"] == {"wrk": "wrk is not on PATH"}
    assert written["ratios"]["noop:requests_per_s:plait/locust"] == 2.0
    rows = {(row["system"], row["metric"]): row["value"] for row in written["rows"]}
    assert (rows["plait", "requests_per_s"], rows["locust", "cpu_s_per_1000"]) == (24_000, 0.05)


def test_the_window_counts_what_the_server_saw(monkeypatch):
    """A real run of our generator: the server's count, the processes' time, and the generator's own word. Each time
    that is waited is one of 300 requests, so that the window lies within the run on any host."""
    with noop_server() as server:

        def sleep(_):
            so_far = server.served()
            wait_for(lambda: server.served() >= so_far + 300)

        monkeypatch.setattr("plait_bench.loadtest.window.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
        trial = loadtest.try_rate(server, 1000.0, seconds=1.0)
        assert server.served() - 300 >= trial.window.requests >= 300
    assert trial.window.cpu_s > 0
    assert trial.errors == 0


def test_a_generator_that_fails_is_an_error():
    """With what it said last."""
    with noop_server() as server, pytest.raises(SystemFailed, match="no such load"):
        measure([sys.executable, "-c", "raise SystemExit('no such load')"], server, settle_s=0, seconds=1)
