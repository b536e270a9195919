"""What is written about a run: the document, raw rows, the page, the table, the locustfile, the live line."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from plait_loadtest import histogram
from plait_loadtest.capacity import CapacitySearch, ClassCount, ClassTarget, Observed, find_capacity
from plait_loadtest.cli import live_line, progress_line
from plait_loadtest.plan import make_plan
from plait_loadtest.report.document import report, shown
from plait_loadtest.report.html import page
from plait_loadtest.report.locustfile import locustfile
from plait_loadtest.report.outputs import Outputs, write_rows
from plait_loadtest.report.table import notes, print_table
from plait_loadtest.scenario import (
    ClosedLoopCallers,
    GammaArrivals,
    ImageClass,
    LoadTarget,
    PoissonArrivals,
    RampArrivals,
    RawClass,
    ResponseCheck,
)
from plait_loadtest.session import finished
from plait_loadtest.values import RECORD, RequestOutcome, RunProgress
from plait_report.charts import linear_ticks, log_ticks, span, time_text
from plait_report.page import number
from support.loadtest_records import MS, queue, records, result, scenario, session
from support.pages import assert_stands_alone

EVERY_10_MS = np.arange(1000) / 100.0


def missed():
    """Two classes, errors of two kinds, late requests, a threshold."""
    chosen = scenario(mix=(ImageClass(name="plain"), ImageClass(name="slow")), thresholds=("p95_ms < 10",))
    rows = records(EVERY_10_MS, np.where(np.arange(1000) % 5 == 0, 300.0, 20.0), kind=np.arange(1000) % 2)
    rows["outcome"][10:30], rows["outcome"][30:35] = RequestOutcome.HTTP_5XX, RequestOutcome.RESET
    rows["why"][10:28], rows["why"][28:30] = 1, 2
    return session(rows, chosen, whys=("", "503: <b>full</b>", "500"))


RUNS = {
    "met": session(records(EVERY_10_MS, 20.0)),
    "queue": session(queue(90.0, 10.0, mean_service_ms=10.0)),
    "missed": missed(),
    "invalid": session(records(EVERY_10_MS, 20.0), echo_ms=50.0),
    "dead server": session(records(EVERY_10_MS, 20.0, outcome=RequestOutcome.CONNECT)),
    "no slo": session(records(EVERY_10_MS, 20.0), scenario(slo=None)),
    "one request": session(records([0.5], 20.0)),
    "no request": session(records([], 20.0)),
}
"""They differ in what there is to draw."""


# ---- the document ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_every_report_can_be_written_whatever_happened(name):
    """The document is strict JSON (no NaN) with the promised keys. The page is well-formed and stands alone: no script,
    nothing fetched, no address but the server's own name, in text, and each drawing is named. 80 columns hold the
    table, and the verdict comes first."""
    done = RUNS[name]
    document = json.loads(json.dumps(report(done), allow_nan=False))
    assert document["format"] == "plait-loadtest/1"
    assert set(document["latency_ms"]) == {"n", "p50", "p90", "p95", "p99", "p99.9", "max", "mean"}
    keys = {"tool", "host", "seed", "valid", "reasons", "classes", "thresholds", "send_lag_ms", "echo_ms"}
    assert keys <= set(document)
    html = page(done, report(done))
    assert assert_stands_alone(html)
    assert "<script" not in html
    assert set(re.findall(r"https?://[^\s<\"]+", html)) == {done.scenario.target.url}
    text = io.StringIO()
    print_table(done, Console(file=text, width=80))
    first = text.getvalue().splitlines()[0]
    assert first.startswith(("SLO met", "SLO MISSED", "INVALID RUN", "valid run", "too few"))
    assert "p99.9 ms" in text.getvalue()
    assert "…" not in text.getvalue()


def test_the_stored_parts_are_the_stored_whole():
    """Parts decode and merge into the histogram of the run, which has the reported percentiles."""
    document = report(session(queue(90.0, 10.0, mean_service_ms=5.0)))
    stored = document["histograms"]["total"]
    whole = histogram.decoded(stored["latency"])
    counts: Counter[int] = Counter()
    for part in (histogram.decoded(text) for text in stored["parts"] if text):
        counts.update(dict(zip(part.bucket.tolist(), part.count.tolist(), strict=True)))
    assert counts == dict(zip(whole.bucket.tolist(), whole.count.tolist(), strict=True))
    assert whole.percentiles_ns([99.0])[0] / MS == pytest.approx(document["latency_ms"]["p99"], rel=1e-4)


def test_a_capacity_search_is_part_of_the_document():
    """With its sentence, bracket and every trial."""

    def measure(rate, seconds):
        n = round(rate * seconds)
        count = ClassCount(
            name="images", percentile=95.0, latency_ms=100.0, judged=n, good=n if rate < 30 else 0, blamed=0
        )
        return Observed(classes=(count,), achieved_per_s=rate, goodput_per_s=rate)

    needs = (ClassTarget(percentile=95.0, latency_ms=100.0, share=1.0),)
    found = find_capacity(measure, CapacitySearch(needs=needs, first_per_s=10.0))
    document = json.loads(json.dumps(report(session(records(EVERY_10_MS, 20.0)), found), allow_nan=False))
    assert document["capacity"]["confirmed"] is True
    assert len(document["capacity"]["trials"]) == len(found.trials)
    html = page(session(records(EVERY_10_MS, 20.0)), document)
    assert found.statement in html


# ---- raw rows --------------------------------------------------------------------------------------------------------


def test_raw_rows_lose_nothing(tmp_path):
    """CSV, JSON lines and NPZ hold the same integers; class and outcome are names; what never came is -1 or empty."""
    rows = records(EVERY_10_MS[:50], 20.0, kind=np.arange(50) % 2)
    rows["outcome"][3] = RequestOutcome.TIMEOUT
    rows["server_ms"][0], rows["server_ms"][2], rows["why"][3] = 1.5, np.inf, 1
    mix = (ImageClass(name="plain"), ImageClass(name="styled"))
    done = session(rows, scenario(mix=mix), whys=("", "too late"))
    for suffix in (".csv", ".jsonl", ".npz"):
        write_rows(tmp_path / f"rows{suffix}", done)
    from_csv = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    from_lines = [json.loads(text) for text in (tmp_path / "rows.jsonl").read_text().splitlines()]
    with np.load(tmp_path / "rows.npz") as stored:
        assert stored["records"].dtype == RECORD
        assert stored["records"].tobytes() == rows.tobytes()
        assert stored["classes"].tolist() == ["plain", "styled"]
    assert (
        [int(row["done_ns"]) for row in from_csv] == rows["done_ns"].tolist() == [row["done_ns"] for row in from_lines]
    )
    assert (from_lines[3]["outcome"], from_lines[3]["why"], from_csv[3]["why"]) == ("timeout", *["too late"] * 2)
    assert (from_lines[1]["class"], from_lines[0]["first_part_ns"], from_lines[0]["why"]) == ("styled", -1, "")
    assert [line["server_ms"] for line in from_lines[:3]] == [1.5, None, None]


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_says_the_verdict_first():
    """Met, missed, invalid with its reason, nothing to judge."""
    pages = {name: page(done, report(done)) for name, done in RUNS.items()}
    headlines = {name: re.search(r"<h1[^>]*>(.*?)</h1>", html)[1] for name, html in pages.items()}
    assert headlines["met"] == "SLO met"
    assert headlines["missed"] == "SLO missed"
    assert headlines["invalid"] == "Run invalid"
    assert headlines["no slo"] == "Valid run"
    assert headlines["one request"] == "Too few requests to judge"
    assert "this machine was slow" in pages["invalid"]
    assert "http 5xx 20" in pages["missed"]
    assert "SLO 100 ms" in pages["met"]


def test_why_requests_failed_is_told_everywhere():
    """The same reasons and counts in JSON, on the page and below the table; what a server said is text."""
    done = missed()
    told = [{"count": 18, "why": "503: <b>full</b>"}, {"count": 2, "why": "500"}]
    assert report(done)["failures"] == {"http_5xx": told}
    assert report(done)["classes"]["plain"]["failures"]["http_5xx"][0]["count"] == 9
    html = page(done, report(done))
    assert "<b>full" not in html
    assert re.search(r"http 5xx</th><td>18</td><td[^>]*>503: &lt;b&gt;full&lt;/b&gt;<", html)
    lines = notes(done)
    assert "  http_5xx: 18 x 503: <b>full</b>" in lines
    assert "  http_5xx: 2 x 500" in lines


@pytest.mark.parametrize("reconnects", [0, 7])
def test_replaced_connections_are_told_everywhere(reconnects):
    """In all three, with their number; where there were none, nothing is said."""
    run = replace(result(records(EVERY_10_MS, 20.0)), reconnects=reconnects)
    done = finished(run, scenario(), ())
    document = report(done)
    assert document["reconnects"] == reconnects
    html, lines = page(done, document), "\n".join(notes(done))
    for text, said in ((html, "7 requests left on a new connection"), (lines, "sent on a new connection, as ")):
        assert (said in text) if reconnects else ("new connection" not in text)


def test_a_threshold_without_a_verdict_says_so():
    """In all three: neither held nor missed."""
    done = session(records(EVERY_10_MS[:50], 20.0), scenario(thresholds=("p99_ms < 250",)))
    assert report(done)["thresholds"][0]["held"] is None
    assert "no verdict" in page(done, report(done))
    assert any("no verdict (20.0: 50 values are too few, 100 are needed)" in line for line in notes(done))


def test_the_page_escapes_what_it_shows():
    """A scenario name or a path cannot put markup into the page."""
    done = session(records(EVERY_10_MS, 20.0), scenario(name="<script>alert(1)</script>"))
    html = page(done, report(done))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_a_large_run_makes_a_small_page():
    """Dots are thinned, but the slowest request is drawn: 50,000 requests stay below 600 kB."""
    rng = np.random.default_rng(0)
    rows = records(np.sort(rng.uniform(0, 10, 50_000)), rng.exponential(10.0, 50_000))
    done = session(rows)
    assert len(page(done, report(done))) < 600_000


def test_axes():
    """Ticks are round and inside; scales map ends to ends; times are short, numbers have three digits or are none."""
    assert linear_ticks(0.0, 60.0, 6) == [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert log_ticks(0.9, 120.0) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    assert log_ticks(300.0, 900.0) == [400.0, 600.0, 800.0]
    scale = span(1.0, 100.0, start=0.0, end=200.0, log=True)
    assert (scale(1.0), scale(10.0), scale(100.0), scale(1e9)) == pytest.approx((0.0, 100.0, 200.0, 200.0))
    assert [time_text(ms) for ms in (0, 0.25, 12.34, 999.4, 2500)] == ["0", "250 µs", "12.3 ms", "999 ms", "2.5 s"]
    told = [number(value) for value in (0.0, 0.0999999, 1.0, 12.345, 99.96, 1234.5, None, float("nan"))]
    assert told == ["0", "0.100", "1.00", "12.3", "100", "1,230", "-", "-"]


# ---- the locustfile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrivals", "wait"),
    [(PoissonArrivals(rate_per_s=20.0), "poisson(0.2)"), (GammaArrivals(rate_per_s=50.0, burstiness=0.5),
     "poisson(0.5)"), (RampArrivals(rate_per_s=10.0, to_rate_per_s=30.0), "poisson(0.2"),
(ClosedLoopCallers(concurrency=7), "constant(0)")], )  # fmt: skip
def test_the_locustfile_asks_for_the_same(arrivals, wait):
    """It is Python, waits so that all users together have the rate, and carries the plan's own bodies."""
    target = LoadTarget(api="raw", headers={"x-api-key": "sesame"}, check=ResponseCheck(contains="it's"))
    mix = (RawClass(method="POST", path="/x?i={index}", body='{"i": {index}}'),)
    text = locustfile(scenario(arrivals=arrivals, target=target, mix=mix, slo=None, name='a """ name \\'))
    module = ast.parse(text)
    assert wait in text
    assert "closed loop" in ast.get_docstring(module)
    assert "sesame" not in text
    assert "LOCUST_HEADER_X_API_KEY" in text
    assert "/x?i=0" in text
    assert "/x?i=1" in text
    imported = {node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    assert imported == {"locust"}


def test_a_locustfile_of_so_many_requests_runs_as_long_as_they_take():
    """And at their rate, whatever duration the scenario would have without a count."""
    ramp = RampArrivals(rate_per_s=10.0, to_rate_per_s=30.0)
    chosen = scenario(arrivals=ramp, target=LoadTarget(api="raw"), mix=(RawClass(),), slo=None, count=400)
    seconds, text = float(make_plan(chosen).scheduled_ns[-1]) / 1e9, locustfile(chosen)
    assert chosen.duration_s < seconds - 2.0
    assert f"--run-time {seconds:.0f}s" in text
    assert f"ask for {400 / seconds:g}/s" in text
    assert f"poisson({400 / seconds / 100!r})" in text


def test_keys_are_nowhere_in_what_is_written():
    """Of a class or of all: neither in the document, nor on the page, nor in the locustfile, which says that all its
    users are one tenant."""
    keys = {"Authorization": "Bearer sesame-{}", "Api-Key": "sesame-{}"}
    mix = tuple(
        ImageClass(name=name, headers={key: value.format(name) for key, value in keys.items()}) for name in ("a", "b")
    )
    chosen = scenario(mix=mix, target=LoadTarget(headers={"x-key": "sesame-7731"}), slo=None)
    text = locustfile(chosen)
    assert "all users are one tenant" in text
    done = session(records(EVERY_10_MS, 20.0), chosen)
    document = report(done)
    assert not any("sesame" in written for written in (text, json.dumps(document), page(done, document)))
    assert document["scenario"]["target"]["headers"] == {"x-key": "(not shown)"}
    assert shown(chosen)["mix"][0]["headers"] == dict.fromkeys(keys, "(not shown)")


# ---- the live line ---------------------------------------------------------------------------------------------------


PROGRESS = RunProgress(
    elapsed_s=3.2, planned=100, handed=34, done=30, ok=28, errors=2, in_flight=4, waiting=0,
    recent_p50_ms=12.3, recent_p95_ms=45.6,
)  # fmt: skip


def test_the_live_line():
    """Time, requests, failures, what is in flight, recent latency."""
    assert (
        progress_line(PROGRESS, 20.0)
        == "3 of 20 s · 30 of 100 done · 2 failed · 4 in flight · now p50 12.3 ms, p95 45.6 ms"
    )
    assert (
        progress_line(replace(PROGRESS, planned=None, errors=0, waiting=9, recent_p50_ms=None), None)
        == "3 s · 30 done · 4 in flight, 9 waiting"
    )
    assert progress_line(replace(PROGRESS, elapsed_s=-0.2), 20.0) == "preparing requests"


def test_no_live_line_without_a_terminal(capsys):
    """Nothing is written where nobody looks."""
    with live_line(10.0) as show:
        show(PROGRESS)
    assert capsys.readouterr().err == ""


def test_a_server_may_say_what_a_terminal_cannot_show(monkeypatch):
    """What has no letter in the terminal's own encoding is written otherwise, and the report is complete."""
    done = session(records(EVERY_10_MS, 20.0, outcome=RequestOutcome.CHECK), scenario(name="花"), whys=("", "花"))
    done.result.records["why"] = 1
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert Outputs(json="-").write(done) == []
    terminal.seek(0)
    assert json.loads(terminal.read())["scenario"]["name"] == "花"
