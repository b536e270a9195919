"""The fabric's benchmark: one document from small runs, with its ratios and its labels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

import pytest

from fakes.bench import calm
from plait_bench import fabric
from plait_bench.benchmark import RATIO, Benchmark, Reading, Subject, Workload
from plait_bench.errors import BenchError
from plait_bench.fabric import links, round_trips, throughput, transports
from plait_bench.fabric.peer import echo
from plait_bench.runner import BenchResult, RunPlan, joined, run
from plait_fabric import PeerLost, connect, listen, new_secret


def measured(workload: Workload, rounds: int = 1) -> BenchResult:
    """All of one workload."""
    benchmark = Benchmark(workloads=(workload,))
    return joined(list(run(benchmark, RunPlan(rounds=rounds), say=lambda _: None, look=calm)))


class TwoRounds(Workload):
    """What was measured is 1 and 3, what the model says 2; rows have a name of their own."""

    name = "modelled-links"
    systems = ("plait", "model")
    pairs = (("plait", "model"),)
    metrics: ClassVar[dict[str, str]] = {"one_way_us": "us"}

    @contextmanager
    def open(self, system: str, layout: str) -> Iterator[Subject]:
        values = iter([1.0, 3.0])
        if system == "plait":
            yield Subject(lambda _: [Reading(workload="w", metric="one_way_us", value=next(values))])
        else:
            yield Subject(lambda _: [Reading(workload="w", metric="one_way_us", value=2.0, kind="modelled")])


def test_rounds_become_rows_and_ratios() -> None:
    """Values of all rounds are one row; ratios are taken round by round; what a model says stays labelled."""
    result = measured(TwoRounds(), rounds=2)
    assert [
        (row.workload, row.system, row.value, row.rounds, row.kind) for row in result.rows if row.unit != RATIO
    ] == [
        ("w", "plait", 2.0, (1.0, 3.0), "measured"),
        ("w", "model", 2.0, (2.0, 2.0), "modelled"),
    ]
    assert result.ratios["w:one_way_us:plait/model"].rounds == (0.5, 1.5)


def test_unknown_workloads_are_named() -> None:
    """A workload that is not there is refused with those that are."""
    with pytest.raises(BenchError, match=r"'infiniband'.*shm-1mib"):
        fabric.benchmark(only=["infiniband"])


def test_small_runs_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part measures something in seconds when it is made small, and the far link is as slow as it says."""
    monkeypatch.setattr(throughput, "_PASSES", 1)
    monkeypatch.setattr(throughput, "SOURCE_BYTES", 4 << 20)
    monkeypatch.setattr(round_trips, "_REPEATS", 20)
    monkeypatch.setattr(links, "_SECONDS", 0.05)
    monkeypatch.setattr(links, "_LINKS", (links.FAR,))
    monkeypatch.setattr(links, "SIZES_BYTES", {"64B": 64, "4MiB": 1 << 22})
    monkeypatch.setattr(transports, "SIZES_BYTES", {"64KiB": 1 << 16})
    monkeypatch.setattr(transports, "_SECONDS", 0.05)
    results = [measured(workload()) for workload in fabric.WORKLOADS]
    rows = [row for result in results for row in result.rows if row.unit != RATIO]
    systems = {"plait", "memcpy", "spinning", "blocking", "bare_spinning", "bare_blocking", "model", "tcp", "shm"}
    assert systems <= {row.system for row in rows} <= systems | {"nixl", "nixl_tcp"}  # an extra
    assert {row.kind for row in rows if row.system == "model"} == {"modelled"}
    assert {row.kind for row in rows if row.system != "model"} == {"measured"}
    assert all(row.value > 0 for row in rows)
    far = {row.system: row.value for row in rows if row.workload == f"{links.FAR}-64B"}
    assert far["plait"] >= 0.9 * far["model"]
    ratios = {key for result in results for key in result.ratios}
    assert {"shm-1mib:gb_per_s:plait/memcpy", f"{links.FAR}-64B:one_way_us:plait/model"} <= ratios


def test_round_trips_are_timed_one_by_one() -> None:
    """A time in microseconds for each message that comes back, also over a channel in this process."""
    secret = new_secret()
    with listen("inproc://round-trips", secret=secret) as listener:
        channel = connect(listener.address, secret=secret)
        theirs = listener.accept(30.0)

        def peer_echoes() -> None:
            with suppress(PeerLost):
                echo(theirs)

        peer = threading.Thread(target=peer_echoes)
        peer.start()
        with channel:
            times_us = round_trips.round_trips_us(channel, 64, 5)
        peer.join()
    assert len(times_us) == 5
    assert all(time_us > 0 for time_us in times_us)
