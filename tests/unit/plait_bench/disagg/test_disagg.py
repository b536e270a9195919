"""The recommendation benchmark: fair bodies, a search that finds the edge, bytes that follow the arithmetic."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest
import torch

from plait_bench.disagg import goodput, peer
from plait_bench.disagg.goodput import (
    LIMIT_MS,
    MAX_LOAD_S,
    search_goodput,
)
from plait_bench.disagg.peer import HEADER_BYTES, body
from plait_bench.errors import SystemFailed
from plait_disagg.graph.inputs import Bag, Dense, Ids
from plait_disagg.graph.sample_inputs import collate, for_module, sample
from plait_disagg.values import RankRequest
from plait_loadtest.capacity import ClassCount, Observed
from plait_loadtest.confidence import requests_needed

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


SERVER = """
import http.server


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()


def serve():
    server = http.server.HTTPServer(("127.0.0.1", 0), Answers)
    print(server.server_port, flush=True)
    server.serve_forever()
"""


def test_a_server_of_a_benchmark_is_asked_past_any_proxy(monkeypatch, tmp_path):
    """It is on this machine, which a proxy of the environment does not reach."""
    (tmp_path / "bench_server_of_a_test.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with peer.serving([importlib.import_module("bench_server_of_a_test").serve], b"x") as server:
        assert server.ask(b"y").status_code == 200


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

    def test_a_server_that_never_holds_is_an_error(self):
        """And not a rate of zero."""
        with pytest.raises(SystemFailed, match="p99 within 50 ms"):
            searched(0.1, first_per_s=8.0)

    def test_a_load_is_capped_in_time(self, monkeypatch, tmp_path):
        """However slow a server is, nobody waits longer; what it then shows is too little."""
        durations, settled = [], []

        def run(scenario):
            durations.append((scenario.duration_s, scenario.arrivals.rate_per_s, scenario.seed))
            return SimpleNamespace(summary=None)

        monkeypatch.setattr(goodput, "run_scenario", run)
        monkeypatch.setattr(goodput, "observed", lambda _: None)
        (tmp_path / "a.bin").write_bytes(b"x")
        bodies, settle = [tmp_path / "a.bin"], lambda: settled.append(len(durations))
        load = goodput.load_on("http://127.0.0.1:1", bodies, limit_ms=50.0, seed=1000, settle=settle)
        load(2.0, 10_000.0)
        load(2.0, 10.0)
        assert durations == [(MAX_LOAD_S, 2.0, 1001), (10.0, 2.0, 1002)]
        assert settled == [0, 1]  # before each load
