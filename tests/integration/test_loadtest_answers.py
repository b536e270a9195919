"""Why requests failed, as a run reports it."""

from __future__ import annotations

import itertools

import pytest

from fakes.bad_server import BEHAVIOURS, bad_server
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import run_scenario


def answer(body, kind="application/json", status=200, headers=""):
    """The bytes of an answer."""
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body
    )


def test_each_error_says_why():
    """Status and what the server said, where a redirect leads, what was no HTTP, what a stream told; each counted."""
    answers = {
        "503: {'id': 1, 'message': 'full'}": answer(b"{'id': 1, 'message': 'full'}", status=503),
        "404: no such model": answer(b"no such\r\n model", status=404),
        "301: to https://elsewhere/": answer(b"moved", status=301, headers="location: https://elsewhere/\r\n"),
        "not a status line: SSH-9.9 here": b"SSH-9.9 here\r\n\r\n",
        'an error in the stream: {"error": 1}': answer(b'data: {"error": 1}\n\n', "text/event-stream"),
    }
    turns = itertools.cycle(answers.values())

    def behave(_server, connection, _served):
        connection.sendall(next(turns))
        return True

    with pytest.MonkeyPatch.context() as patched, bad_server() as server:
        patched.setitem(BEHAVIOURS, "turns", behave)
        scenario = {
            "target": {"url": server.url, "path": "/turns", "api": "raw"},
            "arrivals": {"kind": "constant", "rate_per_s": 100},
            "duration_s": 0.25,
            "mix": [{"api": "raw"}],
        }
        total = run_scenario(Scenario.model_validate(scenario)).summary.total
    told = {one.why: one.count for each in total.failures.values() for one in each}
    assert told == dict.fromkeys(answers, 5)
    assert total.errors == {"garbled": 5, "http_4xx": 5, "http_5xx": 5, "http_other": 5, "check": 5}
