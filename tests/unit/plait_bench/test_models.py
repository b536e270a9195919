"""`plait bench models`: the public trace on replicas in virtual time."""

from __future__ import annotations

import csv
import gzip
from datetime import datetime, timedelta
from itertools import cycle
from pathlib import Path

import pytest

from plait_bench.models import (
    FILE,
    ModelFleet,
    Switching,
    TracedRequest,
    benchmark,
    read_trace,
    replay,
    window,
)
from plait_serving.diffusion import assemble, memory
from plait_serving.diffusion.memory import MemoryReader
from support.tiny import tiny_sd

FIELDS = (
    "gmt_create", "predict_status", "num_images_per_prompt", "num_inference_steps", "checkpoint_model_version_id"
)  # fmt: skip
FLEET = ModelFleet(replicas=1, room=1, load=50.0)


@pytest.fixture
def data(tmp_path) -> Path:
    """A made-up trace of 1,200 requests for five models in turn, one of ten of which failed."""
    (tmp_path / FILE).parent.mkdir()
    start = datetime.fromisoformat("2026-01-01T00:00:00")
    with gzip.open(tmp_path / FILE, "wt", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(FIELDS)
        for i, model in zip(reversed(range(1200)), cycle("abcde"), strict=False):
            status = "FAILED" if i % 10 == 0 else "SUCCEED"
            rows.writerow([start + timedelta(seconds=10 * i), status, 1 + i % 2, "" if i % 7 == 0 else 20, model])
    return tmp_path


def test_the_trace_is_read_in_order_without_what_failed(data):
    """Work is images times steps; a row without steps counts as the usual 30."""
    trace = read_trace(data)
    assert len(trace) == 1080
    assert [asked.at for asked in trace] == sorted(asked.at for asked in trace)
    assert {asked.work for asked in trace} == {20.0, 40.0, 30.0, 60.0}


def test_a_window_takes_the_wanted_share_of_the_time(data):
    """Whatever the trace's own clock says."""
    part = window(read_trace(data), 2, count=500, replicas=4, busy=0.5)
    assert (len(part), part[0].at) == (500, 0.0)
    assert sum(asked.work for asked in part) / (4 * part[-1].at) == pytest.approx(0.5)


@pytest.mark.parametrize("system", ["plait", "lru"])
def test_every_request_ends_once_and_none_sooner_than_its_work(system, data):
    """Of any fleet."""
    part = window(read_trace(data), 1, count=300, replicas=3, busy=0.5)
    outcome = replay(system, part, ModelFleet(replicas=3, room=2, load=8.0))
    assert sorted(work for _, work in outcome.latencies) == sorted(asked.work for asked in part)
    assert all(latency >= work - 1e-6 for latency, work in outcome.latencies)


def test_two_models_in_turn_are_loaded_less_often_than_by_lru():
    """With room for one, LRU loads for each request; affinity serves what waits for a model together."""
    asked = [TracedRequest(at=10.0 * i, model="ab"[i % 2], work=20.0) for i in range(60)]
    ours, lru = (replay(system, asked, FLEET) for system in ("plait", "lru"))
    assert lru.loads == 60
    assert ours.loads < 20
    assert ours.ended < lru.ended


def test_a_request_that_finds_its_model_is_not_delayed_by_loads():
    """One model alone: both systems load once and serve as fast as the work allows."""
    asked = [TracedRequest(at=100.0 * i, model="a", work=20.0) for i in range(5)]
    for system in ("plait", "lru"):
        outcome = replay(system, asked, FLEET)
        assert (outcome.loads, [latency for latency, _ in outcome.latencies]) == (1, [70.0, 20.0, 20.0, 20.0, 20.0])


def test_what_is_replayed_is_modelled(data):
    """And says so."""
    (workload,) = benchmark(only=["load8-1x2"], data=data)
    with workload.session(print):
        assert {reading.kind for reading in workload.take("plait", 1)} == {"modelled"}


def test_models_that_were_written_are_measured_in_turn(tmp_path, monkeypatch):
    """Both systems make all images; the one that orders them itself loads less often."""
    for seed in range(4):
        tiny_sd(tmp_path / f"sd15-{seed}", seed=seed)
    for module in (assemble, memory):  # what else the process holds is more than these models
        monkeypatch.setattr(module, "memory_of", lambda *_, **__: MemoryReader())
    workload = Switching("x", tmp_path, family="sd15", edge=32)
    with workload.session(print):
        readings = {
            system: {reading.metric: reading.value for reading in workload.take(system, 1)}
            for system in workload.systems
        }
    assert readings["plait"]["loads"] < readings["fifo"]["loads"]
    assert min(found["images_per_s"] for found in readings.values()) > 0
