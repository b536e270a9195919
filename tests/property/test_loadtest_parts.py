"""A run of several generator hosts, merged, is the run of one that sent every request: all numbers, not nearly."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait_loadtest import parts
from plait_loadtest.errors import ReportError, ScenarioError
from plait_loadtest.parts import merged
from plait_loadtest.plan import shares
from plait_loadtest.report.document import report
from plait_loadtest.scenario import ClosedLoopCallers, GeneratorLimits, ImageClass, Slo
from plait_loadtest.session import finished
from plait_loadtest.thresholds import parse_all
from plait_loadtest.values import Echo, HostPart, RequestOutcome
from support import loadtest_records as made

SCENARIO = made.scenario(
    duration_s=4.0,
    warm_up_s=1.0,
    mix=(ImageClass(name="a"), ImageClass(name="b", weight=2.0)),
    slos={"a": Slo(latency_ms=50.0, percentile=90.0)},
    thresholds=("p99_ms < 250", "a.attainment > 0.5"),
)


@st.composite
def runs(draw):
    """Records of a run with every outcome, of both classes, some of the warm-up; and how many hosts sent them."""
    count = draw(st.integers(1, 120))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    outcome = rng.choice([outcome.value for outcome in RequestOutcome], count, p=_mostly_ok())
    scheduled_s = np.sort(rng.uniform(0.0, 5.0, count))
    records = made.records(
        scheduled_s, rng.exponential(60.0, count), outcome=outcome, lag_ms=rng.exponential(1.0, count)
    )
    records["kind"] = rng.integers(0, 2, count)
    records["warm_up"] = scheduled_s < 1.0
    records["server_ms"] = np.where(rng.random(count) < 0.3, np.nan, rng.exponential(40.0, count))
    records["images"] = rng.integers(0, 5, count)
    records["why"] = np.where(outcome == RequestOutcome.OK, 0, rng.integers(0, 3, count))
    return records, draw(st.integers(1, 5))


def _mostly_ok():
    weights = np.full(len(RequestOutcome), 0.02)
    weights[RequestOutcome.OK] += 1.0 - weights.sum()
    return weights


def session(records, part, *, interrupted=False):
    """What a host kept of its part; its echo answered at other times than the others'."""
    result = replace(
        made.result(records, wall_s=6.0, interrupted=interrupted, whys=("", "503: full", "it was closed")),
        echo=Echo(scheduled_ns=np.array([part.rank * 10**9]), latency_ns=np.array([10**5 * (part.rank + 1)])),
    )
    asked = parse_all(SCENARIO.thresholds, kinds=["a", "b"])
    return finished(result, SCENARIO, asked, part=part)


def told(run):
    """Everything that is reported but the host, whose load changes meanwhile."""
    found = report(run)
    del found["host"]
    return found


@settings(max_examples=25)
@given(runs(), st.booleans())
def test_parts_merged_are_the_whole(run, interrupted):
    """Percentiles, rates, errors, verdicts, histograms and their parts by time, whatever the number of hosts."""
    records, hosts = run
    pieces = [
        session(records[rank::hosts], HostPart(rank=rank, hosts=hosts), interrupted=interrupted)
        for rank in range(hosts)
    ]
    random.Random(0).shuffle(pieces)
    found = merged(pieces)
    whole = session(records, HostPart(), interrupted=interrupted)
    echo = Echo(
        scheduled_ns=np.concatenate([piece.result.echo.scheduled_ns for piece in pieces]),
        latency_ns=np.concatenate([piece.result.echo.latency_ns for piece in pieces]),
    )
    expected = finished(
        replace(whole.result, echo=echo, cpu_s=float(hosts)),
        SCENARIO,
        parse_all(SCENARIO.thresholds, kinds=["a", "b"]),
    )
    assert told(found) == told(expected)
    assert found.result.records.tobytes() == expected.result.records.tobytes()


@given(st.integers(0, 60), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 7))
def test_hosts_send_every_request_once(count, connections, processes, callers):
    """Hosts with other numbers of processes too; callers add up, and no host has less room for the others. One without
    a caller is refused: it would send nothing of its part."""
    hosts = len(processes)
    planned = 0 if callers else count
    plan = made.plan(planned)
    scenario = SCENARIO.model_copy(update={"limits": GeneratorLimits(connections=connections)})
    if callers:
        scenario = scenario.model_copy(update={"arrivals": ClosedLoopCallers(concurrency=callers)})
    if 0 < callers < hosts:
        with pytest.raises(ScenarioError, match="callers cannot be shared"):
            shares(plan, scenario, HostPart(rank=0, hosts=hosts))
        return
    given_ = [
        shares(plan, scenario.model_copy(update={"processes": here}), HostPart(rank=rank, hosts=hosts))
        for rank, here in enumerate(processes)
    ]
    sent = [
        share.rank + share.processes * slot
        for host in given_
        for share in host
        for slot in range(len(share.scheduled_ns))
    ]
    assert sorted(sent) == list(range(planned))
    assert sum(share.callers for host in given_ for share in host) == callers
    assert [sum(share.room for share in host) for host in given_] == [connections] * hosts


@settings(max_examples=10)
@given(runs())
def test_a_part_comes_back_from_its_file(tmp_path_factory, run):
    """Record for record, with everything that is reported of it."""
    records, _ = run
    path = tmp_path_factory.mktemp("part") / "one.npz"
    kept = session(records, HostPart(rank=1, hosts=3))
    parts.write(path, kept)
    back = parts.read(path)
    assert back.result.records.tobytes() == records.tobytes()
    assert back.part == kept.part
    kept = replace(kept, verdicts=())
    assert told(back) == told(kept)


def test_a_damaged_part_is_refused(tmp_path):
    """Records of a class that the scenario has not, with a reason that was not kept, or in another shape."""
    path, records = tmp_path / "one.npz", made.records(np.arange(6) / 2.0, 10.0)
    parts.write(path, session(records, HostPart()))
    with np.load(path) as file:
        stored = dict(file)
    other_class, other_reason = records.copy(), records.copy()
    other_class["kind"], other_reason["why"] = 2, 3
    for name, damaged in (
        ("records", other_class), ("records", other_reason), ("records", records[0]), ("echo", np.array(0)),
    ):  # fmt: skip
        np.savez(path, **{**stored, name: damaged})
        with pytest.raises(ReportError, match=r"one\.npz is"):
            parts.read(path)


@pytest.mark.parametrize("hosts", [2, 3])
def test_what_are_not_all_parts_is_refused(hosts):
    """A part that is missing, one that is there twice, one of another division or scenario; each is named. Parts that
    started apart are merged to an invalid run: their load was not the one that the scenario describes."""
    records = made.records(np.arange(6) / 2.0, 10.0)
    pieces = [session(records[rank::hosts], HostPart(rank=rank, hosts=hosts)) for rank in range(hosts)]
    assert merged(pieces).summary.valid
    late = replace(pieces[0], result=replace(pieces[0].result, started_unix_s=pieces[0].result.started_unix_s + 2.5))
    (reason,) = merged([*pieces[1:], late]).summary.reasons
    assert reason.text == "the hosts started 2.5 s apart (--start-at agrees on a time)"
    other = replace(pieces[0], scenario=SCENARIO.model_copy(update={"seed": 7}))
    for given_, says in (
        ((), "nothing to merge"),
        (pieces[1:], f"of {hosts} parts 1 are missing"),
        ([*pieces, pieces[0]], f"part 1/{hosts} is there twice"),
        ([*pieces, replace(pieces[0], part=HostPart(rank=0, hosts=4))], f"part 1/4 is none of {hosts} parts"),
        ([*pieces[1:], other], "is of another scenario: seed"),
    ):
        with pytest.raises(ReportError, match=says):
            merged(given_)


def test_hosts_may_keep_their_files_elsewhere():
    """In another home folder; a file of another name is another load."""
    records = made.records(np.arange(6) / 2.0, 10.0)

    def part(rank, folder, name="prompts.txt"):
        mix = (ImageClass(name="a", prompts_file=f"{folder}/{name}"), SCENARIO.mix[1])
        target = SCENARIO.target.model_copy(update={"ca": Path(folder, f"{rank}.pem")})
        scenario = SCENARIO.model_copy(update={"mix": mix, "target": target})
        return replace(session(records[rank::2], HostPart(rank=rank, hosts=2)), scenario=scenario)

    assert merged([part(0, "/home/a"), part(1, "/home/b")]).summary.total.requests == 6
    with pytest.raises(ReportError, match="is of another scenario: mix"):
        merged([part(0, "/home/a"), part(1, "/home/a", "other.txt")])
