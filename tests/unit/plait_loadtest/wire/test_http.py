"""The pure parts of the client: heads, body framing, request bytes, URLs, checks and the server's own times."""

from __future__ import annotations

import json
import math

import pytest

from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import LoadTarget, ResponseCheck, Scenario
from plait_loadtest.values import PreparedRequest, RequestOutcome
from plait_loadtest.wire.check import has_path, judge_of, timings_ms
from plait_loadtest.wire.dial import RequestWriter, place_of
from plait_loadtest.wire.framing import Chunked, Length, UntilClose, framing_of, parse_head, server_timing_ms


def head(*lines, status="HTTP/1.1 200 OK"):
    """A parsed head."""
    return parse_head("\r\n".join([status, *lines]).encode())


def test_header_names_are_case_insensitive():
    """What matters is found in any spelling, with any white space around it."""
    told = head("CONTENT-LENGTH:  12 ", "Connection: Close", "content-Type: Text/Event-Stream; charset=utf-8")
    assert (told.length, told.keep_alive, told.is_event_stream, told.chunked) == (12, False, True, False)


@pytest.mark.parametrize(
    ("status", "lines", "keep_alive"),
    [
        ("HTTP/1.1 200 OK", (), True),
        ("HTTP/1.1 200", ("connection: keep-alive, close",), False),
        ("HTTP/1.0 200 OK", (), False),
        ("HTTP/1.0 200 OK", ("connection: Keep-Alive",), True),
    ],
)
def test_connections_are_kept_as_the_versions_say(status, lines, keep_alive):
    """HTTP/1.1 keeps unless told to close, HTTP/1.0 closes unless told to keep."""
    assert head(*lines, status=status).keep_alive is keep_alive


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n: no name",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999",
    ],
)
def test_what_is_no_head_is_refused(raw):
    """Anything but a status line and header lines is a ValueError, which counts as garbled."""
    with pytest.raises(ValueError):
        parse_head(raw)


@pytest.mark.parametrize(
    ("lines", "status", "to_head", "kind"),
    [
        (("content-length: 3",), 200, False, Length),
        (("content-length: 3", "transfer-encoding: gzip, chunked"), 200, False, Chunked),
        ((), 200, False, UntilClose),
        ((), 204, False, Length),
        (("content-length: 3",), 304, False, Length),
        (("transfer-encoding: chunked",), 200, True, Length),
    ],
)
def test_the_body_ends_as_the_standard_says(lines, status, to_head, kind):
    """Chunks go before a length, a length before the connection's end; some answers never have a body."""
    framing = framing_of(head(*lines, status=f"HTTP/1.1 {status} X"), to_head_request=to_head)
    assert type(framing) is kind
    assert framing.feed(b"").complete == (status in (204, 304) or to_head)


BODY = b"5\r\nhello\r\n1;name=value\r\n,\r\n006 \r\n world\r\n0\r\nTrailer: x\r\n\r\nnext"


@pytest.mark.parametrize("size", range(1, len(BODY)))
def test_chunks_are_put_together_however_they_are_cut(size):
    """Pieces of any size give the same payload, and what follows the body is told apart."""
    chunked = Chunked()
    payload, extra, complete = b"", b"", False
    for at in range(0, len(BODY), size):
        piece = BODY[at : at + size]
        if complete:
            extra += piece
            continue
        fed = chunked.feed(piece)
        payload, extra, complete = payload + fed.payload, fed.extra, fed.complete
    assert (payload, extra, complete) == (b"hello, world", b"next", True)


@pytest.mark.parametrize("body", [b"x\r\n", b"2\r\nokay\r\n", b"-1\r\n", b"\r\n", b"1" * 5000])
def test_what_are_no_chunks_is_refused(body):
    """A length that is none, a chunk that is longer than it said, and a line without an end are ValueErrors."""
    with pytest.raises(ValueError):
        Chunked().feed(body)


def test_server_timing_is_the_total_or_the_sum():
    """Entries without a duration do not count; without any the server says nothing."""
    assert server_timing_ms("db;dur=1.5, app;desc=x;dur=2") == 3.5
    assert server_timing_ms("db;dur=1.5, Total;dur=9.25") == 9.25
    assert math.isnan(server_timing_ms("cache;desc=hit"))
    assert math.isnan(server_timing_ms(""))


def test_request_bytes():
    """Host, the scenario's headers over the request's own, a length where there is a body, and a quoted path."""
    writer = RequestWriter(
        place_of("http://Server:81/base/"), {"Authorization": "Bearer x", "Content-Type": "text/plain"}
    )
    sent = writer.bytes_of(
        PreparedRequest(method="POST", path="/a b?c=%20d", headers=(("content-type", "application/json"),), body=b"{}")
    )
    first, *lines = sent.split(b"\r\n\r\n")[0].decode().split("\r\n")
    assert first == "POST /base/a%20b?c=%20d HTTP/1.1"
    assert sent.endswith(b"\r\n\r\n{}")
    assert {"host: Server:81", "authorization: Bearer x", "content-type: text/plain", "content-length: 2"} <= set(lines)
    assert b"content-length" not in writer.bytes_of(PreparedRequest(method="GET", path="/"))
    assert b"content-length: 0" in writer.bytes_of(PreparedRequest(method="POST", path="/"))


@pytest.mark.parametrize("value", ["a\r\nx: y", "\N{SNOWMAN}"])
def test_headers_can_not_smuggle(value):
    """A line end or a letter that headers cannot carry is an error of the scenario, before anything is sent."""
    with pytest.raises(ScenarioError):
        RequestWriter(place_of("http://h"), {"x": value}).bytes_of(PreparedRequest(method="GET", path="/"))


@pytest.mark.parametrize(
    "url", ["ftp://h", "h:80", "http://", "http://h:port", "http://u:p@h", "http://h/?q", "http://[h"]
)
def test_urls_that_can_not_be_asked_are_refused(url):
    """Each with one sentence that names the field."""
    with pytest.raises(ScenarioError, match=r"target\.url"):
        place_of(url)


def test_urls_are_read():
    """Default ports, IPv6 addresses and prefixes."""
    assert (place_of("https://h").port, place_of("http://h").port, place_of("https://h").uses_tls) == (443, 80, True)
    place = place_of("http://[::1]:8000/x/")
    assert (place.host, place.port, place.authority, place.prefix) == ("::1", 8000, "[::1]:8000", "/x")


LATE_ERROR = b'data: {"b64_json": "' + b"x" * 999 + b'"}\n\ndata: {"error": {"message": "x"}}\n\n'


def judge(api, **check):
    """The judge of a scenario with that check."""
    return judge_of(Scenario(target=LoadTarget(url="http://h", api=api, check=ResponseCheck(**check))))


@pytest.mark.parametrize(
    ("api", "check", "body", "outcome"),
    [
        ("raw", {}, b"", RequestOutcome.OK),
        ("raw", {"contains": "good"}, b"all good", RequestOutcome.OK),
        ("raw", {"contains": "good"}, b"bad", RequestOutcome.CHECK),
        ("raw", {"least_bytes": 4}, b"abc", RequestOutcome.CHECK),
        ("raw", {"json_path": "a.1.b"}, b'{"a": [0, {"b": null}]}', RequestOutcome.OK),
        ("raw", {"json_path": "a.2.b"}, b'{"a": [0, {"b": null}]}', RequestOutcome.CHECK),
        ("raw", {"json_path": "a"}, b"no json", RequestOutcome.CHECK),
        ("images", {}, b'{"data": [{"b64_json": "x"}]}', RequestOutcome.OK),
        ("images", {}, b'{"data": []}', RequestOutcome.CHECK),
        ("images", {}, b'data: {"error": {"message": "x"}}\n\n', RequestOutcome.CHECK),
        ("images", {"contains": "x"}, LATE_ERROR, RequestOutcome.CHECK),
        ("infer", {}, b'{"outputs": []}\x00\x01', RequestOutcome.OK),
        ("infer", {}, b'{"error": "x"}', RequestOutcome.CHECK),
    ],
)
def test_checks(api, check, body, outcome):
    """The scenario's check; without one, what every answer of the API has. A stream that ends in an error failed."""
    assert judge(api, **check).outcome(body) is outcome


def test_bodies_are_kept_only_where_they_are_needed():
    """A raw scenario without a check never looks at bodies."""
    assert not judge("raw").keeps_body
    assert judge("raw", contains="x").keeps_body
    assert judge("images").keeps_body


def test_a_path_may_not_leave_its_value():
    """Texts and numbers have no parts, lists no names, and deep nesting is no crash."""
    assert not has_path(b'{"a": "text"}', "a.0")
    assert not has_path(b"[1]", "a")
    assert not has_path(b"[" * 100_000, "0")


def test_the_servers_timings_are_read():
    """plait's ``timings`` are seconds: the total, or the sum of stages; the header speaks where the body does not."""
    body = json.dumps({"data": [{"b64_json": "x" * 1000}], "timings": {"queue": 0.5, "total": 1.25}}).encode()
    assert timings_ms(body) == 1250.0
    assert timings_ms(b'{"timings": {"a": 0.25, "b": 0.5}}') == 750.0
    for nothing in (b"", b'"timings"', b'{"timings": 3}', b'{"timings": {"a": "b"}}', b'{"timings": {bad}}'):
        assert math.isnan(timings_ms(nothing))
    timed = head("server-timing: total;dur=7")
    assert judge("images").server_ms(timed, body) == 1250.0
    assert judge("images").server_ms(timed, b"{}") == 7.0
    assert judge("raw").server_ms(timed, body) == 7.0
