"""When a load is given up, when a guard breaks in, how failures are told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.tuning.measure import usage
from plait.tuning.measure.early_stop import EarlyStop, Guard
from plait.tuning.measure.load import LoadResult, failure_of
from plait.tuning.measure.measurer import refused_start, worst_metrics
from plait.tuning.measure.usage import gpu_memory_bytes
from plait_autoconfig.values import FailureKind
from plait_loadtest.values import RunProgress


def early_stop(slo_s: float = 1.0, duration_s: float = 40.0) -> EarlyStop:
    """Of a run without warm-up that needs 95 % in time."""
    return EarlyStop(slo_s=slo_s, share=0.95, warm_up_s=0.0, duration_s=duration_s)


def progress(
    elapsed_s: float, handed: int, done: int, errors: int = 0,
    *, recent_p95_ms: float | None = None, planned: int | None = 400,
) -> RunProgress:  # fmt: skip
    """How far a load is."""
    return RunProgress(
        elapsed_s=elapsed_s, planned=planned, handed=handed, done=done, ok=done - errors, errors=errors,
        in_flight=handed - done, waiting=0, recent_p50_ms=recent_p95_ms, recent_p95_ms=recent_p95_ms,
    )  # fmt: skip


def load(served_per_s: float, *, error_share: float = 0.0) -> Iterator[RunProgress]:
    """A server that answers so many a second of twenty that are handed over, told four times a second."""
    for tick in range(1, 160):
        done = int(min(20.0, served_per_s) * tick / 4)
        yield progress(tick / 4, 5 * tick, done, int(done * error_share))


def first_word(policy: EarlyStop | Guard, told: Iterator[RunProgress]) -> tuple[float, str] | None:
    """When it gave up, and why."""
    return next(((each.elapsed_s, why) for each in told if (why := policy(each))), None)


def test_a_load_far_beyond_capacity_is_given_up_early() -> None:
    """Twice the capacity leaves a backlog that the rest of the run cannot answer."""
    found = first_word(early_stop(), load(4))
    assert found[0] <= 20
    assert "wait" in found[1]


@pytest.mark.parametrize("served_per_s", [19.5, 20, 100])
def test_a_load_that_may_still_hold_runs_to_its_end(served_per_s: float) -> None:
    """At or just below the rate nobody can tell before the end."""
    assert first_word(early_stop(), load(served_per_s)) is None


def test_a_pause_of_a_slow_server_is_no_sign() -> None:
    """At one request a second two seconds without an answer happen; the pace of ten answers decides."""
    done = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12, 15, 16, 17, 18, 19]
    told = [progress(float(second), second, answered) for second, answered in enumerate(done, start=1)]
    assert first_word(early_stop(slo_s=2.0, duration_s=20.0), iter(told)) is None


def test_nothing_is_given_up_before_an_answer_was_possible() -> None:
    """A server whose answers take nearly the SLO has none at first: that is no sign."""
    told = [progress(t / 4, int(2 * t / 4), max(0, int(2 * (t / 4 - 4.5)))) for t in range(1, 64)]
    assert first_word(early_stop(slo_s=5.0, duration_s=16.0), iter(told)) is None


def test_a_server_that_only_errs_is_given_up() -> None:
    """Quick errors leave no backlog, and are no service."""
    found = first_word(early_stop(), load(20, error_share=0.8))
    assert "failed" in found[1]


def test_a_closed_loop_is_never_given_up() -> None:
    """Without a plan there is no backlog."""
    assert early_stop()(progress(20.0, 400, 0, planned=None)) is None


def test_a_guard_forgives_one_slow_look_and_no_two() -> None:
    """Latency over the limit twice in a row is a breach; with a good look between it is not. What has no limit is not
    watched."""
    guard = Guard(p95_ms=100)
    looks = [50.0, 300.0, 50.0, 300.0, 300.0]
    said = [guard(progress(index, 10 * index, 10 * index, recent_p95_ms=ms)) for index, ms in enumerate(looks, start=1)]
    assert [bool(why) for why in said] == [False, False, False, False, True]
    assert "100 ms" in str(said[-1])
    assert Guard()(progress(100.0, 1000, 5, errors=5, recent_p95_ms=1e6)) is None


def test_a_guard_hears_silence_and_errors() -> None:
    """No answer at all is slower than a slow one, and errors count from five answers on."""
    silent = Guard(p95_ms=100)
    assert silent(progress(0.5, 5, 0)) is None
    assert silent(progress(1.6, 16, 0)) is not None
    wrong = Guard(error_rate=0.1)
    assert wrong(progress(0.5, 4, 4, errors=4)) is None
    assert wrong(progress(1.0, 10, 10, errors=4)) is not None


def test_a_guard_looks_as_often_as_it_is_told() -> None:
    """What comes between two looks is not seen."""
    guard = Guard(p95_ms=100, every_s=1.0)
    looks = [(0.25, 300.0), (0.5, 300.0), (1.25, 50.0), (1.5, 300.0), (2.25, 300.0), (3.25, 300.0)]
    said = [bool(guard(progress(at_s, 10, 10, recent_p95_ms=ms))) for at_s, ms in looks]
    assert said == [False, False, False, False, False, True]


@pytest.mark.parametrize(
    ("reason", "kills", "kind"),
    [
        ("ModelError: no such folder", 0, FailureKind.REFUSED_START),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", 0, FailureKind.OUT_OF_MEMORY),
        ("the replica died", 1, FailureKind.OUT_OF_MEMORY),
        ("there is no room for that", 0, FailureKind.REFUSED_START),
    ],
)
def test_a_start_is_refused_or_lacks_memory(reason: str, kills: int, kind: FailureKind) -> None:
    """The kind a designer learns from."""
    assert refused_start(reason, oom_kills=kills) is kind


def test_failures_under_load_are_told_apart() -> None:
    """Death by memory, death, a guard, time, the generator's own fault, silence; a measurement is none of these."""
    good = {"goodput_per_s": 1.0}
    cases = [
        (LoadResult(metrics=good), {"died": ("engine",), "oom_kills": 1}, FailureKind.OUT_OF_MEMORY),
        (LoadResult(metrics=good), {"died": ("engine",), "log": "MemoryError"}, FailureKind.OUT_OF_MEMORY),
        (LoadResult(metrics=good), {"died": ("engine",), "log": "some room"}, FailureKind.CRASH),
        (LoadResult(metrics=good, ended_early="guard: p95", guarded=True), {}, FailureKind.TIME_OUT),
        (LoadResult(metrics=good, ended_early="guard: 5 requests failed", guarded=True), {}, FailureKind.CRASH),
        (LoadResult(metrics=good, timed_out=True), {}, FailureKind.TIME_OUT),
        (LoadResult(metrics=good, invalid="requests left late"), {}, FailureKind.INVALID),
        (LoadResult(metrics={}, errors={"connect": 3}), {}, FailureKind.CRASH),
        (LoadResult(metrics={}, errors={"interrupted": 3}), {}, FailureKind.TIME_OUT),
    ]
    for loaded, evidence, kind in cases:
        outcome = failure_of(loaded, **evidence)
        assert outcome.failure is kind
    assert failure_of(LoadResult(metrics=good), oom_kills=1) is None


def test_of_several_scenarios_the_worst_counts() -> None:
    """Less good, slower, dearer; what only one of them has is left out."""
    one = {"goodput_per_s": 5.0, "p99_ms": 10.0, "extra": 1.0}
    assert worst_metrics([one, {"goodput_per_s": 4.0, "p99_ms": 8.0}]) == {"goodput_per_s": 4.0, "p99_ms": 10.0}
    assert worst_metrics([]) == {}


def test_what_a_process_used_that_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server's worker that makes room for a new one: its seconds of before the load are not taken off."""
    seconds = {1: 100.0, 2: 5.0}
    monkeypatch.setattr(usage, "_cpu_s", lambda pid: seconds.get(pid, 0.0))
    sampler = usage.UsageSampler(seconds)
    seconds |= {1: 103.0, 2: 6.0}
    assert sampler.used().cpu_s == 4.0
    del seconds[1]
    seconds[2] = 7.0
    assert sampler.used().cpu_s == 5.0


def test_gpu_memory_is_that_of_our_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of nvidia-smi; other people's processes and lines that are none do not count. Without it there is none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_bytes([12, 14]) == 0
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '12, 100\n13, 50\nNo devices\n14, [N/A]'\n")
    command.chmod(0o755)
    assert gpu_memory_bytes([12, 14]) == 100 << 20
