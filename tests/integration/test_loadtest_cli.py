"""The command from end to end."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fakes.bad_server import BEHAVIOURS, bad_server, says
from plait_loadtest import parts
from plait_loadtest.cli import app
from plait_loadtest.scenario import Slo
from plait_loadtest.values import RequestOutcome
from support.loadtest_records import records, scenario, session
from support.waiting import wait_for

TESTS = Path(__file__).resolve().parents[1]
OTHERS = (
    "torch,ray,diffusers,transformers,fastapi,starlette,httpx2,uvicorn,plait,plait_serving,plait_bench,plait_disagg"
)

EVERY_10_MS = np.arange(1000) / 100.0
IMAGES = b'{"created": 1, "data": [{"b64_json": "aGVsbG8="}], "timings": {"total": 0.004}}'


@pytest.fixture(scope="module")
def server():
    """A server that answers like the image API, too."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(IMAGES), IMAGES)
    with pytest.MonkeyPatch.context() as patched, bad_server() as running:
        patched.setitem(BEHAVIOURS, "v1/images/generations", says(answer, goes_on=True))
        yield running


@pytest.fixture
def url(server):
    """Its address."""
    return server.url


def alone(*arguments):
    """The command in a process of its own where the other packages cannot be imported."""
    command = [sys.executable, str(TESTS / "integration" / "loadtest_blocked.py"), OTHERS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def loadtest(*arguments):
    """The command in this process; a traceback would be an exception here."""
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def quick(url, *arguments):
    # A long SLO, so that a busy test machine does not make the runs invalid.
    load = ("--api", "raw", "--path", "/ok", "--rate", 40, "--duration", 1, "--slo-ms", 50_000)
    return ("run", "--url", url, *load, *arguments)


def test_it_runs_without_torch_ray_and_the_rest_of_plait(url, tmp_path):
    """With those names (and every web framework) blocked it loads a server and writes every kind of report, none of
    them with the key that it sent."""
    files = {name: tmp_path / name for name in ("a.json", "a.csv", "a.html", "locustfile.py")}
    written = ("--json", files["a.json"], "--raw", files["a.csv"], "--html", files["a.html"])
    key = ("--header", "authorization: Bearer sesame-7731")
    load = ("run", "smoke", "--url", url, "--rate", 40, "--duration", 1, "--processes", 2, *key)
    done = alone(*load, *written, "--locust", files["locustfile.py"])
    report = json.loads(files["a.json"].read_text())
    assert done.returncode == (0 if report["valid"] else 1), done.stderr
    assert "p99 ms" in done.stdout
    assert report["errors"] == {}
    assert report["succeeded"] == report["requests"] > 10
    assert report["server_ms"]["p50"] == pytest.approx(4.0, rel=0.01)
    assert report["images_per_s"] > 0
    with files["a.csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == report["requests"]
    waited_ms = [(int(row["done_ns"]) - int(row["scheduled_ns"])) / 1e6 for row in rows]
    assert report["latency_ms"]["p95"] == pytest.approx(np.percentile(waited_ms, 95), rel=2e-3)
    assert "<svg" in files["a.html"].read_text()
    assert not any("sesame" in path.read_text() for path in files.values())
    compile(files["locustfile.py"].read_text(), "locustfile.py", "exec")
    assert "locust" in files["locustfile.py"].read_text()


def test_compare_ends_with_99_on_a_regression(tmp_path):
    """A server that fails is worse, exit 99; against itself nothing changed, exit 0."""
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    failed = records(EVERY_10_MS, 20.0, outcome=RequestOutcome.HTTP_5XX)
    assert merged(tmp_path, "--json", a).exit_code == 0
    assert merged(tmp_path, "--json", b, rows=failed, seed=5).exit_code == 99
    worse = loadtest("compare", a, b)
    assert worse.exit_code == 99, worse.stderr
    assert "error_rate" in worse.stdout
    assert "seed" in worse.stdout
    same = loadtest("compare", a, a, "--json")
    assert same.exit_code == 0
    assert json.loads(same.stdout)["regressed"] is False


def test_parts_of_two_hosts_merge_into_one_report(url, tmp_path, monkeypatch):
    """Every request of the schedule once. That they ran one after the other, and late, is said and makes it invalid."""
    monkeypatch.chdir(tmp_path)
    late = ("--start-at", "2026-01-01T00:00:00+00:00")
    assert loadtest(*quick(url, "--part", "1/2", "--save", "a.npz", "--json", "a.json", *late)).exit_code == 1
    assert loadtest(*quick(url, "--part", "2/2", "--save", "b.npz")).exit_code == 0
    done = loadtest("merge", "b.npz", "a.npz", "--json", "-", "--raw", "all.csv", "--threshold", "p99_ms < 10000")
    assert done.exit_code == 1
    whole, part = json.loads(done.stdout), json.loads(Path("a.json").read_text())
    assert (whole["part"], part["part"]) == ("1/1", "1/2")
    said = " ".join(reason["text"] for reason in whole["reasons"])
    assert "s apart (--start-at agrees on a time)" in said
    assert "part 1/2: it was ready" in said
    with Path("all.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["index"]) for row in rows] == list(range(whole["requests"]))
    assert part["requests"] == (whole["requests"] + 1) // 2
    alone_ = loadtest("merge", "a.npz")
    assert (alone_.exit_code, "of 2 parts 2 are missing" in alone_.stderr) == (1, True)
    assert loadtest("merge", "all.csv").exit_code == 1


def test_a_run_starts_when_it_was_agreed(url):
    """By the clock that all hosts have: no request leaves before."""
    start = datetime.now(UTC) + timedelta(seconds=3)
    report = json.loads(loadtest(*quick(url, "--start-at", start.isoformat(), "--json", "-")).stdout)
    assert datetime.fromisoformat(report["started"]) >= start - timedelta(seconds=1)  # the report has whole seconds


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_ended_writes_what_there_is(server, url, tmp_path, ending):
    """Exit 130, a table, and a report that says interrupted and counts what ended before."""
    report_path = tmp_path / "a.json"
    command = [sys.executable, "-m", "plait_loadtest", *quick(url, "--duration", 60, "--json", report_path)]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    before = len(server.asked)
    wait_for(lambda: len(server.asked) >= before + 20)  # the load is in flight
    process.send_signal(ending)
    table, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert table.startswith("INVALID RUN: it was interrupted")
    report = json.loads(report_path.read_text())
    assert report["interrupted"] is True
    assert "interrupted" in [reason["code"] for reason in report["reasons"]]
    assert 0 < report["succeeded"] <= report["requests"] < 60 * 40


def merged(tmp_path, *arguments, rows=None, **settings):
    """The outcome of the command on a run that was made up: it reports what it is given as if it had sent it."""
    about = {name: settings.pop(name) for name in ("echo_ms", "interrupted") if name in settings}
    rows = records(EVERY_10_MS, 20.0) if rows is None else rows
    parts.write(tmp_path / "part.npz", session(rows, scenario(**settings), **about))
    return loadtest("merge", tmp_path / "part.npz", *arguments)


def test_a_part_that_was_copied_in_part_is_refused_in_one_sentence(tmp_path):
    """Cut short anywhere, or damaged within: the sentence names the file."""
    assert merged(tmp_path).exit_code == 0
    path = tmp_path / "part.npz"
    whole = path.read_bytes()
    middle = len(whole) // 2
    for spoilt in (whole[:middle], whole[:100], b"", b"text", whole[:middle] + b"\xff" * 64 + whole[middle + 64 :]):
        path.write_bytes(spoilt)
        done = loadtest("merge", path)
        assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.stderr
        assert f"{path} is no part of a run" in done.stderr
        assert "pickle" not in done.stderr


@pytest.mark.parametrize(
    ("code", "arguments", "settings"),
    [
        (0, (), {}),
        (0, ("--threshold", "p99_ms < 250"), {"slo": None}),
        (99, (), {"slo": Slo(latency_ms=10.0)}),
        (99, ("--threshold", "p99_ms < 10"), {}),
        (1, (), {"echo_ms": 50.0}),
        (1, ("--threshold", "p99_ms < 10"), {"echo_ms": 50.0, "slo": Slo(latency_ms=10.0)}),
        (1, ("--threshold", "p99.9_ms < 250"), {"rows": records(np.arange(500) / 50.0, 20.0)}),
        (1, ("--threshold", "first_part_p99_ms < 250"), {}),
        (1, ("--html", "/dev/full"), {}),
        (99, ("--html", "/dev/full", "--threshold", "p99_ms < 10"), {}),
        (1, (), {"slo": None, "rows": records(EVERY_10_MS, 20.0, outcome=RequestOutcome.HTTP_4XX)}),
        (99, (), {"rows": records(EVERY_10_MS, 20.0, outcome=RequestOutcome.UNFINISHED)}),
        (130, ("--html", "/dev/full"), {"interrupted": True}),
    ],
)  # fmt: skip
def test_exit_codes(tmp_path, code, arguments, settings):
    """130 ended early, 1 without a verdict, 99 with a bad one, also without a threshold; the table is always there."""
    done = merged(tmp_path, *arguments, **settings)
    assert done.exit_code == code, done.stderr
    assert "p99.9 ms" in done.stdout
    assert bool(done.stderr) == (code == 1 or "/dev/full" in arguments or "not one" in done.stderr)


def test_a_full_disk_below_stdout_costs_no_report(tmp_path):
    """What cannot be printed is told once, and the files are there."""
    assert merged(tmp_path).exit_code == 0
    command = [sys.executable, "-m", "plait_loadtest", "merge", tmp_path / "part.npz", "--json", tmp_path / "a.json"]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "plait loadtest: stdout could not be written: [Errno 28] No space left on device"
    ]
    assert json.loads((tmp_path / "a.json").read_text())["requests"] == 1000


def test_descriptors_that_run_out_are_no_refusals():
    """60 requests that take a second each, within a second, need more files than 40: the others were not sent, and the
    run is invalid for that reason, which says what to do."""
    load = ("--api", "raw", "--path", "/second", "--arrivals", "constant", "--rate", "60", "--duration", "1")
    with bad_server() as server:
        command = [sys.executable, "-m", "plait_loadtest", "run", "--url", server.url, *load, "--json", "-"]
        limited = ["bash", "-c", 'ulimit -n 40 && exec "$@"', "limited", *command]
        done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr
    report, sent = json.loads(done.stdout), len(server.asked)
    assert (report["requests"], report["succeeded"], report["errors"]) == (60, sent, {"not_sent": 60 - sent})
    assert 0 < sent < 40
    texts = {reason["code"]: reason["text"] for reason in report["reasons"]}
    assert report["valid"] is False
    says = f"out of file descriptors: {60 - sent} requests were not sent; raise ulimit -n, which is 40, or "
    assert texts["limit"].startswith(says)
