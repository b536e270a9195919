"""What documents show of the recorded rows, what they leave out, and that they are what was recorded."""

from __future__ import annotations

import pytest

from plait_bench import results
from plait_bench.errors import BenchError

HOST = {"cpu": "Some CPU", "cores": 2, "ram_gib": 15.6, "instruction_set": "avx2"}


def record(system="plait", workload="mixed16", metric="images_per_s", value=2.0, *, day=20, host=HOST, **more):
    """A recorded row whose spread is 10 %."""
    row = {"bench": "images", "commit": "aaaaaaaaaaaa", "date": f"2026-11-{day}T10:00:00+00:00", "host": host}
    row |= {"system": system, "workload": workload, "metric": metric, "unit": "images/s", "value": value}
    return {**row, "p20": 0.9 * value, "p80": 1.1 * value, "n": 5, "kind": "measured", **more}


def ratio(value=2.0, **more):
    """A recorded ratio of ours to the peer."""
    return record("plait/peer", value=value, **{"unit": "ratio", **more})


def only(*rows, bench="images"):
    """Read these rows of one benchmark, and none of any other."""
    return lambda name: rows if name == bench else ()


def section(*rows, bench="images"):
    """The lines of a benchmark's section."""
    whole = results.page(only(*rows, bench=bench))
    return whole.split(f"## {bench}\n\n")[1].split("\n## ")[0].strip().splitlines()


def test_a_line_says_where_its_numbers_come_from():
    """Values, a ratio with its spread beside what it divides by, the date; the machine once for all."""
    peak = record(metric="peak_memory_gib", unit="GiB, peak", value=3.0, p20=3.0, p80=3.0)
    newer = record("peer", value=1.0, day=21)
    assert section(record(), peak, newer, ratio(day=21)) == [
        "On Some CPU, 2 cores (avx2), 16 GiB:",
        "",
        "| workload | system | images, images/s | peak_memory_gib, GiB, peak | recorded |",
        "|---|---|---:|---:|---|",
        "| `mixed16` | plait | 2 | 3 | 2026-11-20 |",
        "| | peer | 1; **2x** (1.8..2.2) | | 2026-11-21 |",
        "",
        "In bold plait over this system.",
    ]


def test_what_a_model_says_is_labelled_and_what_is_missing_is_said():
    """A modelled value is not a measured one; a benchmark without rows is there too."""
    measured = record(metric="gb_per_s", unit="GB/s")
    modelled = record("lru", metric="gb_per_s", unit="GB/s", kind="modelled")
    assert section(measured, modelled, bench="fabric")[5].startswith("| | lru | 2 (1.8..2.2) modelled |")
    assert section(modelled, bench="fabric")[-1] == "Modelled."
    formula = record("model", metric="gb_per_s", unit="GB/s", kind="modelled")
    assert section(formula, bench="fabric") == ["Not measured yet."]
    assert results.page(only()).count("Not measured yet.") == len(results.SECTIONS)


def test_the_readme_opens_with_what_wins_beside_what_does_not():
    """A ratio of which one fifth is not on the right side of one is marked; what was not recorded is said."""
    key = {"workload": "mixed16", "metric": "images_per_s", "system": "plait/diffusers_fair"}
    text = "before\n<!-- headlines -->\nstale\n<!-- /headlines -->\nafter\n"

    def filled(value):
        return results.with_headlines(text, only(record(value=value, unit="ratio", **key))).splitlines()

    assert filled(2.0)[0] == "before"
    assert filled(2.0)[-1] == "after"
    assert filled(2.0)[4].startswith("| **2.00** (1.80 to 2.20) | [`mixed16`](serving/README.md#benchmarks)")
    assert results.NOT_AHEAD not in filled(2.0)[4]
    assert filled(1.05)[4].startswith(f"| **1.05** (0.95 to 1.16) | {results.NOT_AHEAD}[`mixed16`]")
    assert filled(2.0)[-3].startswith(f"{results.NOT_RECORDED} [`sd15-bf16-mixed4`]")
    with pytest.raises(BenchError, match="no <!-- headlines --> block"):
        results.with_headlines("nothing", only())


@pytest.mark.parametrize(("value", "is_ahead"), [(0.5, True), (1.5, False)])
def test_less_latency_is_ahead(value, is_ahead):
    """Of a median latency, and of trials, the smaller one wins."""
    key = {"workload": "one-by-one-64", "metric": "latency_p50_us", "system": "plait_split/plait", "unit": "ratio"}
    rows = only(record(value=value, **key), bench="disagg")
    text = results.with_headlines("<!-- headlines -->\n<!-- /headlines -->\n", rows)
    assert (results.NOT_AHEAD not in text) is is_ahead


def test_a_guide_has_one_short_table():
    """Of the workloads that it names, at most eight lines; the text around it stays, a second run changes nothing."""
    text = "before\n<!-- results: images same16 single -->\nstale\n<!-- /results -->\nafter\n"
    rows = [
        record(f"s{number}", workload, value=1.0 + number)
        for workload in ("mixed16", "single", "same16")
        for number in range(6)
    ]
    filled = results.with_tables(text, only(*rows))
    lines = [line.split(" | ")[:2] for line in filled.splitlines() if line.startswith(("| `", "| |"))]
    assert [line[0] for line in lines] == ["| `same16`", *["|"] * 5, "| `single`", "|"]
    assert [line[1] for line in lines] == ["s0", "s1", "s2", "s3", "s4", "s5", "s0", "s1"]
    assert (filled.startswith("before\n<!-- "), filled.endswith("<!-- /results -->\nafter\n")) == (True, True)
    assert results.with_tables(filled, only(*rows)) == filled
    with pytest.raises(BenchError, match="no benchmark 'cakes'; there are images, disagg"):
        results.with_tables("<!-- results: cakes all -->\n<!-- /results -->\n", only())


def test_what_is_not_in_the_history_is_not_shown(monkeypatch, tmp_path):
    """However new it is."""
    from plait_bench import records
    from plait_bench.benchmark import ResultRow

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "_history", lambda: {"known"})
    row = ResultRow.of([1.0], system="plait", workload="single", metric="images_per_s", unit="images/s")
    for bench, commit in (("images", "known"), ("disagg", "gone")):
        records.put(tmp_path / f"{bench}.jsonl", bench, commit, HOST, [row])
    assert (len(results.shown("images")), results.shown("disagg")) == (1, [])


def test_documents_are_written_or_checked(tmp_path, monkeypatch, capsys):
    """``--check`` is 1, names what is stale and writes nothing."""
    paths = [tmp_path / "RESULTS.md", tmp_path / "README.md"]
    paths[1].write_text("new\n")
    monkeypatch.setattr(results, "made", lambda: dict.fromkeys(paths, "new\n"))
    assert results.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert [str(path) in said for path in paths] == [True, False]
    assert not paths[0].exists()
    assert results.main([]) == 0
    assert results.main(["--check"]) == 0
