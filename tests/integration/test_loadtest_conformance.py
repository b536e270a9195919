"""The report against the server's own ledger: equal to the request, whatever the server does."""

from __future__ import annotations

from collections import Counter
from contextlib import closing

import pytest

from fakes.honest_server import BEHAVIOURS, HonestServer
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import run_scenario
from plait_loadtest.values import RequestOutcome
from support.waiting import wait_for


def scenario_of(url, names, *, timeout_s=300.0, **settings):
    """Image requests of each of these behaviours."""
    rows = {name: BEHAVIOURS[name] for name in names}
    mix = [
        {"api": "images", "name": name, "prompts": [name], "images": row.n, "stream": row.streams, "weight": row.weight}
        for name, row in rows.items()
    ]
    target = {"url": url, "timeout_s": timeout_s}
    arrivals = {"kind": "poisson", "rate_per_s": 200}
    return Scenario.model_validate({"mix": mix, "arrivals": arrivals, "target": target, **settings})


def held_against_the_ledger(names, **settings):
    """Runs the load and compares all counts; returns the number of requests of each behaviour."""
    with closing(HonestServer()) as server:
        session = run_scenario(scenario_of(server.url, names, **settings))
        wait_for(lambda: server.ends.total() >= len(session.result.records))  # a busy one reads what was given up later
    records, scenario = session.result.records, session.scenario
    ends = Counter(
        (scenario.mix[kind].name, RequestOutcome(outcome).name.lower())
        for kind, outcome in zip(records["kind"], records["outcome"], strict=True)
    )
    assert ends == server.ends
    assert int(records["images"].sum()) == server.images
    assert (records["sent_ns"] >= 0).all()
    total, summary = Counter(outcome for _, outcome in ends.elements()), session.summary
    assert (summary.total.requests, summary.total.succeeded) == (ends.total(), total.pop("ok", 0))
    assert summary.total.errors == total
    for name, each in summary.total.failures.items():
        assert sum(one.count for one in each) <= total[name]
        assert all(one.why.startswith(WHYS.get(name, "")) for one in each)
    assert WHYS.keys() & total.keys() <= summary.total.failures.keys()
    for each in summary.classes:
        own = {outcome: count for (name, outcome), count in server.ends.items() if name == each.name}
        assert (each.requests, each.succeeded) == (sum(own.values()), own.pop("ok", 0))
        assert each.errors == own
    return Counter(name for name, _ in ends.elements())


WHYS = {
    "http_other": "302: to /there",
    "http_4xx": "404: {",
    "http_5xx": "503: {",
    "garbled": "not a status line: ",
    "timeout": "target.timeout_s (1 s) was over",
}
"""How the reasons for errors begin that a class of them has one of."""
ANSWERING = [name for name in BEHAVIOURS if name != "dead"]


def test_every_request_is_told_as_the_server_knows_it():
    """300 requests of three processes to a server of 24 behaviours: each class has the server's own counts."""
    seen = held_against_the_ledger(ANSWERING, count=300, processes=3)
    assert set(seen) >= set(ANSWERING) - {"big"}


@pytest.mark.slow
def test_it_is_so_at_length():
    """10 s at 200/s, with bodies of 64 MiB."""
    seen = held_against_the_ledger(ANSWERING, duration_s=10, processes=1)
    assert set(seen) == set(ANSWERING)


def test_requests_that_are_never_answered_are_told_so():
    """After the time that the scenario gives them."""
    assert held_against_the_ledger(["dead"], count=20, processes=1, timeout_s=1) == {"dead": 20}
