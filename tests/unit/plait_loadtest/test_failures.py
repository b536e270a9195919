"""Why requests failed: which texts are alike, and what is never in one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from plait_loadtest.failures import FailureLog, FailureTexts, joined
from plait_loadtest.scenario import LoadTarget, RawClass, Scenario
from plait_loadtest.values import RequestOutcome
from plait_loadtest.wire.framing import parse_head
from support.loadtest_records import records


def log_of(**target):
    """The log of a scenario whose class has a key of its own."""
    mix = (RawClass(headers={"x-api-key": "sesame-7731"}),)
    return FailureLog(Scenario(target=LoadTarget(api="raw", timeout_s=20.0, **target), mix=mix))


def text_of(log, outcome, *, status=200, headers=(), body=b"", why="", first_byte_ns=5):
    """The text for a request that ended so."""
    head = parse_head("\r\n".join([f"HTTP/1.1 {status} X", *headers]).encode())
    connection = SimpleNamespace(head=head, body=body, why=why, first_byte_ns=first_byte_ns)
    return log.texts[log.of_connection(outcome, connection)]


def test_what_is_told():
    """Status and body, where a redirect leads, the limit that was met, what was wrong with the bytes."""
    log = log_of()
    assert text_of(log, RequestOutcome.HTTP_5XX, status=503, body=b'{"error":\n "full"}') == '503: {"error": "full"}'
    assert text_of(log, RequestOutcome.HTTP_4XX, status=404) == "404"
    redirect = ["location: https://elsewhere/x"]
    assert text_of(log, RequestOutcome.HTTP_OTHER, status=301, headers=redirect, body=b"moved") == (
        "301: to https://elsewhere/x"
    )
    late = "target.timeout_s (20 s) was over"
    assert text_of(log, RequestOutcome.TIMEOUT, first_byte_ns=-1) == late
    assert text_of(log, RequestOutcome.TIMEOUT) == f"{late}, the answer had begun"
    assert text_of(log, RequestOutcome.RESET, why="it was closed") == "it was closed"
    assert text_of(log, RequestOutcome.INTERRUPTED, why="of the request before") == ""


def test_the_first_200_bytes_and_no_control_characters():
    """Whatever bytes came: text that a terminal, a page and JSON can show."""
    assert text_of(log_of(), RequestOutcome.HTTP_5XX, status=500, body=b"x" * 5000) == "500: " + "x" * 200
    told = text_of(log_of(), RequestOutcome.HTTP_5XX, status=500, body=b"\x1b[31m\x00\xff" + "花".encode() * 100)
    assert told.isprintable()
    assert 190 <= len(told.removeprefix("500: ").encode()) <= 200


def test_no_key_of_the_scenario_is_in_a_text():
    """Neither of a class nor of all, whole or without its scheme, also where only its start would be shown."""
    log = log_of(headers={"Authorization": "Bearer open-barley-42", "x-on": "1"})
    said = b"x" * 190 + b" key open-barley-42 or sesame-7731"
    told = text_of(
        log, RequestOutcome.HTTP_4XX, status=401, body=b"key open-barley-42 or Bearer open-barley-42 is bad, 1"
    )
    assert told == "401: key (not shown) or (not shown) is bad, 1"
    assert "open" not in text_of(log, RequestOutcome.HTTP_4XX, status=401, body=said)
    long = log_of(headers={"authorization": f"Bearer {'long-' * 400}"})
    told = text_of(long, RequestOutcome.HTTP_4XX, status=401, body=f"bad {'long-' * 400}".encode())
    assert told == "401: bad (not shown)"
    moved = text_of(log, RequestOutcome.HTTP_OTHER, status=302, headers=["location: /?key=sesame-7731"])
    assert moved == "302: to /?key=(not shown)"


def test_what_differs_by_request_only_is_one_text():
    """Ids and times in what the server says; not the status, nor our own words."""
    log = FailureTexts()
    first = log.number("503: request 17 (3f0a-9c) at 12:00:01 refused")
    assert log.number("503: request 18 (77b1-0d) at 12:00:02 refused") == first
    assert log.texts[first] == "503: request 17 (3f0a-9c) at 12:00:01 refused"
    others = {log.number(text) for text in ("500: request 17 refused", "1 of 4 images came", "3 of 4 images came", "")}
    assert len(others | {first}) == 5
    assert log.number("") == 0


def test_texts_are_bounded():
    """A server that says something new each time fills no memory: beyond 1000 texts all are one."""
    log = FailureTexts()
    words = ["".join(chr(97 + int(digit)) for digit in str(i)) for i in range(3000)]
    numbers = [log.number(f"500: {word}") for word in words]
    assert len(log.texts) <= 1001
    assert len(set(numbers[2000:])) == 1
    assert log.number(f"500: {words[0]}") == numbers[0]


def test_parts_are_joined_with_one_count():
    """Each record keeps its text, whatever number its process gave it; alike texts are one."""
    rows = records(np.arange(6) / 10.0, 20.0, outcome=RequestOutcome.HTTP_5XX)
    first, second = rows[0::2].copy(), rows[1::2].copy()
    first["why"], second["why"] = [0, 1, 2], [2, 1, 2]
    found, texts = joined([(first, ("", "503: id 1", "gone")), (second, ("", "gone", "503: id 2"))])
    assert found["index"].tolist() == list(range(6))
    assert [texts[why] for why in found["why"]] == ["", "503: id 1", "503: id 1", "gone", "gone", "503: id 1"]
