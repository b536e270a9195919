"""The command line of `plait bench`: what it refuses in one sentence, and what it prints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from plait.cli.main import main
from plait_bench import images, job, records
from plait_bench.benchmark import RATIO, ResultRow
from plait_bench.errors import BenchError, SystemFailed
from plait_bench.records import document
from plait_bench.runner import BenchResult


def run(capsys, *arguments):
    """``(exit code, stdout, stderr)`` of the command."""
    code = main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def measured(monkeypatch):
    """A measurement that takes no time; what it was asked for, but for what is its default."""
    jobs = []

    def measure(name, *, say, **given):
        jobs.append((name, {key: value for key, value in given.items() if value}))
        say("round 1")
        ratio = ResultRow.of(
            [1.9, 2.0, 2.1], system="plait/diffusers", workload="single", metric="images_per_s", unit=RATIO
        )
        return document("images", "abc123", {"cpu": "Some CPU"}, BenchResult(rows=(ratio,), left_out={}))

    monkeypatch.setattr(job, "measure", measure)
    return jobs


def test_json_is_alone_on_stdout_and_in_the_file(measured, capsys, tmp_path):
    """Data on stdout, progress on stderr; ``--out`` writes the same document."""
    out = tmp_path / "bench.json"
    code, stdout, stderr = run(capsys, "images", "--json", "--quick", "--out", str(out))
    assert code == 0
    assert json.loads(stdout) == json.loads(out.read_text())
    assert json.loads(stdout)["ratios"] == {"single:images_per_s:plait/diffusers": 2.0}
    assert stderr == "round 1\n"
    assert measured == [("images", {"quick": True})]


def test_what_was_measured_is_printed_where_its_file_cannot_be_written(measured, capsys):
    """It took hours."""
    code, stdout, stderr = run(capsys, "images", "--json", "--out", "/nosuch/bench.json")
    assert (code, json.loads(stdout)["bench"]) == (1, "images")
    assert "/nosuch/bench.json cannot be written" in stderr


def test_sigterm_ends_a_measurement_where_sigint_is_ignored(monkeypatch):
    """A shell ignores Ctrl-C for what it runs in the background: servers were left when such a run was ended."""
    monkeypatch.setattr(job, "measure", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert main(["bench", "images"]) == 130
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_a_missed_promise_is_exit_code_99(monkeypatch, capsys):
    """It stands below the table, and in the document."""
    row = ResultRow.of([1.0], system="plait", workload="ends", metric="wrong", unit="requests")
    result = BenchResult(rows=(row,), left_out={}, missed=("ends: wrong: an image",))
    monkeypatch.setattr(job, "measure", lambda *_, **__: document("faults", "abc123", {}, result))
    code, stdout, _ = run(capsys, "faults")
    assert (code, stdout.splitlines()[-1]) == (99, "MISSED: ends: wrong: an image")
    code, stdout, _ = run(capsys, "faults", "--json")
    assert (code, json.loads(stdout)["missed"]) == (99, ["ends: wrong: an image"])


def test_options_reach_the_job(measured, capsys, tmp_path):
    """The benchmark's own rounds unless said otherwise; nothing is recorded unless asked for."""
    code, stdout, _ = run(capsys, "images", "--workload", "same16", "--models", str(tmp_path))
    assert code == 0
    assert "plait/diffusers" in stdout
    run(capsys, "images", "--record", "--rounds", "7", "--system", "plait", "--size", "sd15", "--edge", "512")
    run(capsys, "images", "--device", "cuda", "--at", "abc123")
    assert measured == [
        ("images", {"workloads": ["same16"], "models": tmp_path}),
        ("images", {"rounds": 7, "systems": ["plait"], "record": True, "size": "sd15", "edge": 512}),
        ("images", {"copy_of": "abc123", "device": "cuda"}),
    ]


def test_an_option_of_another_benchmark_is_refused(monkeypatch, capsys):
    """Not ignored; what the environment names for all of them is no option of one."""
    monkeypatch.setenv("PLAIT_BENCH_DATA", "/nowhere")
    code, stdout, stderr = run(capsys, "fabric", "--size", "sd15")
    assert (code, stdout, stderr) == (1, "", "plait bench: fabric takes no size\n")


def test_an_unknown_benchmark_is_wrong_usage(capsys):
    """Exit code 2, and the sentence says what there is."""
    code, stdout, stderr = run(capsys, "cakes")
    assert (code, stdout) == (2, "")
    assert "there is no benchmark 'cakes'; there is: images, loadtest, disagg" in stderr


def test_a_failed_benchmark_is_one_sentence(monkeypatch, capsys):
    """Exit code 1 and no traceback."""

    def fail(*_, **__):
        raise SystemFailed("diffusers: its process died (exit code 9)")

    monkeypatch.setattr(job, "measure", fail)
    assert run(capsys, "images")[::2] == (1, "plait bench: diffusers: its process died (exit code 9)\n")


@pytest.mark.parametrize("name", job.NAMES)
def test_an_unknown_workload_is_a_sentence(capsys, name):
    """Of every benchmark, before anything is started."""
    code, _, stderr = run(capsys, name, "--workload", "cake")
    assert code == 1
    assert "there is no workload 'cake'; there " in stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--size", "sd3"), "there is no size 'sd3'; there are starter, sd15, sdxl"),
        (("--size", "sd15", "--edge", "300"), "images are 256, 512, 1024 pixels wide, not 300"),
        (("--dtype", "float8", "--device", "cuda"), "this machine does not compute in float8"),
        (("--dtype", "float8"), "this machine does not compute in float8"),
        (("--size", "sdxl", "--workload", "same16"), "there is no workload 'same16'; there are start, single"),
    ],
)
def test_a_kind_that_does_not_exist_is_a_sentence(capsys, arguments, sentence):
    """Before any model is written."""
    code, _, stderr = run(capsys, "images", *arguments)
    assert code == 1
    assert sentence in stderr


def test_bfloat16_is_measured_where_the_cpu_has_it(monkeypatch, capsys):
    """Emulated, it would only show how slow that is."""
    monkeypatch.setattr("plait_kernels.cores.has_bfloat16", lambda: True)
    assert images.dtypes("auto") == ("float32", "bfloat16")
    assert images.dtypes("bfloat16") == ("bfloat16",)
    monkeypatch.setattr("plait_kernels.cores.has_bfloat16", lambda: False)
    assert images.dtypes("auto") == ("float32",)
    assert images.dtypes("auto", "cuda") == ("float16",)
    assert run(capsys, "images", "--dtype", "bfloat16")[0] == 1


def test_without_a_checkout_there_are_no_benchmarks(monkeypatch, capsys):
    """The wheel has none; the sentence says where they are."""
    monkeypatch.setitem(sys.modules, "plait_bench.job", None)
    code, stdout, stderr = run(capsys, "images")
    assert (code, stdout) == (1, "")
    assert "benchmarks are not installed: run this in a clone" in stderr


def test_a_benchmark_loads_only_what_it_needs():
    """The command of the image benchmark loads less than 90 of our modules, nothing of another benchmark, and no torch:
    only worker processes need it."""
    program = """
import json, sys
sys.modules["torch"] = None
from plait.cli.main import main
try:
    main(["bench", "images", "--workload", "same16", "--quick", "--models", "/nowhere"])
except SystemExit:
    pass
print(json.dumps([name for name in sys.modules if name.split(".")[0].startswith("plait")]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "/nowhere lacks" in done.stderr
    loaded = json.loads(done.stdout)
    assert len(loaded) < 90
    assert not [name for name in loaded for other in job.NAMES[1:] if name.startswith(f"plait_bench.{other}")]


def test_a_run_that_is_stopped_keeps_what_it_had(monkeypatch, tmp_path):
    """Each workload is recorded when it is measured; what fails later takes nothing away."""
    row = ResultRow.of([1.0], system="plait", workload="shm-1mib", metric="gb_per_s", unit="GB/s")

    def measured(*_, **__):
        yield BenchResult(rows=(row,), left_out={})
        raise SystemFailed("no room")

    monkeypatch.setattr(job, "run", measured)
    monkeypatch.setattr(records, "require_clean", lambda _: None)
    with pytest.raises(SystemFailed, match="no room"):
        job.measure("fabric", say=lambda _: None, rounds=1, record=True, results=tmp_path / "rows.jsonl")
    assert [found["workload"] for found in records.read(tmp_path / "rows.jsonl")] == ["shm-1mib"]


def test_a_copy_without_git_is_told_its_commit(monkeypatch, tmp_path):
    """Its rows are recorded under that; a checkout knows its own."""
    row = ResultRow.of([1.0], system="plait", workload="shm-1mib", metric="gb_per_s", unit="GB/s")
    monkeypatch.setattr(job, "run", lambda *_, **__: [BenchResult(rows=(row,), left_out={})])
    results = tmp_path / "rows.jsonl"
    monkeypatch.setattr(job, "commit", lambda _: "unknown")
    job.measure("fabric", say=lambda _: None, copy_of="abc123", record=True, results=results)
    assert [found["commit"] for found in records.read(results)] == ["abc123"]
    monkeypatch.setattr(job, "commit", lambda _: "def456")
    with pytest.raises(BenchError, match="knows its commit"):
        job.measure("fabric", say=lambda _: None, copy_of="abc123", record=True, results=results)
