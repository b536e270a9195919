"""The tables of README files: what they show, what they leave out, and that they are what was recorded."""

from __future__ import annotations

import json

import pytest

from plait_bench import tables
from plait_bench.errors import BenchError
from plait_bench.table_specs import TABLES
from plait_loadtest.host import git_says

HOST = {"cpu": "Some CPU", "cores": 2, "ram_gib": 15.6, "python": "3.11.7", "loadavg_1m": 0.1, "wake_us": 15.0}
OLD, NEW, GONE = "aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc"


@pytest.fixture(autouse=True)
def history(monkeypatch):
    """Two commits are in the history, all others are not."""
    monkeypatch.setattr(tables, "_is_in_history", lambda _, at: at in {OLD, NEW})


def record(system="plait", workload="mixed16", metric="images_per_s", value=2.0, *, at=OLD, day=20, host=HOST, **more):
    """A recorded row whose spread is 10 %."""
    date = f"2026-11-{day}T10:00:00+00:00"
    row = {"bench": "images", "commit": at, "date": date, "host": {**host, "date": date}, "system": system}
    row |= {"workload": workload, "metric": metric, "unit": "images/s", "value": value, "layout": "2x1", "n": 5}
    row |= {"p20": 0.9 * value, "p80": 1.1 * value, "kind": "measured", "busy": False}
    return {**row, **more}


def ratio(value=2.0, **more):
    """A recorded ratio of ours to the peer."""
    return record("plait/peer", value=value, **{"unit": "ratio", **more})


def rendered(folder, rows, name="images"):
    """The lines of a table over recorded rows."""
    (folder / f"{TABLES[name].bench}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = f"before\n<!-- table: {name} -->\nstale\n<!-- /table -->\nafter\n"
    filled = tables.with_tables(text, folder)
    assert "stale" not in filled
    assert tables.with_tables(filled, folder) == filled
    assert filled.startswith(f"before\n<!-- table: {name} -->\n")
    assert filled.endswith("<!-- /table -->\nafter\n")
    return filled.splitlines()[2:-2]


def test_a_line_says_where_its_numbers_come_from(tmp_path):
    """Value with spread, ratio with spread, rounds, load, commit and date; the machine once for all."""
    peak = record(metric="peak_memory_gib", value=3.0, p20=3.0, p80=3.0)
    head, _, ours, theirs, _, *footer = rendered(tmp_path, [record(), peak, record("peer", value=1.0), ratio()])
    assert head == "| workload | system | images/s | GiB, peak | plait's ratio to it | rounds | load | commit | date |"
    assert ours == "| `mixed16` | plait | 2 (1.8 to 2.2) | 3 |  | 5 | 0.10 | `aaaaaaa` | 2026-11-20 |"
    ratio_cell = "**2.00** (1.80 to 2.20)"
    assert theirs == f"|  | peer | 1 (0.9 to 1.1) |  | {ratio_cell} | 5 | 0.10 | `aaaaaaa` | 2026-11-20 |"
    assert "Some CPU, 2 cores, 16 GiB, Python 3.11.7" in footer[0]
    assert all(len(line) <= 120 for line in (head, ours, theirs, *footer))


def test_what_was_recorded_last_is_shown(tmp_path):
    """Each workload by itself."""
    rows = [record(), record(workload="single", value=7.0), record(value=3.0, at=NEW, day=21)]
    lines = rendered(tmp_path, rows)
    assert lines[2].startswith("| `mixed16` | plait | 3 (")
    assert "`bbbbbbb` | 2026-11-21" in lines[2]
    assert lines[3].startswith("| `single` | plait | 7 (")


def test_several_runs_of_a_commit_show_their_spread(tmp_path):
    """The median of the runs, the lowest and the highest; runs of another commit are of another program."""
    rows = [record(value=1.0), *(record(value=value, at=NEW, day=21 + i) for i, value in enumerate((3.0, 5.0, 4.0)))]
    assert "| plait | 4 (3 to 5) |  | 3 x 5 | 0.10 | `bbbbbbb` | 2026-11-23 |" in rendered(tmp_path, rows)[2]


@pytest.mark.parametrize("at", [GONE, f"{OLD}+changes", "unknown", "HEAD"])
def test_what_is_not_in_the_history_is_left_out_and_counted(tmp_path, at):
    """Whatever came after it, and however it is spelled."""
    lines = rendered(tmp_path, [record(), record(value=9.0, at=at, day=22), ratio(at=at, day=22)])
    assert lines[2].startswith("| `mixed16` | plait | 2 (")
    assert lines[-1] == "2 recorded rows are left out: their commit is not in this history."
    lines = rendered(tmp_path, [record(at=at)])
    assert lines == ["Not measured yet.", "1 recorded rows are left out: their commit is not in this history."]


@pytest.mark.parametrize(
    ("more", "load"),
    [
        ({"busy": True}, "0.10 busy"),
        ({"host": {**HOST, "loadavg_1m": 1.9}}, "1.90 busy"),
        ({"host": {**HOST, "wake_us": 300.0}}, "0.10 busy"),
        ({"host": {**HOST, "loadavg_1m": 0.4}}, "0.40"),
    ],
)
def test_a_busy_host_is_marked(tmp_path, more, load):
    """Rows that say so, and those of the time when nothing did."""
    assert f"| 5 | {load} | `aaaaaaa` |" in rendered(tmp_path, [record(**more)])[2]


def test_metrics_stand_side_by_side_or_below_each_other(tmp_path):
    """Latencies in columns; the fabric's rows, each with its unit and what a model says labelled."""
    disagg = {"bench": "disagg", "workload": "serve-one-by-one"}
    rows = [record(metric=metric, value=value, **disagg) for metric, value in (
        ("latency_p50_ms", 3.5), ("latency_p99_ms", 1200.0), ("goodput_per_s", 1.0)
    )]  # fmt: skip
    lines = rendered(tmp_path, rows, "serve-one-by-one")
    assert lines[0].startswith("| workload | system | ms, median | ms, p99 | rounds |")
    assert "| plait | 3.5 (3.15 to 3.85) | 1,200 (1,080 to 1,320) | 5 |" in lines[2]
    assert len(lines) == 6
    fabric = {"bench": "fabric", "workload": "10g-far"}
    rows = [
        record(metric="gb_per_s", value=1.2, **fabric),
        record(metric="alpha_us", value=1000.0, **fabric),
        record("model", metric="gb_per_s", value=1.25, p20=1.25, p80=1.25, kind="modelled", **fabric),
        record("plait/model", metric="gb_per_s", value=0.96, unit="ratio", **fabric),
    ]
    for row in rows[2:]:
        row["kind"] = "modelled" if row["system"] == "model" else "measured"
    lines = rendered(tmp_path, rows, "fabric")
    assert "| `10g-far` | plait | 1.2 (1.08 to 1.32) GB/s |  |" in lines[2]
    assert "1,000 (900 to 1,100) us, alpha" in lines[3]
    assert "| model | 1.25 GB/s modelled | **0.96** (0.86 to 1.06) |" in lines[4]


def test_an_unknown_table_is_an_error(tmp_path):
    """And the sentence says which there are."""
    with pytest.raises(BenchError, match="no table 'cakes'; there are autoconfig, autoconfig-costs"):
        tables.with_tables("<!-- table: cakes -->\n<!-- /table -->\n", tmp_path)


def test_all_files_are_filled_and_checked(tmp_path, monkeypatch, capsys):
    """README.md and those of the folders; ``--check`` is 1, names what is stale and writes nothing."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    files = [tmp_path / "README.md", tmp_path / "disagg" / "README.md", tmp_path / "serving" / "README.md"]
    for path in files:
        path.parent.mkdir(exist_ok=True)
        path.write_text("<!-- table: images -->\n<!-- /table -->\n")
    files[2].write_text("no table\n")
    assert tables.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert [str(path) in said for path in files] == [True, True, False]
    assert "Not measured" not in files[0].read_text()
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    assert all(tables.NOT_MEASURED in path.read_text() for path in files[:2])
    assert files[2].read_text() == "no table\n"
    files[1].write_text("<!-- table: cakes -->\n<!-- /table -->\n")
    assert tables.main(["--check", str(files[1])]) == 1


def test_the_files_show_the_recorded_results(monkeypatch):
    """What stands in README files is what the generator makes of ``loadtest/results`` today."""
    monkeypatch.undo()
    if git_says(tables.ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("needs a checkout with its whole history")
    assert tables.main(["--check"]) == 0


def test_sizes_and_starts_have_tables_of_their_own():
    """A row is in one of the image tables."""
    names = ("images", "images-sd15", "images-sdxl", "images-start")
    shown = {
        workload: [name for name in names if TABLES[name].shows(record(workload=workload, metric=metric))]
        for workload, metric in (
            ("single", "images_per_s"),
            ("sd15-single", "images_per_s"),
            ("sd15-512-single", "peak_memory_gib"),
            ("sdxl-lora", "images_per_s"),
            ("start", "peak_memory_gib"),
            ("sd15-start", "cold_ready_s"),
        )
    }
    assert shown == {
        "single": ["images"],
        "sd15-single": ["images-sd15"],
        "sd15-512-single": ["images-sd15"],
        "sdxl-lora": ["images-sdxl"],
        "start": ["images-start"],
        "sd15-start": ["images-start"],
    }
