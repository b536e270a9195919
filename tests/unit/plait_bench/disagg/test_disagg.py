"""The recommendation benchmark: fair bodies, a search that finds the edge, bytes that follow the arithmetic."""

from __future__ import annotations

import json
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from plait_bench import disagg, records
from plait_bench.benchmark import Benchmark, Reading, Subject, Workload
from plait_bench.disagg import goodput, peer
from plait_bench.disagg.goodput import (
    LIMIT_MS,
    MAX_LOAD_S,
    SCALES,
    SYSTEMS,
    layouts_of,
    observed,
    search_goodput,
)
from plait_bench.disagg.peer import HEADER_BYTES, body
from plait_bench.errors import BenchError, SystemFailed
from plait_bench.job import BenchJob, measure
from plait_disagg.graph.inputs import Bag, Dense, Ids
from plait_disagg.graph.sample_inputs import collate, for_module, sample
from plait_disagg.values import RankRequest
from plait_loadtest.capacity import ClassCount, Observed
from plait_loadtest.confidence import requests_needed
from plait_loadtest.measure import Reason

INPUTS = (Dense("age", "user", (3,)), Bag("liked", "user"), Ids("item", "item"), Bag("tags", "item"))


def request(candidates: int = 4, seed: int = 0) -> RankRequest:
    """A random request for `INPUTS`."""
    bounds = {"liked": 9, "item": 9, "tags": 9}
    tensors = sample(INPUTS, bounds, candidates=candidates, ids_per_bag=3, seed=seed, ragged=True)
    return RankRequest(request_id="r", model="model", candidates=candidates, tensors=tensors)


class TestBodies:
    @pytest.mark.parametrize("candidates", [1, 4, 64])
    def test_the_peer_reads_what_our_generator_writes(self, candidates):
        """Every tensor, bit for bit, behind a header of the same length for all."""
        asked = request(candidates)
        found = peer.parse(body(asked), HEADER_BYTES)
        assert found.keys() == asked.tensors.keys()
        assert all(torch.equal(found[name], asked.tensors[name]) for name in found)
        assert json.loads(body(asked)[:HEADER_BYTES])["parameters"] == {"binary_data_output": True}

    @pytest.mark.parametrize("candidates", [1, 5])
    def test_the_peer_repeats_the_user_as_forward_wants_it(self, candidates):
        """The naive twin in `graph.feed` says how."""
        asked = request(candidates, seed=candidates)
        found = peer.repeat_user(INPUTS, dict(asked.tensors))
        wanted = for_module(INPUTS, collate(INPUTS, [asked.tensors], [candidates]))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_a_header_that_does_not_fit_is_refused(self):
        """Rather than cut off."""
        tensors = {f"input_{n}": torch.zeros(1, 1) for n in range(200)}
        with pytest.raises(ValueError, match="does not fit"):
            body(RankRequest(request_id="r", model="m", candidates=1, tensors=tensors))


def server(capacity_per_s: float, asked: list[tuple[float, float]]):
    """A server that is in time below its capacity, and late with half of all above; notes what it was asked."""

    def load(rate_per_s: float, duration_s: float) -> Observed:
        asked.append((rate_per_s, duration_s))
        judged = int(rate_per_s * duration_s)
        good = judged if rate_per_s <= capacity_per_s else judged // 2
        count = ClassCount(name="all", percentile=99.0, latency_ms=LIMIT_MS, judged=judged, good=good, blamed=0)
        return Observed(classes=(count,), achieved_per_s=rate_per_s, goodput_per_s=good / duration_s)

    return load


def searched(capacity_per_s: float, first_per_s: float = 100.0, *, trial: bool = False):
    """What was found, and the loads that it took."""
    asked: list[tuple[float, float]] = []
    load = server(capacity_per_s, asked)
    held = search_goodput(load, first_per_s=first_per_s, limit_ms=LIMIT_MS, trial=trial, say=lambda _: None)
    return held, asked


class TestGoodput:
    @pytest.mark.parametrize(("trial", "within"), [(False, 1.06), (True, 1.21)])
    @pytest.mark.parametrize("drift", [0.1, 0.5, 0.95, 1.0, 1.2, 3.0])
    def test_a_round_follows_a_machine_that_drifts(self, drift, trial, within):
        """Begun at the rate that was found before, it ends next to the capacity of now, and is confirmed."""
        held, _ = searched(100.0 * drift, trial=trial)
        assert 100.0 * drift / within <= held.rate_per_s <= 100.0 * drift
        assert held.purpose == "confirm"

    @pytest.mark.parametrize("trial", [False, True])
    @pytest.mark.parametrize("capacity_per_s", [10.0, 100.0, 1000.0])
    def test_every_judged_load_can_show_a_p99(self, capacity_per_s, trial):
        """459 requests or more; trials of layouts too."""
        _, asked = searched(capacity_per_s, first_per_s=capacity_per_s, trial=trial)
        assert all(rate_per_s * duration_s >= requests_needed(0.99) == 459 for rate_per_s, duration_s in asked)

    def test_a_rate_that_misses_is_not_tried_again(self):
        """No second chance."""
        _, asked = searched(100.0, first_per_s=150.0)
        missed = [rate_per_s for rate_per_s, _ in asked if rate_per_s > 100.0]
        assert len(missed) == len(set(missed)) >= 2

    def test_a_server_that_never_holds_is_an_error(self):
        """And not a rate of zero."""
        with pytest.raises(SystemFailed, match="p99 within 50 ms"):
            searched(0.1, first_per_s=8.0)

    def test_all_bodies_are_judged_together(self):
        """They are classes of the load only because each is a file; a lag of the generator counts as the server's."""
        total = SimpleNamespace(judged=500, good=497, blamed=2, achieved_per_s=50.0, goodput_per_s=49.7)
        reasons = [Reason(code=code, text=code) for code in ("send_lag", "too_few", "interrupted")]
        summary: Any = SimpleNamespace(total=total, reasons=reasons)
        seen = observed(summary, 20.0)
        wanted = ClassCount(name="all", percentile=99.0, latency_ms=20.0, judged=500, good=497, blamed=2)
        assert seen.classes == (wanted,)
        assert seen.invalid == (("interrupted", "interrupted"),)

    def test_a_load_is_capped_in_time(self, monkeypatch, tmp_path):
        """However slow a server is, nobody waits longer; what it then shows is too little."""
        durations, settled = [], []

        def run(scenario):
            durations.append((scenario.duration_s, scenario.arrivals.rate_per_s, scenario.seed))
            total = SimpleNamespace(judged=1, good=1, blamed=0, achieved_per_s=1.0, goodput_per_s=1.0)
            return SimpleNamespace(summary=SimpleNamespace(total=total, reasons=[]))

        monkeypatch.setattr(goodput, "run_scenario", run)
        (tmp_path / "a.bin").write_bytes(b"x")
        bodies, settle = [tmp_path / "a.bin"], lambda: settled.append(len(durations))
        load = goodput.load_on("http://127.0.0.1:1", bodies, limit_ms=50.0, seed=1000, settle=settle)
        load(2.0, 10_000.0)
        load(2.0, 10.0)
        assert durations == [(MAX_LOAD_S, 2.0, 1001), (10.0, 2.0, 1002)]
        assert settled == [0, 1]  # before each load


class TestDefinition:
    def test_every_system_has_layouts_for_every_workload(self, tmp_path, monkeypatch):
        """One thread and all cores; the peer also with and without a thread of its own."""
        monkeypatch.setattr(goodput, "cores", lambda: 2)
        for model in SCALES:
            for system in SYSTEMS:
                layouts = layouts_of(model, system, tmp_path)
                assert len(layouts) == len({*layouts.values()}) >= 2

    def test_an_unknown_workload_is_named(self):
        """Before anything is started."""
        with pytest.raises(BenchError, match=r"no workload 'rm9-1'; there are in-process, one-by-one, rm1-1"):
            measure(BenchJob(name="disagg", rounds=1, workloads=("rm9-1",)), say=lambda _: None)

    def test_every_workload_knows_its_metrics_and_its_own(self):
        """A layout is chosen by one of them, and every pair is of systems that take part."""
        for workload in disagg.benchmark().workloads:
            assert not workload.deciding or workload.deciding in workload.metrics
            assert {system for pair in workload.pairs for system in pair} <= set(workload.systems)

    def test_a_run_that_is_stopped_keeps_what_it_had(self, tmp_path, monkeypatch):
        """Each workload is recorded when it is measured; what fails later takes nothing away."""

        class Counted(Workload):
            name, systems = "rm1-1", ("plait",)
            metrics: ClassVar[dict[str, str]] = {"m": "B"}
            untimed = metrics

            @contextmanager
            def open(self, system, layout):
                yield Subject(lambda _: [Reading(metric="m", value=1.0)])

        class Failing(Counted):
            name = "rm1-64"

            def open(self, system, layout):
                raise SystemFailed("no room")

        made = Benchmark(workloads=(Counted(), Failing()))
        monkeypatch.setattr(disagg, "benchmark", lambda only: made)
        monkeypatch.setattr(records, "require_clean", lambda _: None)
        job = BenchJob(name="disagg", rounds=1, record=True, results=tmp_path / "rows.jsonl")
        with pytest.raises(SystemFailed, match="no room"):
            measure(job, say=lambda _: None)
        assert [found["workload"] for found in records.read(tmp_path / "rows.jsonl")] == ["rm1-1"]
