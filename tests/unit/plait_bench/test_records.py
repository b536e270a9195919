"""The document, the results file and README's table."""

from __future__ import annotations

import json

import pytest

from plait_bench import records, tables
from plait_bench.benchmark import ResultRow
from plait_bench.document import document
from plait_bench.errors import BenchError, RecordError
from plait_bench.host import commit, host_facts
from plait_bench.runner import Result
from plait_bench.summary import ValueSummary

HOST = {
    "cpu": "Some CPU", "cores": 2, "ram_gib": 15.6, "os": "Linux 6", "python": "3.11.7", "torch": "2.13.0",
    "diffusers": "0.42.1", "transformers": "5.23.0", "peft": None, "ray": "2.60.0", "loadavg_1m": 0.1, "wake_us": 15.0,
    "date": "2026-11-21T10:00:00+00:00",
}  # fmt: skip


def row(system, workload, metric, value):
    """A row whose spread is 10 %."""
    return ResultRow(
        system=system,
        workload=workload,
        metric=metric,
        unit="u",
        value=value,
        p20=0.9 * value,
        p80=1.1 * value,
        n=5,
        layout="2x1",
    )


def written(at="abc123", date=HOST["date"], speed=2.0, **host):
    """A document with one workload of each sort."""
    rows = [
        row("plait", "single", "seconds_per_image", 1 / 3),
        row("plait", "single", "images_per_s", 3.0),
        row("peer", "single", "seconds_per_image", 0.5),
        row("peer", "single", "images_per_s", 2.0),
        row("plait", "same16", "images_per_s", speed),
        row("plait", "same16", "mean_latency_s", 4.0),
        row("plait", "same16", "largest_pixel_difference", 1.0),
    ]
    ratios = {
        "single:images_per_s:plait/peer": ValueSummary(value=1.5, p20=1.4, p80=1.6, n=5),
        "single:seconds_per_image:plait/peer": ValueSummary(value=0.67, p20=0.6, p80=0.7, n=5),
    }
    result = Result(rows=tuple(rows), ratios=ratios, left_out={"third": "needs PEFT"})
    return document("images", at, {**HOST, "date": date, **host}, result)


def test_the_document_has_the_fields_that_programs_read():
    """The names of the contract, plain numbers as ratios, and JSON all the way."""
    doc = json.loads(json.dumps(written()))
    assert set(doc) >= {"bench", "commit", "host", "rows", "ratios"}
    assert set(doc["rows"][0]) >= {"system", "workload", "metric", "unit", "value", "p20", "p80", "n", "kind"}
    assert {entry["kind"] for entry in doc["rows"]} == {"measured"}
    assert doc["ratios"]["single:images_per_s:plait/peer"] == 1.5
    assert doc["ratio_spreads"]["single:images_per_s:plait/peer"] == {"p20": 1.4, "p80": 1.6, "n": 5}
    assert doc["left_out"] == {"third": "needs PEFT"}
    assert doc["rows"][0]["value"] == 0.333333


def test_host_facts_name_the_machine_but_nobody():
    """CPU, cores, memory and versions are there; no host name, no user."""
    facts = host_facts()
    assert set(facts) == set(HOST)
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert facts["torch"]
    assert 1.0 < facts["wake_us"] < 100_000.0


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    """Benchmarks run from an unpacked archive too."""
    assert commit(tmp_path) == "unknown"


def test_rows_are_appended_and_never_overwritten_silently(tmp_path):
    """The same key is refused and changes nothing; another commit is added; --overwrite replaces its own rows only."""
    path = tmp_path / "sub" / "images.jsonl"
    first = records.records_of(written())
    records.append(path, first, overwrite=False)
    before = path.read_bytes()
    with pytest.raises(RecordError, match="--overwrite"):
        records.append(path, records.records_of(written(speed=9.0)), overwrite=False)
    assert path.read_bytes() == before
    records.append(path, records.records_of(written(at="def456")), overwrite=False)
    assert path.read_bytes().startswith(before)
    records.append(path, records.records_of(written(speed=9.0)), overwrite=True)
    found = records.read(path)
    assert len(found) == 2 * len(first)
    speeds = {r["commit"]: r["value"] for r in found if (r["workload"], r["metric"]) == ("same16", "images_per_s")}
    assert speeds == {"abc123": 9.0, "def456": 2.0}


def test_a_recorded_run_is_refused_before_it_is_measured_again(tmp_path):
    """The question costs nothing; another machine or commit is not refused."""
    there = records.records_of(written())
    run = {"bench": "images", "commit": "abc123", "host": HOST}
    with pytest.raises(RecordError, match="single of commit abc123"):
        records.check_new(there, **run, workloads=["single"])
    records.check_new(there, **run, workloads=["mixed16"])
    records.check_new(there, **{**run, "commit": "def456"}, workloads=["single"])
    records.check_new(there, **{**run, "host": {**HOST, "cores": 64}}, workloads=["single"])


def test_a_broken_results_file_names_its_line(tmp_path):
    """A line that is no row is an error, not a row less."""
    path = tmp_path / "images.jsonl"
    path.write_text(json.dumps(records.records_of(written())[0]) + "\n{}\n")
    with pytest.raises(RecordError, match="line 2"):
        records.read(path)


def test_the_table_shows_the_newest_run(tmp_path):
    """Seconds where requests come one by one, rates where they come at once; ratios with their spread; the machine."""
    path = tmp_path / "images.jsonl"
    records.append(
        path, records.records_of(written(at="old", date="2026-11-20T23:00:00+00:00", speed=1.0)), overwrite=False
    )
    records.append(path, records.records_of(written(speed=7.0)), overwrite=False)
    text = tables.with_tables("before\n<!-- table: images -->\nstale\n<!-- /table -->\nafter\n", tmp_path)
    assert text.startswith("before\n<!-- table: images -->\n| workload | unit | plait | peer | plait / peer |\n")
    assert "| `single` | s per image | 0.333 (2x1) | 0.5 (2x1) | **1.50** (1.40 to 1.60) |" in text
    assert "| `same16` | images/s | 7 (2x1) |  |  |" in text
    assert "Some CPU, 2 cores" in text
    assert "`abc123`" in text
    assert "stale" not in text
    assert text.endswith("<!-- /table -->\nafter\n")
    assert tables.with_tables(text, tmp_path) == text


def test_the_table_says_when_the_host_was_busy(tmp_path):
    """The slowest of what is shown counts; a quiet host is not mentioned."""
    path, block = tmp_path / "images.jsonl", "<!-- table: images -->\n<!-- /table -->\n"
    records.append(path, records.records_of(written()), overwrite=False)
    assert "busy" not in tables.with_tables(block, tmp_path)
    later = records.records_of(written(at="new", date="2026-11-22T00:00:00+00:00", wake_us=312.4))
    records.append(path, later, overwrite=False)
    assert "a byte to another process and back took up to 312 us" in tables.with_tables(block, tmp_path)


def test_lost_markers_are_an_error_and_no_results_are_said(tmp_path):
    """A README without a block would never be updated; a block without results says so."""
    with pytest.raises(BenchError, match="no <!-- table"):
        tables.with_tables("# plait\n", tmp_path)
    assert tables.NOT_MEASURED in tables.with_tables("<!-- table: images -->\n<!-- /table -->", tmp_path)


def test_the_generator_rewrites_or_only_checks(tmp_path, monkeypatch):
    """``--check`` is 1 and writes nothing while the file is stale, 0 after the table was written."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: images -->\n<!-- /table -->\n")
    assert tables.main(["--check", str(readme)]) == 1
    assert "Not measured" not in readme.read_text()
    assert tables.main([str(readme)]) == 0
    assert tables.main(["--check", str(readme)]) == 0
    assert tables.NOT_MEASURED in readme.read_text()
    readme.write_text("no block")
    assert tables.main([str(readme)]) == 1


def test_the_guides_show_the_recorded_results():
    """The tables of every guide are what the generator makes of ``loadtest/results`` today."""
    assert {path.parent.name for path in tables.guides()} >= {"serving", "disagg", "autoconfig", "loadtest"}
    assert tables.main(["--check"]) == 0


def test_a_block_can_show_one_metric(tmp_path):
    """Bytes have a table of their own, and stay out of the one of rates; a value without a layout has no brackets."""
    host = {"cpu": "c", "cores": 2, "ram_gib": 1.0, "python": "3.11", "date": "2026-01-01T00:00:00+00:00"}
    common = {"bench": "disagg", "commit": "abc", "host": host, "n": 3, "p20": 1.0, "p80": 1.0, "kind": "measured"}
    lines = [
        {**common, "system": "plait", "workload": "a-1", "metric": "goodput_per_s", "unit": "requests/s", "value": 50.0,
         "layout": "1 threads"},
        {**common, "system": "mincut", "workload": "a-1", "metric": "crossing_bytes", "unit": "bytes", "value": 1536.0,
         "layout": ""},
    ]  # fmt: skip
    (tmp_path / "disagg.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    blocks = ["<!-- table: disagg -->\n<!-- /table -->", "<!-- table: crossing -->\n<!-- /table -->"]
    rates, counted = (tables.with_tables(block, tmp_path) for block in blocks)
    assert "| `a-1` | requests/s | 50 (1 threads) |" in rates
    later = {**lines[1], "value": 1600.0, "host": {**host, "date": "2026-01-02T00:00:00+00:00"}}
    (tmp_path / "disagg.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, later)))
    assert "1,600" in tables.with_tables(blocks[1], tmp_path)
    assert tables.with_tables(blocks[0], tmp_path) == rates  # its own newest run, not the other's
    assert "mincut" not in rates
    assert "| `a-1` | bytes | 1,536 |" in counted
    assert "Counted on c" in counted


def test_every_workload_is_shown_as_it_was_recorded_last(tmp_path):
    """Workloads that are measured one after the other stand in one table, which says all of their commits."""
    host = {"cpu": "c", "cores": 2, "ram_gib": 1.0, "python": "3.11", "date": "2026-01-01T00:00:00+00:00"}
    common = {"bench": "disagg", "n": 3, "p20": 1.0, "p80": 1.0, "kind": "measured", "system": "plait", "layout": ""}
    rate = {"metric": "goodput_per_s", "unit": "requests/s"}
    lines = [
        {**common, **rate, "commit": "old", "host": host, "workload": name, "value": value}
        for name, value in (("a-1", 50.0), ("b-1", 60.0))
    ]
    later = {**lines[0], "commit": "new", "value": 70.0, "host": {**host, "date": "2026-01-02T00:00:00+00:00"}}
    other = {**later, "metric": "latency_p50_ms", "unit": "ms", "value": 3.5}
    (tmp_path / "disagg.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (*lines, later, other)))
    text = tables.with_tables("<!-- table: disagg -->\n<!-- /table -->", tmp_path)
    assert "| `a-1` | requests/s | 70 |\n| `b-1` | requests/s | 60 |" in text
    assert "commits `new`, `old`" in text
    both = tables.with_tables("<!-- table: serve-one-by-one -->\n<!-- /table -->", tmp_path)
    assert "| `a-1` | ms, median | 3.5 |" in both
