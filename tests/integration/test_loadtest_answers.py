"""What a run reports of answers that look good and are not: its counts are the server's own."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest

from fakes.bad_server import BEHAVIOURS, bad_server
from plait_loadtest.scenario import Scenario
from plait_loadtest.session import run_scenario

PARTIAL = (
    b'event: image_generation.partial_image\ndata: {"type": "image_generation.partial_image", "b64_json": "x"}\n\n'
)
COMPLETED = PARTIAL.replace(b"partial_image", b"completed")


def answer(body, kind="application/json", status=200, headers=""):
    """The bytes of an answer."""
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body
    )


def stream(*events):
    """The bytes of an answer as a stream."""
    return answer(b"".join(events), "text/event-stream; charset=utf-8")


def images(*entries):
    """The bytes of an answer with these entries."""
    return answer(json.dumps({"created": 1, "data": entries}).encode())


STREAMS = {
    "good": stream(PARTIAL, COMPLETED),
    "good, done": stream(COMPLETED, b"data: [DONE]\n\n"),
    "an error in the stream": stream(PARTIAL, b'data:{"error":{"message":"full"}}\n\n'),
    "an error in the stream ": stream(PARTIAL, b'data: { "error": {"message":"full"}}\n\n'),
    "an error in the stream  ": stream(PARTIAL, b'event: error\ndata: {"type": "error", "message": "full"}\n\n'),
    "the stream ended without image_generation.completed": stream(PARTIAL),
}
SINGLE = {
    "good": images({"b64_json": "x"}),
    "0 of 1 images came": images({"b64_json": ""}),
    "0 of 1 images came ": images({"b64_json": None}),
    "0 of 1 images came  ": answer(b'{"error": "full"}'),
}
FOUR = {"good": images(*[{"b64_json": "x"}] * 4), "1 of 4 images came": images({"b64_json": "x"})}


def ask(answers, count, api="images", **mix):
    """The report of a run whose server gives its answers in turn, and how often it gave each."""
    given = Counter()
    turns = itertools.cycle(answers)

    def behave(_server, connection, _served):
        name = next(turns)
        given[name.strip()] += 1
        connection.sendall(answers[name])
        return True

    scenario = {
        "arrivals": {"kind": "constant", "rate_per_s": 100},
        "duration_s": count / 100,
        "slo": {"latency_ms": 50_000},
        "mix": [{"api": api, **mix}],
    }
    with pytest.MonkeyPatch.context() as patched, bad_server() as server:
        patched.setitem(BEHAVIOURS, "turns", behave)
        target = {"url": server.url, "path": "/turns", "api": api}
        return run_scenario(Scenario.model_validate(scenario | {"target": target})), given


@pytest.mark.parametrize(
    ("answers", "mix", "received"),
    [(STREAMS, {"stream": True}, 1), (SINGLE, {}, 1), (FOUR, {"images": 4}, 4)],
    ids=["streams", "single", "four"],
)
def test_only_what_came_is_counted(answers, mix, received):
    """Streams that break off or end early, empty images, fewer than were asked for: errors, each with its reason."""
    done, given = ask(answers, 24, **mix)
    total = done.summary.total
    good = sum(count for name, count in given.items() if name.startswith("good"))
    assert sum(given.values()) == total.requests == 24
    assert (total.succeeded, total.errors) == (good, {"check": 24 - good})
    rows, whys = done.result.records, done.result.whys
    told = Counter(whys[why].partition(":")[0] for why in rows["why"].tolist() if why)
    assert told == {name: count for name, count in given.items() if not name.startswith("good")}
    wanted = good * received + given["1 of 4 images came"]
    assert int(rows["images"].sum()) == wanted


def test_each_error_says_why():
    """Status and what the server said, where a redirect leads, what was no HTTP, what a stream told; each counted."""
    answers = {
        "503: {'id': 1, 'message': 'full'}": answer(b"{'id': 1, 'message': 'full'}", status=503),
        "404: no such model": answer(b"no such\r\n model", status=404),
        "301: to https://elsewhere/": answer(b"moved", status=301, headers="location: https://elsewhere/\r\n"),
        "not a status line: SSH-9.9 here": b"SSH-9.9 here\r\n\r\n",
        'an error in the stream: {"error": 1}': stream(b'data: {"error": 1}\n\n'),
    }
    done, given = ask(answers, 25, api="raw")
    told = {one.why: one.count for each in done.summary.total.failures.values() for one in each}
    assert told == given == dict.fromkeys(answers, 5)
    assert done.summary.total.errors == {"garbled": 5, "http_4xx": 5, "http_5xx": 5, "http_other": 5, "check": 5}
