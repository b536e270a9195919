"""The recommendation benchmark: fair bodies, a search that finds the edge, bytes that follow the arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

from plait_bench import disagg
from plait_bench.benchmark import ResultRow
from plait_bench.disagg import SYSTEMS, WORKLOADS, baseline, layouts_of
from plait_bench.disagg.bodies import HEADER_BYTES, body
from plait_bench.disagg.crossing import rows as crossing_rows
from plait_bench.disagg.goodput import LIMIT_MS, RateAttempt, around
from plait_bench.errors import BenchError, SystemFailed
from plait_bench.job import BenchJob, measure
from plait_bench.records import read
from plait_disagg.graph.inputs import Bag, Dense, Ids
from plait_disagg.graph.sample_inputs import collate, for_module, sample
from plait_disagg.values import RankRequest

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
        found = baseline.parse(body(asked), HEADER_BYTES)
        assert found.keys() == asked.tensors.keys()
        assert all(torch.equal(found[name], asked.tensors[name]) for name in found)
        assert json.loads(body(asked)[:HEADER_BYTES])["parameters"] == {"binary_data_output": True}

    @pytest.mark.parametrize("candidates", [1, 5])
    def test_the_peer_repeats_the_user_as_forward_wants_it(self, candidates):
        """The naive twin in `graph.feed` says how."""
        asked = request(candidates, seed=candidates)
        found = baseline.repeat_user(INPUTS, dict(asked.tensors))
        wanted = for_module(INPUTS, collate(INPUTS, [asked.tensors], [candidates]))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)

    def test_a_header_that_does_not_fit_is_refused(self):
        """Rather than cut off."""
        tensors = {f"input_{n}": torch.zeros(1, 1) for n in range(200)}
        with pytest.raises(ValueError, match="does not fit"):
            body(RankRequest(request_id="r", model="m", candidates=1, tensors=tensors))


def trial(rate_per_s: float, p99_ms: float, *, failed: int = 0) -> RateAttempt:
    """A trial that served what was offered."""
    return RateAttempt(rate_per_s=rate_per_s, goodput_per_s=rate_per_s, p99_ms=p99_ms, failed=failed)


def server(capacity_per_s: float):
    """A server whose p99 is fine below its capacity and hopeless above."""
    return lambda rate_per_s: trial(rate_per_s, 5.0 if rate_per_s <= capacity_per_s else 900.0)


class TestGoodput:
    @pytest.mark.parametrize("guessed", [False, True])
    @pytest.mark.parametrize("drift", [0.5, 0.95, 1.0, 1.2, 3.0])
    def test_a_round_follows_a_machine_that_drifts(self, drift, guessed):
        """Begun at the rate that was found before, it ends next to the capacity of now."""
        found = around(server(100.0 * drift), 100.0, guessed=guessed, say=lambda _: None)
        assert 100.0 * drift / 1.07 <= found.rate_per_s <= 100.0 * drift

    def test_a_server_that_never_holds_is_an_error(self):
        """And not a rate of zero."""
        with pytest.raises(SystemFailed):
            around(lambda rate_per_s: trial(rate_per_s, 900.0), 8.0, guessed=False, say=lambda _: None)

    @pytest.mark.parametrize(
        ("one", "holds"),
        [
            (trial(10, LIMIT_MS), True),
            (trial(10, LIMIT_MS + 0.1), False),
            (trial(10, 1.0, failed=1), False),
        ],
    )
    def test_what_holds(self, one, holds):
        """In time, and nothing failed."""
        assert one.holds is holds

    def test_one_disturbance_does_not_decide(self):
        """A rate is tried again before it counts as too high."""
        seen: list[float] = []

        def disturbed(rate_per_s: float) -> RateAttempt:
            seen.append(rate_per_s)
            return trial(rate_per_s, 900.0 if len(seen) == 1 or rate_per_s > 150 else 5.0)

        assert around(disturbed, 100.0, guessed=False, say=lambda _: None).rate_per_s > 100.0


class TestDefinition:
    def test_every_system_has_layouts_for_every_workload(self, tmp_path):
        """One thread and all cores; the peer also with and without a thread of its own."""
        for workload in WORKLOADS:
            for system in SYSTEMS:
                layouts = layouts_of(workload, system, tmp_path)
                assert len({layout.name for layout in layouts}) == len(layouts) >= 1

    def test_an_unknown_workload_is_named(self):
        """Before anything is started."""
        with pytest.raises(BenchError, match=r"no workload 'rm9-1'; there are crossing, table-20gb, .*rm1-1"):
            measure(BenchJob(name="disagg", rounds=1, workloads=("rm9-1",)), say=lambda _: None)

    def test_a_run_that_is_stopped_keeps_what_it_had(self, tmp_path, monkeypatch):
        """Each workload is recorded when it is measured; what fails later takes nothing away."""
        row = ResultRow(system="plait", workload="crossing", metric="m", unit="B", value=1.0, p20=1.0, p80=1.0, n=1)

        def fail(**_):
            raise SystemFailed("no room")

        monkeypatch.setattr(disagg, "COUNTED", {"crossing": lambda say: [row], "table-20gb": fail})
        job = BenchJob(name="disagg", rounds=1, record=True, results=tmp_path / "rows.jsonl")
        with pytest.raises(SystemFailed, match="no room"):
            measure(job, say=lambda _: None)
        assert [found["workload"] for found in read(tmp_path / "rows.jsonl")] == ["crossing"]


def test_bytes_follow_the_arithmetic():
    """RM1, 64 candidates: 6 user tables and 128 numbers once, 2 item tables per candidate; untiled all 64 times."""
    found = {
        (row.workload, row.system): row.value
        for row in crossing_rows(say=lambda _: None, models=["rm1"])
        if row.metric == "crossing_bytes"
    }
    assert found["rm1-64", "mincut"] == 4 * (128 + 6 * 32 + 64 * 2 * 32)
    assert found["rm1-64", "mincut_untiled"] == 4 * 64 * (128 + 8 * 32)
    assert found["rm1-1", "mincut"] == found["rm1-1", "mincut_untiled"]
    assert found["rm1-512", "prism"] >= found["rm1-512", "mincut"]
