"""The parts of a worker: what it records, what it prepares, and how work is dealt out."""

from __future__ import annotations

import tempfile
from types import SimpleNamespace

import numpy as np
import pytest

from plait_loadtest.failures import FailureLog
from plait_loadtest.plan import shares
from plait_loadtest.run.ledger import Ledger
from plait_loadtest.run.pace import RequestFeed
from plait_loadtest.run.processes import fresh_processes
from plait_loadtest.scenario import ClosedLoopCallers, GeneratorLimits, LoadTarget, Scenario
from plait_loadtest.values import RECORD, PreparedRequest, RequestOutcome
from plait_loadtest.wire.answers import judge_of
from plait_loadtest.wire.dial import RequestWriter, place_of
from plait_loadtest.wire.framing import parse_head
from support.loadtest_records import plan

RAW = Scenario(target=LoadTarget(url="http://h", api="raw"))


class Numbers:
    """A mix whose bodies are numbers; counts what it built."""

    def __init__(self):
        self.built = []

    def build(self, index):
        """The number as its body."""
        self.built.append(index)
        return PreparedRequest(method="POST", path="/", body=str(index).encode())


def ended(**facts):
    """What a connection knows of a request."""
    status = f"HTTP/1.1 {facts.pop('status', 200)} X"
    head = parse_head("\r\n".join([status, *facts.pop("headers", ())]).encode())
    known = {"sent_ns": 1, "first_byte_ns": 2, "first_part_ns": -1, "received_bytes": 4, "request": b"12345"}
    return SimpleNamespace(**{"head": head, "body": b"", "why": "", **known, **facts})


def ledger_of(scheduled_ns, scenario=RAW, asked=0):
    """A ledger whose requests all ask for so many images."""
    return Ledger(judge_of(scenario), FailureLog(scenario), scheduled_ns, lambda _: asked)


def test_the_ledger_tells_what_happened():
    """Times count from the start, what never came is -1, and a slot that nobody closed was interrupted."""
    ledger = ledger_of([1000, 2000, 3000])
    ledger.close(
        0,
        RequestOutcome.OK,
        1900,
        ended(sent_ns=1100, first_byte_ns=1800, first_part_ns=1850, headers=["server-timing: total;dur=2.5"]),
    )
    ledger.close(2, RequestOutcome.NOT_SENT, 5000, "no room")
    records = ledger.records(rank=1, processes=2, start_ns=500, kinds=[1, 1, 1], warm_up=2)
    assert records.dtype == RECORD
    assert records["index"].tolist() == [1, 3, 5]
    assert records["warm_up"].tolist() == [True, False, False]
    assert records["outcome"].tolist() == [RequestOutcome.OK, RequestOutcome.INTERRUPTED, RequestOutcome.NOT_SENT]
    first = records[0]
    times = ("scheduled_ns", "sent_ns", "first_byte_ns", "first_part_ns", "done_ns")
    assert [int(first[name]) for name in times] == [500, 600, 1300, 1350, 1400]
    assert (first["status"], first["sent_bytes"], first["received_bytes"], first["server_ms"]) == (200, 5, 4, 2.5)
    assert [int(records[1][name]) for name in times] == [1500, -1, -1, -1, -1]
    assert (int(records[2]["done_ns"]), np.isnan(records[2]["server_ms"])) == (4500, True)
    assert (ledger.done, ledger.errors, ledger.recent[-1]) == (2, 1, 2000)


def test_the_ledger_grows_without_a_schedule():
    """A closed loop opens as many slots as it needs."""
    ledger = ledger_of([])
    for number in range(3000):
        ledger.close(ledger.open(number), RequestOutcome.OK, number + 7, ended(sent_ns=number))
    records = ledger.records(rank=0, processes=1, start_ns=0, kinds=[0] * 3000, warm_up=0)
    np.testing.assert_array_equal(records["done_ns"] - records["scheduled_ns"], np.full(3000, 7))


def test_the_ledger_keeps_what_came_and_why_not():
    """Images are counted also where some are missing; the reason is of the answer, or of having no connection."""
    images = Scenario(target=LoadTarget(url="http://h"))
    ledger = ledger_of(range(4), images, asked=2)
    one, two = (('{"data": [' + ", ".join(['{"url": "x"}'] * n) + "]}").encode() for n in (1, 2))
    ledger.close(0, RequestOutcome.OK, 9, ended(body=two))
    ledger.close(1, RequestOutcome.OK, 9, ended(body=one))
    ledger.close(2, RequestOutcome.HTTP_5XX, 9, ended(status=503, body=b"full"))
    ledger.close(3, RequestOutcome.CONNECT, 9, "Connection refused")
    rows = ledger.records(rank=0, processes=1, start_ns=0, kinds=[0] * 4, warm_up=0)
    ends = (RequestOutcome.OK, RequestOutcome.CHECK, RequestOutcome.HTTP_5XX, RequestOutcome.CONNECT)
    assert (rows["outcome"].tolist(), rows["images"].tolist()) == ([*ends], [2, 1, 0, 0])
    texts = [ledger.failures.texts[why] for why in rows["why"]]
    assert texts == ["", "1 of 2 images came", "503: full", "Connection refused"]


def test_byte_counts_saturate():
    """More than 4 GiB read as 4 GiB; they never wrap around to little."""
    ledger = ledger_of([0])
    ledger.close(0, RequestOutcome.OK, 1, ended(received_bytes=2**32 + 5))
    records = ledger.records(rank=0, processes=1, start_ns=0, kinds=[0], warm_up=0)
    assert records["received_bytes"][0] == 2**32 - 1


def test_requests_are_ready_in_order_within_the_budget():
    """A window is built ahead and topped up; whatever was not built ahead is built when it is due."""
    mix = Numbers()
    requests = RequestFeed(mix, RequestWriter(place_of("http://h"), {}), iter(range(0, 20, 2)), budget_bytes=600)
    requests.fill(lambda: False)
    ready = list(mix.built)
    assert 0 < len(ready) < 10
    sent = [requests.next() for _ in range(10)]
    assert [int(request.rpartition(b"\r\n\r\n")[2]) for request in sent] == list(range(0, 20, 2))
    assert mix.built == list(range(0, 20, 2))
    with pytest.raises(StopIteration):
        requests.next()
    assert not requests.wants_more()


def test_equal_requests_share_their_bytes():
    """A million equal requests are one."""
    same = SimpleNamespace(build=lambda _: PreparedRequest(method="GET", path="/"))
    requests = RequestFeed(same, RequestWriter(place_of("http://h"), {}), iter(range(2)), budget_bytes=1000)
    assert requests.next() is requests.next()


def test_preparing_stops_when_told():
    """Ctrl-C while requests are prepared does not wait for the rest."""
    mix = Numbers()
    RequestFeed(mix, RequestWriter(place_of("http://h"), {}), iter(range(10_000)), budget_bytes=1 << 30).fill(
        lambda: True
    )
    assert len(mix.built) <= 256


def test_there_are_no_processes_without_room():
    """A process that may not send one request would never end; so there are no more than the limits, or the callers."""
    many = RAW.model_copy(update={"processes": 8})
    assert len(shares(plan(10), many.model_copy(update={"limits": GeneratorLimits(in_flight=2)}))) == 2
    closed = many.model_copy(update={"arrivals": ClosedLoopCallers(concurrency=3), "count": 5})
    given = shares(plan(0), closed)
    assert ([share.callers for share in given], [share.count for share in given]) == ([1, 1, 1], [2, 2, 1])


def test_a_long_temporary_folder_is_no_obstacle(monkeypatch):
    """The server that processes are forked from has its socket there, whose address may not be long."""
    assert fresh_processes().get_start_method() == "forkserver"
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 80 * "x")
    assert fresh_processes().get_start_method() == "spawn"
