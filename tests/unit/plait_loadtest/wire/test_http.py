"""The pure parts of the client: heads, body framing, request bytes, URLs, checks and the server's own times."""

from __future__ import annotations

import json
import math
from unittest.mock import Mock

import pytest

from plait_loadtest.errors import ScenarioError
from plait_loadtest.scenario import LoadTarget, ResponseCheck, Scenario
from plait_loadtest.values import PreparedRequest
from plait_loadtest.wire.answers import events, judge_of
from plait_loadtest.wire.dial import RequestWriter, place_of
from plait_loadtest.wire.framing import Chunked, Length, UntilClose, framing_of, parse_head, server_timing_ms
from plait_loadtest.wire.http1 import HttpConnection


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
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n: no name",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1",
        b"HTTP/1.1 200 OK\r\ncontent-length: many",
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
    writer = RequestWriter(place_of("http://Server:81"), {"Authorization": "Bearer x", "Content-Type": "text/plain"})
    sent = writer.bytes_of(
        PreparedRequest(method="POST", path="/a b?c=%20d", headers=(("content-type", "application/json"),), body=b"{}")
    )
    first, *lines = sent.split(b"\r\n\r\n")[0].decode().split("\r\n")
    assert first == "POST /a%20b?c=%20d HTTP/1.1"
    assert sent.endswith(b"\r\n\r\n{}")
    assert {"host: Server:81", "authorization: Bearer x", "content-type: text/plain", "content-length: 2"} <= set(lines)
    assert b"content-length" not in writer.bytes_of(PreparedRequest(method="GET", path="/"))
    assert b"content-length: 0" in writer.bytes_of(PreparedRequest(method="POST", path="/"))


@pytest.mark.parametrize("value", ["a\r\nx: y", "\N{SNOWMAN}"])
def test_headers_can_not_smuggle(value):
    """A line end or a letter that headers cannot carry is an error of the scenario, before anything is sent."""
    with pytest.raises(ScenarioError):
        RequestWriter(place_of("http://h"), {"x": value}).bytes_of(PreparedRequest(method="GET", path="/"))


def test_urls_are_read():
    """Default ports and IPv6 addresses."""
    assert (place_of("https://h").port, place_of("http://h").port, place_of("https://h").uses_tls) == (443, 80, True)
    place = place_of("http://[::1]:8000/")
    assert (place.host, place.port, place.authority) == ("::1", 8000, "[::1]:8000")


PARTIAL = (
    b'event: image_generation.partial_image\ndata: {"type": "image_generation.partial_image", "b64_json": "x"}\n\n'
)
COMPLETED = PARTIAL.replace(b"partial_image", b"completed")
PLAIN, STREAM = head(), head("content-type: text/event-stream")


def look(body, api="images", asked=1, told=PLAIN, **check):
    """What the judge of a scenario with that check finds in a body."""
    judge = judge_of(Scenario(target=LoadTarget(url="http://h", api=api, check=ResponseCheck(**check))))
    return judge.look(told, body, asked)


@pytest.mark.parametrize(
    ("api", "check", "body", "why"),
    [
        ("raw", {}, b"", ""),
        ("raw", {"contains": "good"}, b"all good", ""),
        ("raw", {"contains": "good"}, b"bad", "no 'good' in the body"),
        ("raw", {"least_bytes": 4}, b"abc", "fewer bytes than target.check.least_bytes (4)"),
        ("raw", {"json_path": "a.1.b"}, b'{"a": [0, {"b": null}]}', ""),
        ("raw", {"json_path": "a.2.b"}, b'{"a": [0, {"b": null}]}', "no a.2.b in the body"),
        ("raw", {"json_path": "a"}, b"no json", "no a in the body"),
        ("raw", {"json_path": "a.0"}, b'{"a": "text"}', "no a.0 in the body"),
        ("raw", {"json_path": "a"}, b"[1]", "no a in the body"),
        ("raw", {"json_path": "0"}, b"[" * 100_000, "no 0 in the body"),
        ("images", {"contains": "png"}, b"a png", ""),
    ],
)
def test_checks(api, check, body, why):
    """The scenario's check takes the place of what the API promises; what is missed is told, with what came instead."""
    facts = look(body, api, asked=int(api != "raw"), **check)
    assert (facts.why, facts.said) == (why, body if why else facts.said)


@pytest.mark.parametrize(
    ("data", "images"),
    [
        ('[{"b64_json": "x"}]', 1),
        ('[{"url": "http://h/1.png"}, {"b64_json": "x"}]', 2),
        ('[{"b64_json": ""}]', 0),
        ('[{"b64_json": null}, {"url": "  "}, {"b64_json": 3}, null, "b64_json"]', 0),
        ("[]", 0), ("null", 0), ('{"b64_json": "x"}', 0),
    ],
)  # fmt: skip
def test_images_that_came_are_counted(data, images):
    """What was asked for and did not come is an error, whatever number of bytes came instead."""
    body = f'{{"created": 1, "data": {data}}}'.encode()
    for asked in (1, 2, 4):
        facts = look(body, asked=asked)
        assert (facts.images, facts.why) == (images, "" if images >= asked else f"{images} of {asked} images came")
    assert look(data.encode()).why == look(b"<html>").why == look(b"").why == "0 of 1 images came"
    assert look(b'{"error": "full"}').said == b'{"error": "full"}'


SCORES = {"name": "scores", "datatype": "FP32", "shape": [2, 1]}


def outputs(*found, tail=b""):
    """The body of an inference's answer."""
    return json.dumps({"outputs": list(found)}).encode() + tail


@pytest.mark.parametrize(
    ("body", "came"),
    [
        (outputs(SCORES | {"data": [0.5, 0.25]}), 1),
        (outputs(SCORES | {"parameters": {"binary_data_size": 8}}, tail=bytes(8)), 1),
        (outputs(SCORES | {"parameters": {"binary_data_size": 8}}, SCORES | {"data": [1]}, tail=bytes(8)), 2),
        (outputs(SCORES | {"parameters": {"binary_data_size": 8}}, tail=bytes(7)), 0),
        (outputs(SCORES | {"parameters": {"binary_data_size": 8}}), 0),
        (outputs(SCORES | {"data": []}), 0), (outputs(SCORES), 0), (outputs(None, 3), 0), (outputs(tail=b"\0\1"), 0),
        (b'{"error": "x"}', 0), (b"[1]", 0), (b"1 2", 0), (b"\xff", 0), (b"", 0), (b"[" * 100_000, 0),
    ],
)  # fmt: skip
def test_outputs_that_came_are_counted(body, came):
    """Outputs with data in them, as JSON or in the bytes behind it."""
    for asked in (1, 2):
        assert look(body, "infer", asked=asked).why == ("" if came >= asked else f"{came} of {asked} outputs came")


@pytest.mark.parametrize(
    ("body", "parsed"),
    [
        (b"data: a\n\ndata:b\n\n", [("", b"a"), ("", b"b")]),
        (b"event: x\r\ndata:  a\r\ndata: b\r\n\r\n", [("x", b" a\nb")]),
        (b"event:x\rdata\r\r", [("x", b"")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", b"a")]),
        (b": data: a\n\nid: 1\nretry: 2\n\nevent: x\n\ndata: a\n\n", [("", b"a")]),
        (b"data: \xe2\x80\xa8a\x0bb\x1cc\n\n", [("", b"\xe2\x80\xa8a\x0bb\x1cc")]),
        (b"data: a\n\ndata: b\n", [("", b"a")]),
        (b"data: a", []), (b"", []),
    ],
)  # fmt: skip
def test_events_are_those_of_the_standard(body, parsed):
    """Three line ends and no others, one space after a colon, several data lines, comments, a byte order mark; an event
    that no blank line ends is none."""
    assert list(events(body)) == parsed


ERRORS = (
    b'data: {"error": {"message": "full"}}\n\n', b'data:{"error":{"message":"full"}}\n\n',
    b'data: { "error": "full" }\n\n', b'event: error\ndata: {"type": "error", "message": "full"}\n\n',
    b'data: {"type": "error", "message": "full"}\n\n', b"event: error\ndata: full\n\n",
)  # fmt: skip


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("check", [{}, {"contains": "b64_json"}])
@pytest.mark.parametrize("api", ["images", "raw"])
def test_an_error_in_a_stream_is_an_error(error, check, api):
    """However it is written, before an image or after it, whatever the scenario's own check says."""
    for body in (PARTIAL + error, COMPLETED + error, error + COMPLETED):
        facts = look(body, api, asked=int(api == "images"), told=STREAM, **check)
        assert facts.why == "an error in the stream"
        assert b"full" in facts.said


@pytest.mark.parametrize(
    ("body", "why", "images"),
    [
        (PARTIAL + COMPLETED, "", 1),
        (COMPLETED + b"data: [DONE]\n\n", "", 1),
        (COMPLETED.replace(b"image_generation", b"image_edit"), "", 1),
        (COMPLETED.partition(b"\n")[2], "", 1),
        (COMPLETED.replace(b'"b64_json": "x"', b'"url": "http://h/1.png"'), "", 1),
        (COMPLETED.replace(b'"x"', b'""'), "0 of 1 images came", 0),
        (PARTIAL, "the stream ended without image_generation.completed", 0),
        (PARTIAL + COMPLETED[:-1], "the stream ended without image_generation.completed", 0),
        (b"", "the stream ended without image_generation.completed", 0),
    ],
)  # fmt: skip
def test_an_image_stream_ends_with_its_image(body, why, images):
    """A clean end of the connection is none of the stream."""
    facts = look(body, told=STREAM)
    assert (facts.why, facts.images) == (why, images)


def test_a_text_stream_ends_with_done():
    """OpenAI's chunks of text end with `[DONE]`; of any other stream nobody knows the end."""
    chunk = b'data: {"object": "chat.completion.chunk", "error": null}\n\n'
    assert look(chunk, "raw", asked=0, told=STREAM).why == "the stream ended without [DONE]"
    assert not look(chunk + b"data: [DONE]\n\n", "raw", asked=0, told=STREAM).why
    assert not look(b"data: tick\n\n", "raw", asked=0, told=STREAM).why


def test_bodies_are_kept_only_where_they_are_needed():
    """A raw scenario without a check never looks at those of successes that are no streams."""
    checks = {"images": ResponseCheck(), "raw": ResponseCheck(contains="x")}
    for api, check in checks.items():
        assert judge_of(Scenario(target=LoadTarget(api=api, check=check))).keeps_body
    assert not judge_of(Scenario(target=LoadTarget(api="raw"))).keeps_body
    assert (head().is_plain, head(status="HTTP/1.1 503 X").is_plain, STREAM.is_plain) == (True, False, False)


def test_the_first_event_of_a_stream_is_stamped_when_it_comes():
    """Comments and the event's name come earlier; the first ``data:`` counts, also if it comes in two pieces."""
    connection = HttpConnection(Mock(), keeps_body=False, limit_bytes=1 << 20)
    connection.connection_made(Mock())
    connection.send(0, b"GET / HTTP/1.1\r\n\r\n")
    stamped = []
    for piece in (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"9\r\n: step 1\n\r\n", b"10\r\nevent: part\ndata\r\n", b'9\r\n: {"a":1}\r\n', b"2\r\n\n\n\r\n",
    ):  # fmt: skip
        connection.data_received(piece)
        stamped.append(connection.first_part_ns > 0)
    assert stamped == [False, False, False, True, True]


def test_the_servers_timings_are_read():
    """plait's ``timings`` are seconds: the total, or the sum of stages; the header speaks where the body does not."""

    def server_ms(timings, told=PLAIN, api="images"):
        return look(f'{{"data": [{{"b64_json": "x"}}], "timings": {timings}}}'.encode(), api, told=told).server_ms

    assert server_ms('{"queue": 0.5, "total": 1.25}') == 1250.0
    assert server_ms('{"a": 0.25, "b": 0.5}') == 750.0
    for nothing in ("3", "null", '{"a": "b"}', "[]", '{"total": null}'):
        assert math.isnan(server_ms(nothing))
    timed = head("server-timing: total;dur=7")
    assert server_ms('{"total": 1.25}', timed) == 1250.0
    assert (server_ms("null", timed), server_ms('{"total": 1.25}', timed, "raw")) == (7.0, 7.0)
    assert look(COMPLETED.replace(b'"x"', b'"x", "timings": {"total": 2}'), told=STREAM).server_ms == 2000.0
