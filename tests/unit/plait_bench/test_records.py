"""The document, the results file, and what may be recorded."""

from __future__ import annotations

import json
import subprocess

import pytest

from plait_bench import job, records
from plait_bench.benchmark import ResultRow
from plait_bench.document import document
from plait_bench.errors import RecordError
from plait_bench.host import changes, commit, gpu_facts, host_facts, is_in_history
from plait_bench.job import BenchJob
from plait_bench.runner import BenchResult, LayoutChoice
from plait_bench.summary import ValueSummary

HOST = {
    "cpu": "Some CPU", "cores": 2, "instruction_set": "avx2", "ram_gib": 15.6, "os": "Linux 6", "python": "3.11.7",
    "torch": "2.13.0", "diffusers": "0.42.1", "transformers": "5.23.0", "peft": None, "ray": "2.60.0",
    "openvino": "2026.4.1", "triton": None, "loadavg_1m": 0.1, "wake_us": 15.0,
    "date": "2026-11-21T10:00:00+00:00",
}  # fmt: skip

CHOICE = LayoutChoice(
    workload="single",
    system="plait",
    layout="2x1",
    metric="images_per_s",
    trials={"1x1": (1.0, 1.2), "2x1": (3.0, 3.3)},
)


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
        rounds=(0.9 * value, 0.9 * value, value, 1.1 * value, 1.1 * value),
        load=(0.1, 0.4, 0.6, 0.7, 0.8),
        wake_us=15.0,
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
        "single:images_per_s:plait/peer": ValueSummary(
            value=1.5, p20=1.4, p80=1.6, n=5, rounds=(1.4, 1.4, 1.5, 1.6, 1.6)
        ),
        "single:seconds_per_image:plait/peer": ValueSummary(
            value=0.67, p20=0.6, p80=0.7, n=5, rounds=(0.6, 0.6, 0.67, 0.7, 0.7)
        ),
    }
    result = BenchResult(rows=tuple(rows), ratios=ratios, left_out={"third": "needs PEFT"}, choices=(CHOICE,))
    return document("images", at, {**HOST, "date": date, **host}, result)


def test_the_document_has_the_fields_that_programs_read():
    """The names of the contract, plain numbers as ratios, and JSON all the way."""
    doc = json.loads(json.dumps(written()))
    assert set(doc) >= {"bench", "commit", "host", "rows", "ratios"}
    assert set(doc["rows"][0]) >= {"system", "workload", "metric", "unit", "value", "p20", "p80", "n", "kind"}
    assert {entry["kind"] for entry in doc["rows"]} == {"measured"}
    assert doc["ratios"]["single:images_per_s:plait/peer"] == 1.5
    assert doc["ratio_spreads"]["single:images_per_s:plait/peer"] == {"p20": 1.4, "p80": 1.6, "n": 5}
    assert doc["ratio_rounds"]["single:images_per_s:plait/peer"] == [1.4, 1.4, 1.5, 1.6, 1.6]
    assert doc["layouts"][0]["trials"] == {"1x1": [1.0, 1.2], "2x1": [3.0, 3.3]}
    assert doc["left_out"] == {"third": "needs PEFT"}
    assert doc["rows"][0]["value"] == 0.333333


def test_host_facts_name_the_machine_but_nobody():
    """CPU, cores, memory and versions are there; no host name, no user."""
    facts = host_facts()
    assert set(facts) == {*HOST, *gpu_facts()}
    assert facts["cpu"]
    assert facts["cores"] >= 1
    assert facts["torch"]
    assert 1.0 < facts["wake_us"] < 100_000.0


def test_a_folder_that_is_no_checkout_has_no_commit(tmp_path):
    """Benchmarks run from an unpacked archive too."""
    assert commit(tmp_path) == "unknown"


def test_every_record_carries_what_an_audit_asks_for():
    """Commit, date, load before each round, each round's value and the spread; ratios too, and whether it was busy."""
    lines = records.records_of(json.loads(json.dumps(written())))
    assert len(lines) == 7 + 2
    for line in lines:
        assert (line["commit"], line["date"]) == ("abc123", HOST["date"])
        assert len(line["rounds"]) == line["n"] == 5
        assert line["p20"] <= line["value"] <= line["p80"]
        assert (line["load"], line["wake_us"], line["busy"]) == ([0.1, 0.4, 0.6, 0.7, 0.8], 15.0, False)


def test_runs_are_appended_and_nothing_is_replaced(tmp_path):
    """What is there stays byte for byte; the same row of the same commit may stand there twice."""
    path = tmp_path / "sub" / "images.jsonl"
    first = records.records_of(written())
    records.append(path, first)
    before = path.read_bytes()
    records.append(path, records.records_of(written(speed=9.0)))
    assert path.read_bytes().startswith(before)
    assert len(records.read(path)) == 2 * len(first)


def test_what_a_run_has_in_common_is_written_once(tmp_path):
    """The rows come back as they were, also those of files that have it in every row, and mixed ones."""
    path = tmp_path / "images.jsonl"
    rows = records.records_of(written())
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert records.read(path) == rows
    later = [*records.records_of(written(at="def456")), *records.records_of(written(date="2026-11-22T10:00:00+00:00"))]
    records.append(path, later)
    assert records.read(path) == [*rows, *later]
    assert path.read_text().count('"cpu"') == len(rows) + 2


def test_overwriting_is_refused_in_one_sentence():
    """Before anything is measured."""
    with pytest.raises(RecordError, match="append-only"):
        job.measure(BenchJob(name="images", rounds=1, overwrite=True), say=lambda _: None)


def test_a_broken_results_file_names_its_line(tmp_path):
    """A line that is no row is an error, not a row less, and nothing is added to it."""
    path = tmp_path / "images.jsonl"
    path.write_text(json.dumps(records.records_of(written())[0]) + "\n{}\n")
    with pytest.raises(RecordError, match="line 2"):
        records.read(path)
    before = path.read_bytes()
    with pytest.raises(RecordError, match="line 2"):
        records.append(path, records.records_of(written()))
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
    with pytest.raises(RecordError, match=f"--record needs a clean checkout; commit, stash or remove first: {name}$"):
        records.require_clean(checkout)
    assert commit(checkout).endswith("+changes")
    git(checkout, "add", ".")
    assert changes(checkout) == [name]


def test_many_changes_are_counted(checkout):
    """The sentence stays one that can be read."""
    for number in range(5):
        (checkout / "disagg" / f"new{number}.py").write_text("")
    with pytest.raises(RecordError, match=r"new0\.py, disagg/new1\.py, disagg/new2\.py and 2 more$"):
        records.require_clean(checkout)


def test_a_folder_that_is_no_checkout_can_not_be_recorded(tmp_path):
    """Nothing says which commit it would be."""
    with pytest.raises(RecordError, match="is none"):
        records.require_clean(tmp_path)


def test_a_commit_is_in_history_or_not(checkout):
    """Itself and what came before; not what is on another branch, and not what nobody knows."""
    first = git(checkout, "rev-parse", "HEAD")
    git(checkout, "checkout", "-b", "other")
    git(checkout, "commit", "--allow-empty", "-m", "two")
    other = git(checkout, "rev-parse", "HEAD")
    assert is_in_history(checkout, first)
    assert is_in_history(checkout, other[:12])
    git(checkout, "checkout", "main")
    assert not is_in_history(checkout, other)
    assert not is_in_history(checkout, "0" * 40)


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
