"""The document, the results file, and what may be recorded."""

from __future__ import annotations

import json
import subprocess

import pytest

from plait_bench import job, records
from plait_bench.benchmark import RATIO, ResultRow
from plait_bench.errors import BenchError
from plait_bench.host import changes, commit, gpu_facts, history, host_facts
from plait_bench.records import document
from plait_bench.runner import BenchResult

HOST = {
    "cpu": "Some CPU", "cores": 2, "instruction_set": "avx2", "ram_gib": 15.6, "os": "Linux 6", "python": "3.11.7",
    "torch": "2.13.0", "diffusers": "0.42.1", "transformers": "5.23.0", "peft": None, "ray": "2.60.0",
    "openvino": "2026.4.1", "triton": None, "loadavg_1m": 0.1, "wake_us": 15.0,
    "date": "2026-11-21T10:00:00+00:00",
}  # fmt: skip


def row(system, workload, metric, value, **more):
    """A row whose spread is 10 %."""
    given = {"unit": "u", "rounds": (0.9 * value, 0.9 * value, value, 1.1 * value, 1.1 * value), **more}
    return ResultRow(
        system=system, workload=workload, metric=metric, value=value, p20=0.9 * value, p80=1.1 * value, n=5,
        layout="2x1", load=(0.1, 0.4, 0.6, 0.7, 0.8), wake_us=15.0, **given,
    )  # fmt: skip


ROWS = (
    row("plait", "single", "seconds_per_image", 1 / 3),
    row("plait", "single", "images_per_s", 3.0),
    row("peer", "single", "images_per_s", 2.0),
    row("plait", "same16", "images_per_s", 2.0),
    row("plait/peer", "single", "images_per_s", 1.5, unit=RATIO),
)


def kept(rows):
    """What a row of a results file says of itself, by workload, system and metric."""
    return {(row["workload"], row["system"], row["metric"]): (row["commit"], row["value"]) for row in rows}


def test_the_document_has_the_fields_that_programs_read():
    """The names of the contract, plain numbers as ratios, and JSON all the way."""
    result = BenchResult(rows=ROWS, left_out={"third": "needs PEFT"})
    doc = json.loads(json.dumps(document("images", "abc123", HOST, result)))
    assert set(doc) >= {"bench", "commit", "host", "rows", "ratios"}
    assert set(doc["rows"][0]) >= {"system", "workload", "metric", "unit", "value", "p20", "p80", "n", "kind"}
    assert doc["ratios"]["single:images_per_s:plait/peer"] == 1.5
    assert doc["ratio_spreads"]["single:images_per_s:plait/peer"] == {"p20": 1.35, "p80": 1.65, "n": 5}
    assert doc["left_out"] == {"third": "needs PEFT"}
    assert doc["rows"][0]["value"] == 0.333333
    assert "plait/peer" not in {entry["system"] for entry in doc["rows"]}


def test_host_facts_name_the_machine_but_nobody():
    """CPU, cores, memory and versions are there; no host name, no user."""
    facts = host_facts()
    assert set(facts) == {*HOST, *gpu_facts()}
    assert 1.0 < facts["wake_us"] < 100_000.0


def test_a_recorded_row_carries_what_an_audit_asks_for(tmp_path):
    """Commit, date, host, load before each round, each round's value and the spread; ratios are rows too."""
    path = tmp_path / "images.jsonl"
    assert records.put(path, "images", "abc123", HOST, ROWS) == 0
    rows = records.read(path)
    assert len(rows) == len(ROWS)
    for row in rows:
        assert (row["bench"], row["commit"], row["date"]) == ("images", "abc123", HOST["date"])
        assert row["host"]["instruction_set"] == "avx2"
        assert len(row["rounds"]) == row["n"] == 5
        assert row["p20"] <= row["value"] <= row["p80"]
        assert (row["load"], row["wake_us"], row["busy"]) == ([0.1, 0.4, 0.6, 0.7, 0.8], 15.0, False)


def test_the_newest_row_that_counts_stands_in_the_place_of_older_ones(tmp_path):
    """By workload, system and metric; all others stay as they are. A time of a busy host is left out and counted."""
    path = tmp_path / "sub" / "images.jsonl"
    records.put(path, "images", "abc123", HOST, ROWS)
    before = kept(records.read(path))
    assert records.put(path, "images", "def456", HOST, [row("plait", "same16", "images_per_s", 9.0, busy=True)]) == 1
    assert kept(records.read(path)) == before
    records.put(path, "images", "def456", HOST, [row("plait", "same16", "images_per_s", 9.0)])
    assert kept(records.read(path)) == {**before, ("same16", "plait", "images_per_s"): ("def456", 9.0)}
    assert path.read_text().count("Some CPU") == 2  # what a run has in common is written once


def test_the_committed_files_are_what_the_program_writes(tmp_path):
    """One row per workload, system and metric, none of a busy host, and each byte as `write` has it."""
    for path in sorted(job.RESULTS.glob("*.jsonl")):
        rows = records.read(path)
        assert len(kept(rows)) == len(rows), path
        assert not [row for row in rows if row.get("busy")], path
        records.write(tmp_path / path.name, rows)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path


def test_a_broken_results_file_names_its_line(tmp_path):
    """A line that is no row is an error, not a row less, and nothing is written."""
    path = tmp_path / "images.jsonl"
    records.put(path, "images", "abc123", HOST, ROWS)
    path.write_text("".join([*path.read_text().splitlines(keepends=True)[:2], "{}\n"]))
    before = path.read_bytes()
    with pytest.raises(BenchError, match="line 3"):
        records.put(path, "images", "def456", HOST, ROWS)
    assert path.read_bytes() == before


# ---- a clean checkout -----------------------------------------------------------------------------------------------


def git(folder, *arguments):
    """Run git in a folder, whoever is at the keyboard."""
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository with a package file, a README and recorded rows."""
    git(tmp_path, "init")
    for name in ("disagg/a.py", "README.md", "loadtest/results/images.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_a_clean_checkout_may_be_recorded(checkout):
    """Also with rows that were recorded a moment ago, and with files outside of the packages."""
    records.require_clean(checkout)
    (checkout / "loadtest/results/images.jsonl").write_text("two\n")
    (checkout / "loadtest/results/fabric.jsonl").write_text("new\n")
    (checkout / "notes.txt").write_text("mine\n")
    records.require_clean(checkout)
    assert commit(checkout) == git(checkout, "rev-parse", "--short=12", "HEAD")


@pytest.mark.parametrize("name", ["disagg/a.py", "README.md", "loadtest/plait_bench/new.py", "disagg/deep/er/new.py"])
def test_a_dirty_checkout_is_refused(checkout, name):
    """A tracked file that differs, staged or not, and an untracked one in a package folder."""
    (checkout / name).parent.mkdir(parents=True, exist_ok=True)
    (checkout / name).write_text("two\n")
    assert changes(checkout) == [name]
    with pytest.raises(BenchError, match=f"--record needs a clean checkout; commit, stash or remove first: {name}$"):
        records.require_clean(checkout)
    assert commit(checkout).endswith("+changes")
    git(checkout, "add", ".")
    assert changes(checkout) == [name]


def test_history_is_that_of_a_checkout(checkout, tmp_path_factory):
    """The commit and what came before, not what is on another branch; an unpacked archive has none, and nothing is
    recorded there."""
    first = commit(checkout)
    git(checkout, "checkout", "-b", "other")
    git(checkout, "commit", "--allow-empty", "-m", "two")
    assert history(checkout) == {first, commit(checkout)}
    git(checkout, "checkout", "main")
    assert history(checkout) == {first}
    archive = tmp_path_factory.mktemp("archive")
    for asked in (records.require_clean, history):
        with pytest.raises(BenchError):
            asked(archive)


def test_a_gpu_is_named_with_its_driver(monkeypatch, tmp_path):
    """As nvidia-smi says, the first of several; where it is missing or fails, nothing is said."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200, 580.1\\nNVIDIA H200, 580.1\\n'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_facts() == {"gpu": "NVIDIA H200", "driver": "580.1"}
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_facts() == {}
    program.unlink()
    assert gpu_facts() == {}
