"""The judgement of the fault runs: what is right, wrong, documented, the proxy's, and what grows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from plait_bench.faults.killing import Fault, problems, slope_of
from plait_bench.faults.requests import DOCUMENTED, Ask, End, Reply, Tally, answer_of, image_ask, mixed, verdict_of
from plait_bench.faults.server import HELD, grown
from support.http_app import b64, png

JSON = {"content-type": "application/json", "retry-after": "5"}
RANKING = Ask(key="r", form="ranking", path="/v1/recommend", body=b"{}", needs=frozenset())
V2 = replace(RANKING, form="v2")
IMAGE = image_ask("i", prompt="fish")
STREAM = image_ask("s", prompt="fish", stream=True)


def reply(body, status=200, headers=JSON, **more):
    """A reply that took a second."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Reply(began_s=10.0, ended_s=11.0, status=status, headers=headers, body=encoded, **more)


def grey(level):
    """A grey image."""
    return b64(png(8, 8, (level,) * 3))


def image(level):
    """A response with one."""
    return {"data": [{"b64_json": grey(level)}]}


def ranking(*items):
    """A response with items and their scores."""
    return {"items": [{"id": item, "score": score} for item, score in items]}


def error(code, **more):
    """An error in OpenAI's form."""
    return {"error": {"message": "m", "type": "server_error", "param": None, "code": code, **more}}


def end(ask, got, expected=None, *, in_our_stead=False):
    """The end of a request, where ``expected`` is the body of the right response."""
    answer = None if expected is None else answer_of(ask, json.dumps(expected).encode())
    return verdict_of(ask, got, answer, in_our_stead=in_our_stead).end


@pytest.mark.parametrize(("level", "wanted"), [(100, End.RIGHT), (102, End.RIGHT), (98, End.RIGHT), (103, End.WRONG)])
def test_images_may_differ_by_two_levels(level, wanted):
    """One by another executor, one by another batch; more is another image."""
    assert end(IMAGE, reply(image(level)), image(100)) is wanted


def test_rankings_may_differ_by_rounding_and_not_by_order():
    """Every score within 1e-5, whatever the order of near equals; another item, a lost one, a wrong order are wrong."""
    right = ranking((1, 0.5), (2, 0.4999999), (3, 0.1))
    assert end(RANKING, reply(ranking((2, 0.5000001), (1, 0.5), (3, 0.1))), right) is End.RIGHT
    assert end(RANKING, reply(ranking((1, 0.5), (2, 0.4999999), (3, 0.10002))), right) is End.WRONG
    assert end(RANKING, reply(ranking((1, 0.5), (2, 0.4999999), (4, 0.1))), right) is End.WRONG
    assert end(RANKING, reply(ranking((1, 0.5), (2, 0.4999999))), right) is End.WRONG
    assert end(RANKING, reply(ranking((3, 0.1), (1, 0.5), (2, 0.4999999))), right) is End.WRONG
    assert end(RANKING, reply({"items": [{"id": 1, "score": float("nan")}]}), ranking((1, 0.5))) is End.WRONG


@pytest.mark.parametrize("body", [b"", b"{}", b"not json", b'{"data": []}', b'{"data": [{"b64_json": "AAAA"}]}'])
def test_half_an_answer_is_wrong(body):
    """Status 200 with anything but a whole image."""
    assert end(IMAGE, reply(body)) is End.WRONG


@pytest.mark.parametrize(("status", "code"), sorted(DOCUMENTED))
def test_documented_errors_have_the_apis_form(status, code):
    """With a known code and, where it is worth another try, when: nothing else counts."""
    assert end(IMAGE, reply(error(code), status)) is End.DOCUMENTED
    assert end(IMAGE, reply(error(code), 418)) is End.UNDOCUMENTED
    assert end(IMAGE, reply(error(code, extra=1), status)) is End.UNDOCUMENTED
    assert end(IMAGE, reply({"error": "m"}, status)) is End.UNDOCUMENTED
    without = {"content-type": "application/json"}
    wanted = End.DOCUMENTED if status in (422, 504) else End.UNDOCUMENTED
    assert end(IMAGE, reply(error(code), status, without)) is wanted
    assert end(V2, reply({"error": "m"}, status)) is End.DOCUMENTED
    assert end(V2, reply(error(code), status)) is End.UNDOCUMENTED


def test_an_unexpected_error_is_not_documented():
    """A 500 in the API's own form is a bug like any other."""
    assert end(IMAGE, reply(error("internal_error"), 500)) is End.UNDOCUMENTED
    assert end(RANKING, reply(error("rank_failed"), 500)) is End.UNDOCUMENTED
    assert end(V2, reply({"error": "m"}, 500)) is End.UNDOCUMENTED
    assert end(IMAGE, reply(error("invalid_value"), 400)) is End.UNDOCUMENTED


def test_the_proxy_is_excused_while_it_or_the_ingress_is_down_only():
    """A refused connection, a stream that breaks off: its own while the fault is there, ours otherwise. A bare 500 is
    never excused."""
    plain = {"content-type": "text/plain; charset=utf-8"}
    broken = Reply(began_s=10.0, ended_s=11.0, failure="ConnectError: refused")
    cut = reply(b'data: {"type": "image_generation.partial_image"}\n\n', failure="RemoteProtocolError: closed")
    assert end(IMAGE, reply(b"Internal Server Error", 500, plain), in_our_stead=True) is End.UNDOCUMENTED
    for ask, got in ((RANKING, broken), (STREAM, cut)):
        assert end(ask, got, in_our_stead=True) is End.PROXY
        assert end(ask, got, in_our_stead=False) is End.UNDOCUMENTED
    assert end(IMAGE, reply(image(1)), image(100), in_our_stead=True) is End.WRONG


def test_streams_end_with_an_image_or_an_error():
    """The last event counts: a completed image is compared, an error has a known code, and silence is wrong."""

    def events(*data):
        return reply("".join(f"data: {json.dumps(each)}\n\n" for each in data).encode())

    partial = {"type": "image_generation.partial_image", "b64_json": grey(1)}
    done = {"type": "image_generation.completed", "b64_json": grey(100)}
    expected = answer_of(STREAM, events(done).body)
    assert verdict_of(STREAM, events(partial, done), expected, in_our_stead=False).end is End.RIGHT
    assert end(STREAM, events(partial, error("engine_stopped"))) is End.DOCUMENTED
    assert end(STREAM, events(partial, error("internal_error"))) is End.UNDOCUMENTED
    assert end(STREAM, events(partial)) is End.WRONG
    assert end(STREAM, events()) is End.WRONG


def test_hung_and_left_are_ends_of_their_own():
    """Whatever came before."""
    assert end(IMAGE, reply(b"", None, is_hung=True), in_our_stead=True) is End.HUNG
    assert end(IMAGE, reply(b"", None, has_left=True)) is End.DISCONNECTED


def test_requests_are_the_same_for_a_seed_and_reach_every_part():
    """Two runs of a seed send the same bytes; every kind of process has a request that needs it, a cheap one."""
    asks = mixed(3, {"inputs": []})
    assert [ask.body for ask in asks] == [ask.body for ask in mixed(3, {"inputs": []})]
    assert [ask.body for ask in asks] != [ask.body for ask in mixed(4, {"inputs": []})]
    assert len({ask.key for ask in asks}) == len(asks)
    kinds = ["controlnet-edges", "controlnet-colors", "engine", "cn-picks", "hn-picks", "ingress", "proxy"]
    probes = {kind: next(ask for ask in asks if kind in ask.needs) for kind in kinds}
    assert probes["ingress"].form == asks[0].form == "ranking"
    assert probes["engine"].form == "image"


def usage(**more):
    """What a server holds."""
    return Counter({**dict.fromkeys(HELD, 100), "engine": 100, **more})


def test_what_grew_is_told_from_what_varies():
    """Memory by more than 5 %, and whose; a file or a dead process at all; less is no growth."""
    before = usage(memory_bytes=1000, socket_files=3)
    assert grown(before, usage(memory_bytes=1049, socket_files=3)) == []
    assert grown(before, usage(memory_bytes=500, socket_files=4)) == ["socket_files grew from 3 to 4"]
    assert grown(usage(zombies=0), usage(zombies=1)) == ["zombies grew from 0 to 1"]
    more = usage(memory_bytes=200, cn=20, engine=180)
    assert grown(usage(), more) == ["memory_bytes grew from 100 to 200, engine by 80, cn by 20"]


def test_a_fault_covers_the_requests_of_its_time():
    """Of the proxy, from its moment to its recovery, or for ever."""

    def covered(kind, began_s, ended_s, over_s=20.0):
        fault = Fault(kind=kind, name=kind, at_s=10.0, over_s=over_s)
        return fault.covers(Reply(began_s=began_s, ended_s=ended_s))

    spans = ((5, 9), (5, 11), (15, 16), (19, 25), (21, 25))
    assert [covered("proxy", *span) for span in spans] == [False, True, True, True, False]
    assert covered("proxy", 1000, 1001, over_s=None)
    assert not covered("ingress", 15, 16)


def tally(*replies):
    """The ends of requests for an image."""
    found = Tally()
    for each in replies:
        found.add(verdict_of(IMAGE, each, None))
    return found


def test_a_run_is_passed_only_if_nothing_is_wrong():
    """One wrong answer, one hang, a fault without an end: each is named."""
    fine, fault = tally(*[reply(image(1))] * 9), Fault(kind="engine", name="engine", at_s=1.0, over_s=12.0)
    assert problems(fine, fine, [fault]) == []
    hung = tally(reply(image(1)), reply(b"", None, is_hung=True))
    assert "hung" in problems(hung, fine, [fault])[0]
    assert problems(fine, hung, [fault])[1:] == ["after the faults only 1 of 2 answers were right"]
    assert problems(fine, fine, [Fault(kind="cn", name="cn", at_s=1.0)]) == ["cn did not recover"]
    assert problems(fine, fine, []) == ["no process was killed"]
    assert problems(tally(), fine, [fault]) == ["no answer was right"]


def test_a_slope_is_told_from_noise():
    """A rise within the samples' noise is none; a smaller one without noise is; an outlier moves nothing."""
    rng = np.random.default_rng(0)
    times = np.arange(0.0, 1800.0, 5.0)
    still = 1000.0 + rng.normal(0.0, 5.0, times.size)
    assert not slope_of(times, still).grows
    risen = still + times * 0.05
    assert slope_of(times, risen).grows
    assert slope_of(times, risen).per_hour == pytest.approx(180.0, rel=0.1)
    jumped = still.copy()
    jumped[100] = 1e6
    assert not slope_of(times, jumped).grows
    assert not slope_of(times, np.full(times.size, 7.0)).grows
    with pytest.raises(ValueError, match="no line"):
        slope_of([1.0], [1.0])
