"""Prepared programs of dense halves: equal scores through real workers, updates, and everything that leaves torch."""

from __future__ import annotations

import logging

import pytest
import torch

from plait_disagg.dense import prepared
from plait_disagg.dense.prepared import DensePrograms
from plait_disagg.graph.execute import compile_program
from plait_disagg.package.halves import CompiledDense
from plait_disagg.package.read import Package
from plait_disagg.workers.whole import WholeCore
from plait_kernels.executors import ExecutorError, background
from support import refresh as kit
from support.dense import PackagedConfiguration, programs_win

pytest.importorskip("openvino", reason="needs openvino")

from plait_kernels.executors import openvino_static  # after the skip


@pytest.fixture(scope="module", params=["rm1", "mlperf-dcnv2"])
def model(request, tmp_path_factory) -> PackagedConfiguration:
    return PackagedConfiguration(request.param, tmp_path_factory.mktemp("dense") / request.param)


@pytest.fixture(scope="module")
def tower(tmp_path_factory) -> PackagedConfiguration:
    return PackagedConfiguration("two-tower", tmp_path_factory.mktemp("dense") / "tower")


def half_of(package: Package, **options) -> CompiledDense:
    """A dense half that tries programs on the calling thread, which computes with one thread."""
    half, options = package.dense(prepares=True), {"start": lambda name, work: work()} | options
    half.programs = DensePrograms(compile_program(package.hn, package.constants), **options)
    return half


def run(half: CompiledDense, model: PackagedConfiguration, *rows: int, seed: int = 0):
    """Scores of a batch and of the whole module."""
    requests = model.requests(*rows, seed=seed)
    with torch.inference_mode():
        made = next(iter(half.run(model.package.sparse().run(requests), rows).values()))
    return made, model.wanted(requests)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Trials set their thread's number, and lower its priority for good: not here."""
    monkeypatch.setattr(prepared, "set_threads", lambda threads: None)
    monkeypatch.setattr(prepared, "lower_priority", lambda: None)
    monkeypatch.setattr(prepared, "REST", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [(1,), (100,), (30, 1, 20)])
def test_scores_are_the_whole_models(model, rows):
    """By torch and by a program, of one user and of several, with many candidates and with one."""
    half = half_of(model.package)
    with programs_win():
        for seed in range(0, 40, 10):
            got, wanted = run(half, model, *rows, seed=seed)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        assert half.programs.batches
        if len(rows) > 1:
            got, wanted = run(half, model, 17, 17, 15, seed=99)  # the fewest rows of the same bucket
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)


class TestChoice:
    def test_torch_runs_what_does_not_recur_and_where_it_is_faster(self, tower):
        """A program that takes longer is not used however often its bucket recurs."""
        half = half_of(tower.package)
        with programs_win(torch_s=1.0):
            for seed in range(6):
                run(half, tower, 64, seed=seed)
        assert half.programs.batches == 0
        with programs_win():
            for rows in (3, 6, 12, 24):
                for _ in range(2):
                    run(half, tower, rows)
            assert half.programs.batches == 0
            run(half, tower, 24), run(half, tower, 24)
        assert half.programs.batches == 1

    def test_below_the_rows_from_which_it_pays_torch_runs(self, tower, monkeypatch):
        """Between 49 and 64 rows torch takes 1 to 2 s: a program of 1.5 s pays from 58 on."""
        monkeypatch.setattr(prepared, "medians", lambda runs: {"program": 1.5, "smallest": 1.0, "largest": 2.0})
        half = half_of(tower.package)
        for _ in range(3):
            run(half, tower, 64)
        for rows, batches in ((57, 0), (58, 1), (64, 2), (49, 2)):
            got, wanted = run(half, tower, rows)
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
            assert half.programs.batches == batches

    def test_programs_have_as_many_threads_as_the_thread_that_asks(self, tower, monkeypatch):
        """Another number is another program."""
        seen = []
        compiled = openvino_static.StaticPrograms.compile

        def compile_(self, shapes, settings):
            seen.append(settings.options()["INFERENCE_NUM_THREADS"])
            return compiled(self, shapes, settings)

        monkeypatch.setattr(openvino_static.StaticPrograms, "compile", compile_)
        half = half_of(tower.package)
        with programs_win():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for _ in range(3):
                    run(half, tower, 8)
        assert seen == [1, 2]

    def test_trials_rest_for_nine_times_their_length(self, tower, monkeypatch):
        """By the clock: one of two seconds, then nothing for 18."""
        now_s, tried = [100.0], []
        monkeypatch.setattr(prepared, "REST", 9.0)

        def start(name, work):
            tried.append(now_s[0])
            work()

        def medians(runs):
            now_s[0] += 2.0
            return {"program": 1.0, "smallest": 2.0, "largest": 2.0}

        monkeypatch.setattr(prepared, "medians", medians)
        half = half_of(tower.package, start=start, clock=lambda: now_s[0])
        for _ in range(30):
            for rows in (4, 8):
                run(half, tower, rows)
            now_s[0] += 1.0
        assert len(tried) == 2
        assert tried[1] >= tried[0] + 2.0 + 18.0

    def test_few_programs_are_kept(self, tower):
        """The oldest goes; it is tried again when it recurs."""
        half = half_of(tower.package, max_buckets=2)
        with programs_win():
            for rows in (4, 8, 16, 4):
                before = half.programs.batches
                for _ in range(4):
                    run(half, tower, rows)
                assert half.programs.batches == before + 1

    def test_what_would_take_too_much_memory_and_all_without_openvino_stays_with_torch(self, tower, monkeypatch):
        """By an estimate from the shapes: nothing is converted."""
        small = half_of(tower.package, max_bytes_of_one=1000)
        monkeypatch.setattr(prepared, "available", lambda: False)
        for half in (small, half_of(tower.package)):
            with programs_win():
                for _ in range(5):
                    run(half, tower, 8)
            assert half.programs.batches == 0

    def test_an_exact_package_and_another_device_have_no_programs(self, tmp_path):
        """`--no-tile` promises bits."""
        exact = PackagedConfiguration("two-tower", tmp_path / "exact", tile=False)
        assert exact.package.dense(prepares=True).programs is None
        assert exact.package.dense().programs is None


def spoil(monkeypatch, share):
    """Make all programs compute one row wrong, by that share."""
    honest = openvino_static.StaticProgram.run

    def wrong(self, inputs, *args, **kwargs):
        made = honest(self, inputs, *args, **kwargs)
        made[0][0] += share * float(made[0].abs().max().clamp(min=1.0))
        return made

    monkeypatch.setattr(openvino_static.StaticProgram, "run", wrong)


class TestFallback:
    """torch serves, and the log says once why."""

    def check(self, half, tower, caplog, reason):
        with caplog.at_level(logging.WARNING), programs_win():
            for rows in (8, 64):
                for seed in range(6):
                    got, wanted = run(half, tower, rows, seed=seed)
                    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
        said = [record.message for record in caplog.records if "runs on torch" in record.message]
        assert len(said) == 1
        assert reason in said[0]

    def test_a_conversion_that_fails(self, tower, monkeypatch, caplog):
        """It is not tried again for other sizes."""

        def fail(computation):
            raise ExecutorError("conversion failed: no such operator")

        monkeypatch.setattr(openvino_static, "StaticPrograms", fail)
        half = half_of(tower.package)
        self.check(half, tower, caplog, "no such operator")
        assert half.programs.batches == 0

    def test_a_program_that_computes_something_else(self, tower, monkeypatch, caplog):
        """By a little more than is allowed, in one row only."""
        spoil(monkeypatch, 1e-4)
        half = half_of(tower.package)
        self.check(half, tower, caplog, "differs by 0.0001")
        assert half.programs.batches == 0

    def test_a_program_that_fails_while_it_serves(self, tower, monkeypatch, caplog):
        """The batch is answered all the same."""
        half = half_of(tower.package)
        with programs_win():
            for _ in range(4):
                run(half, tower, 8)
        assert half.programs.batches == 1

        def fail(self, inputs, *args, **kwargs):
            raise RuntimeError("out of memory")

        monkeypatch.setattr(openvino_static.StaticProgram, "run", fail)
        self.check(half, tower, caplog, "out of memory")

    def test_a_program_that_becomes_wrong_is_found_by_an_audit(self, tower, monkeypatch, caplog):
        """Within a thousand batches: that one is answered by torch as all later ones are, with other weights as well;
        the log says so once, and the worker counts it."""
        half = half_of(tower.package)
        with programs_win():
            for _ in range(4):
                run(half, tower, 8)
        assert half.metrics() == {"audit_checked_total": 1, "audit_drifted_total": 0}
        spoil(monkeypatch, 2e-5)
        requests = tower.requests(8, seed=0)
        given, wanted = tower.package.sparse().run(requests), tower.wanted(requests)
        off = 0
        with torch.inference_mode(), caplog.at_level(logging.WARNING), programs_win():
            for _ in range(1010):
                made = next(iter(half.run(given, (8,)).values()))
                off += not torch.allclose(made, wanted, rtol=1e-5, atol=1e-5)
            assert off <= 999
            updated = half.updated({}, {})
            for programs in (half.programs, updated.programs):
                before = programs.batches
                for _ in range(5):
                    (updated if programs is updated.programs else half).run(given, (8,))
                assert programs.batches == before
        assert [record.levelname for record in caplog.records if "an audit of 8 rows" in record.message] == ["ERROR"]
        assert updated.metrics() == half.metrics() == {"audit_checked_total": 2, "audit_drifted_total": 1}
        core = WholeCore(tower.package.card(), tower.package.sparse(), half)
        assert core.metrics()["audit_drifted_total"] == 1
        core.stop(drain_s=0.5)


class TestUpdates:
    """Programs of the weights of before never answer for the weights of now."""

    async def test_every_answer_is_of_the_version_it_names(self, parts, tmp_path, rig):
        """Three versions while requests come: by programs and by torch, each within 1e-5 of its version's own twin."""
        folder = kit.copied(parts, tmp_path / "parts")
        answers, on_programs = [], []
        with programs_win():
            served = await kit.ServedPackage(rig, folder, prepares=True).ready()
            for version in ("1", "2", "3"):
                if version != "1":
                    base = str(int(version) - 1)
                    made = kit.update(served.package, base, version, seed=int(version))
                    await served.publish(kit.written(tmp_path / f"u{version}", made))
                for seed in range(12):
                    answers.append((version, seed, await served.rank(seed)))
                    background.wait()
                on_programs.append(served.hn_packages[0].dense[version].programs.batches)
        assert all(batches >= 6 for batches in on_programs), on_programs
        twins = kit.version_twins(folder, tmp_path)
        for version, seed, answer in answers:
            assert answer.version == version
            wanted = kit.scores(twins[version], kit.request(served.package, seed))
            scale = float(wanted.abs().max().clamp(min=1))
            got = next(iter(answer.outputs.values()))
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5 * scale)
        by_version = {v: next(iter(a.outputs.values())) for v, seed, a in answers if seed == 0}
        assert float((by_version["1"] - by_version["2"]).abs().max()) > 1e-2
