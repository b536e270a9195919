"""Calls over each transport: whatever happens to the peer, every call ends once, and the next one finds a way."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fakes.number_service import SECRET, VERSION, WAIT_S, serving
from plait_fabric import Buffer, FabricError, FrameTooLarge, Message, Pool, PoolExhausted, connect
from plait_fabric.rpc import fields
from plait_fabric.rpc.client import Client
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost, Packed, bare
from plait_fabric.rpc.outages import Backoff
from plait_fabric.rpc.replicas import ReplicaLink
from plait_fabric.rpc.server import Peer
from support.fabric import Replicas, new_address
from support.paused import pause
from support.waiting import wait_for


@dataclass(eq=False)
class Question:
    """A call that a test waits for: an answer, or why there is none."""

    value: int
    done: threading.Event = field(default_factory=threading.Event)
    answers: list[int] = field(default_factory=list)
    why_lost: str = ""

    def wait(self) -> int:
        """The answer."""
        assert self.done.wait(WAIT_S), "neither answer nor loss"
        assert not self.why_lost, self.why_lost
        (answer,) = self.answers
        return answer

    def pack(self, number: int, _: Pool) -> tuple[Mapping[str, Any], list[Buffer]]:
        """The message of the question."""
        return {"number": number, "value": self.value}, []


def client_protocol(send_timeout_s: float = 1.0) -> ClientProtocol[Question]:
    """Greets a service of numbers; answers and losses reach the questions."""

    def on_message(connection: Connection[Question], message: Message) -> None:
        with message:
            number, value = (fields.integer(message.header, name) for name in ("number", "value"))
        question = connection.take(number)
        assert question is not None
        question.answers.append(value)
        question.done.set()

    def on_lost(_: Connection[Question], lost: list[Question], why: str) -> None:
        for question in lost:
            question.why_lost = why
            question.done.set()

    return ClientProtocol(
        version=VERSION,
        hello={},
        on_welcome=lambda *_: None,
        on_message=on_message,
        on_lost=on_lost,
        send_timeout_s=send_timeout_s,
    )


Fleet = partial(Replicas, secret=SECRET, timeout_s=WAIT_S)
QUICK = Backoff(first_s=0.01, max_s=0.05)


@pytest.fixture(params=["inproc", "shm", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Somewhere to listen, on each transport."""
    return new_address(request.param, tmp_path)


_open: list[Client[Question] | Connection[Question]] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Whoever was connected is closed with the test."""
    yield
    while _open:
        _open.pop().close()


def _client(fleet: Replicas, **options: Any) -> Client[Question]:
    _open.append(Client(fleet.connect, client_protocol(), name="test", **{"backoff": QUICK, **options}))
    return _open[-1]


def _ask(asked: Client[Question] | Connection[Question], value: int) -> Question:
    question = Question(value)
    connection = asked.best(full=True) if isinstance(asked, Client) else asked
    assert connection is not None
    connection.call(question, question.pack)
    return question


def _attached(address: str, **options: float) -> Connection[Question]:
    connection = Connection(client_protocol(**options))
    connection.attach(ReplicaLink(replica="r", channel=connect(address, secret=SECRET)))
    threading.Thread(target=connection.read, daemon=True).start()
    _open.append(connection)
    return connection


# ---- calls and answers ----------------------------------------------------------------------------------------------


def test_answers_find_their_calls_in_any_order(address: str) -> None:
    """Those of four threads, of which the last one is answered first."""
    with serving(address, doubles=False) as numbers, ThreadPoolExecutor(4) as threads:
        connection = _attached(numbers.address)
        questions = list(threads.map(partial(_ask, connection), range(20)))
        assert connection.open_calls == 20
        waiting = [numbers.asked.get(timeout=WAIT_S) for _ in questions]
        for peer, number, value in reversed(waiting):
            peer.send({"number": number, "value": value + 100})
        assert [question.wait() for question in questions] == [value + 100 for value in range(20)]
        assert connection.open_calls == 0


def test_a_message_that_does_not_fit_costs_only_its_call(address: str) -> None:
    """The channel stays."""
    with serving(address) as numbers:
        connection = _attached(numbers.address)
        with pytest.raises(FrameTooLarge):
            connection.call(Question(1), lambda number, _: ({"number": number, "value": "x" * 10_000_000}, []))
        assert connection.open_calls == 0
        assert _ask(connection, 3).wait() == 6


def test_a_process_without_descriptors_connects_once_it_has_some_again(address: str) -> None:
    """Connecting fails with a `FabricError` while there are none, and the client goes on trying (finding 6)."""
    with serving(address) as numbers:
        with _no_descriptors():
            if not address.startswith("inproc"):
                with pytest.raises(FabricError, match="Too many open files"):
                    connect(numbers.address, secret=SECRET)
            client = _client(Fleet({"r": numbers.address}))
            if not address.startswith("inproc"):
                wait_for(lambda: "Too many open files" in client.connections[0].why_down)
        wait_for(lambda: client.up == 1)
        assert _ask(client, 4).wait() == 8


def test_a_dial_that_raises_anything_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in what looks for replicas is logged, and costs no connection its thread."""
    with serving(new_address("inproc", tmp_path)) as numbers:
        fleet, failures = Fleet({"r": numbers.address}), iter([KeyError("a bug"), OSError(24, "Too many open files")])

        def dial(taken: frozenset[str]) -> ReplicaLink:
            for failure in failures:
                raise failure
            return fleet.connect(taken)

        client = Client(dial, client_protocol(), name="test", backoff=QUICK)
        wait_for(lambda: client.up == 1)
        assert _ask(client, 4).wait() == 8
        client.close()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError, OSError]


@contextmanager
def _no_descriptors() -> Iterator[None]:
    """This process can open nothing meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)  # whatever is below it is open
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)


# ---- losses ---------------------------------------------------------------------------------------------------------

PROCESS = """
import sys, threading
from fakes import number_service as kit
kit.SECRET = bytes.fromhex(sys.argv[2])
with kit.serving(sys.argv[1], doubles=False) as numbers:
    print(numbers.address, flush=True)
    numbers.asked.get()
    print("asked", flush=True)
    threading.Event().wait()
"""


@pytest.fixture(params=["shm", "tcp"])
def stuck(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that is asked and does not answer, and where it listens."""
    paths = [path for path in sys.path if path]
    code = f"import sys\nsys.path[:0] = {paths!r}\n{PROCESS}"
    command = [sys.executable, "-c", code, new_address(request.param, tmp_path), SECRET.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_kill_nine_in_mid_call_is_noticed_at_once_and_the_next_replica_answers(
    stuck: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    """The call ends with a reason, without a time-out; the client has dialled elsewhere by itself."""
    process, where = stuck
    fleet = Fleet({"first": where})
    with serving(new_address("inproc", tmp_path)) as second:
        client = _client(fleet)
        wait_for(lambda: client.up == 1)
        question = _ask(client, 1)
        assert process.stdout is not None
        assert process.stdout.readline() == "asked\n"
        fleet.addresses = {"second": second.address}
        process.kill()
        assert question.done.wait(WAIT_S)
        assert "the peer was lost" in question.why_lost
        wait_for(lambda: client.up == 1)
        assert _ask(client, 2).wait() == 4


def test_a_peer_that_stops_reading_is_lost_after_the_time_out(stuck: tuple[subprocess.Popen[str], str]) -> None:
    """And with it all that was asked there."""
    process, where = stuck
    connection = _attached(where, send_timeout_s=0.1)
    pause(process.pid)
    questions = []
    with pytest.raises(ConnectionLost):
        for value in itertools.count():
            question = Question(value)
            _ask_at_length(connection, question)
            questions.append(question)
            time.sleep(0.001)  # some hundreds are enough
    for question in questions:
        assert question.done.wait(WAIT_S)
        assert question.why_lost


def _ask_at_length(connection: Connection[Question], question: Question, nbytes: int = 100_000) -> None:
    def pack(number: int, _: Pool) -> Packed:
        return {"number": number, "value": question.value}, [bytes(nbytes)]

    connection.call(question, pack, later=pack)


def test_what_could_not_be_sent_at_once_arrives_all_the_same(address: str) -> None:
    """In the order of the calls, whether a message was sent at once or later."""
    with serving(address) as numbers:
        connection = _attached(numbers.address)
        questions = [Question(value) for value in range(100)]
        for question in questions:
            _ask_at_length(connection, question, 50_000 * (question.value % 2))
        assert [question.wait() for question in questions] == [2 * question.value for question in questions]


def test_what_cannot_be_packed_fails_its_own_call_only(address: str) -> None:
    """At once, or on the thread that sends later: then its call is lost, with the reason."""
    with serving(address) as numbers:
        connection, broken = _attached(numbers.address), Question(2)
        first, go_on = Question(3), threading.Event()

        def not_now(number: int, _: object) -> Packed:
            raise PoolExhausted(f"no memory for {number} at once")

        def held(number: int, pool: Pool) -> Packed:
            assert go_on.wait(WAIT_S)
            return first.pack(number, pool)

        def never(number: int, _: object) -> Packed:
            raise ValueError(f"no layout for {number}")

        with pytest.raises(ValueError, match="no layout"):
            connection.call(broken, never, later=never)
        connection.call(first, not_now, later=held)  # the next one must go later, too
        connection.call(broken, never, later=never)
        question = Question(1)
        connection.call(question, question.pack, later=question.pack)
        go_on.set()
        assert (first.wait(), question.wait()) == (6, 2)
        assert broken.why_lost.startswith("no layout")


def test_a_client_dials_again_with_growing_pauses(tmp_path: Path) -> None:
    """While nobody listens; as soon as somebody does, calls are answered."""
    fleet = Fleet()
    client = _client(fleet, backoff=Backoff(first_s=0.02, max_s=0.16))
    wait_for(lambda: len(fleet.asked) >= 6)
    assert client.best() is None
    assert client.connections[0].why_down == "there is no other"
    pauses = [later - sooner for sooner, later in itertools.pairwise(fleet.asked_s)]
    assert all(pause >= least for pause, least in zip(pauses, (0.01, 0.02, 0.04, 0.08, 0.08), strict=False))
    with serving(new_address("inproc", tmp_path)) as numbers:
        fleet.addresses["r"] = numbers.address
        wait_for(lambda: client.up == 1)
        assert _ask(client, 4).wait() == 8


def test_each_connection_goes_to_another_replica_and_their_number_follows(tmp_path: Path) -> None:
    """Between ``count`` and ``max_count``, one looks for a replica that is new; the least busy one is asked."""
    fleet = Fleet()
    with (
        serving(new_address("inproc", tmp_path), doubles=False) as first,
        serving(new_address("inproc", tmp_path)) as second,
    ):
        fleet.addresses = {"a": first.address}
        client = _client(fleet, max_count=2)
        wait_for(lambda: client.up == 1 and len(client.connections) == 2)
        stuck = _ask(client, 1)
        fleet.addresses["b"] = second.address
        wait_for(lambda: client.up == 2)
        assert {connection.replica for connection in client.connections} == {"a", "b"}
        assert _ask(client, 2).wait() == 4
        busy = next(connection for connection in client.connections if connection.replica == "b")
        busy.rest()
        best = client.best(full=True)
        assert best is not None
        assert best.replica == "a"
        assert client.open_calls == 1
        client.close()
        assert stuck.done.wait(WAIT_S)


def test_connections_to_replicas_that_are_gone_are_let_go(tmp_path: Path) -> None:
    """Up to the most there are; then one is up and one looks, as before the others came."""
    fleet, addresses = Fleet(), [new_address("inproc", tmp_path) for _ in range(3)]
    with serving(addresses[0]):
        fleet.addresses = {"a": addresses[0]}
        client = _client(fleet, max_count=3)
        with serving(addresses[1]), serving(addresses[2]):
            fleet.addresses |= {"b": addresses[1], "c": addresses[2]}
            wait_for(lambda: client.up == len(client.connections) == 3)
            fleet.addresses = {"a": addresses[0]}
        wait_for(lambda: client.up == 1 and len(client.connections) == 2)


def test_replicas_that_are_asked_one_call_at_a_time_share_them(tmp_path: Path) -> None:
    """Also one that came later: of 600 calls each has at least two in five."""
    fleet = Fleet()
    with serving(new_address("inproc", tmp_path)) as first, serving(new_address("inproc", tmp_path)) as second:
        fleet.addresses = {"a": first.address}
        client = _client(fleet, max_count=64)
        wait_for(lambda: client.up == 1)
        fleet.addresses["b"] = second.address
        wait_for(lambda: client.up == 2)
        asked = Counter[str]()
        for value in range(600):
            connection = client.best()
            assert connection is not None
            asked[connection.replica] += 1
            assert _ask(connection, value).wait() == 2 * value
        assert min(asked["a"], asked["b"]) >= 240


# ---- the server ----------------------------------------------------------------------------------------------------


def test_draining_sends_what_waits_and_takes_nobody_new(address: str) -> None:
    """Replies that were given before the end arrive; a new client finds nobody."""
    with serving(address, doubles=False, backlog=8) as numbers:
        connection = _attached(numbers.address)
        questions = [_ask(connection, value) for value in range(5)]
        for _ in questions:
            peer, number, value = numbers.asked.get(timeout=WAIT_S)
            peer.reply(lambda _, number=number, value=value: ({"number": number, "value": value}, ()))  # type: ignore[misc]
        numbers.stop(flush_s=WAIT_S)
        assert [question.wait() for question in questions] == list(range(5))
        wait_for(lambda: not connection.up)
        assert not numbers.server.alive
        with pytest.raises(Exception, match=r"listen|refused"):
            connect(numbers.address, secret=SECRET)


def test_a_server_that_leaves_serves_its_clients_until_they_have_another(address: str, tmp_path: Path) -> None:
    """However long they look for it; what is open there is answered there."""
    with serving(address, doubles=False) as first, serving(new_address("inproc", tmp_path)) as second:
        fleet = Fleet({"a": first.address})
        there = threading.Event()

        def connected(left_out: frozenset[str]) -> ReplicaLink:
            assert not left_out or there.wait(WAIT_S)
            return fleet.connect(left_out)

        client = Client(connected, client_protocol(), name="test", max_count=2, backoff=QUICK)
        _open.append(client)
        wait_for(lambda: client.up == 1)
        leaving = threading.Thread(target=first.server.leave, args=(WAIT_S,), daemon=True)
        leaving.start()
        wait_for(lambda: client.connections[0].is_leaving)
        question = _ask(client, 1)
        peer, number, value = first.asked.get(timeout=WAIT_S)
        assert leaving.is_alive()
        fleet.addresses["b"] = second.address
        there.set()
        leaving.join(WAIT_S)
        assert not leaving.is_alive()
        assert [_ask(client, value).wait() for value in range(8)] == [2 * value for value in range(8)]
        peer.send({"number": number, "value": value})
        assert question.wait() == 1


def test_a_server_that_leaves_waits_for_nobody_who_looks_in_vain(address: str) -> None:
    """There may be no other: its successor starts when it is gone."""
    with serving(address) as numbers:
        client = _client(Fleet({"a": numbers.address}), max_count=2)
        wait_for(lambda: client.up == 1)
        numbers.server.leave(10 * WAIT_S)
        assert _ask(client, 2).wait() == 4


def test_a_client_that_asks_without_end_is_pushed_back(address: str) -> None:
    """With a backlog, no more of its messages are taken than may wait; others are served."""
    admitted: list[int] = []
    asking: list[Peer] = []

    def on_message(peer: Peer, message: Message) -> None:
        asking.append(peer)
        with message:
            value = fields.integer(message.header, "value")
        peer.admit()
        admitted.append(value)

    with serving(address, backlog=3, on_message=on_message) as numbers:
        connection = _attached(numbers.address)
        for value in range(10):
            connection.send(bare({"number": value, "value": value}))
        wait_for(lambda: len(admitted) == 3)
        other = _attached(numbers.address)
        other.send(bare({"number": 0, "value": 99}))
        wait_for(lambda: admitted == [0, 1, 2, 99])
        asking[0].done()
        wait_for(lambda: admitted[-1] == 3)


@pytest.mark.parametrize("kind", [PoolExhausted, ValueError])
def test_a_reply_that_fails_ends_its_client_also_while_that_waits_for_room(
    tmp_path: Path, kind: type[Exception]
) -> None:
    """Whatever packing raises: the client is hung up on instead of waiting, and its thread reports it."""
    asking: list[Peer] = []

    def on_message(peer: Peer, message: Message) -> None:
        asking.append(peer)
        message.release()
        peer.admit()

    def never(_: Pool) -> Packed:
        raise kind("no layout for it")

    with serving(new_address("inproc", tmp_path), backlog=1, on_message=on_message) as numbers:
        connection = _attached(numbers.address)
        for value in range(2):
            connection.send(bare({"number": value, "value": value}))
        wait_for(lambda: len(asking) == 2)  # the second waits
        asking[0].reply(never)
        assert numbers.lost.get(timeout=WAIT_S) is asking[0]
        wait_for(lambda: numbers.server.peers == 0)


def test_clients_are_counted_bounded_and_reported_once(address: str) -> None:
    """One more than allowed is refused; who leaves is reported, and makes room."""
    with serving(address, max_peers=1) as numbers:
        first = _attached(numbers.address)
        assert numbers.server.peers == 1
        with pytest.raises(ConnectionLost):
            _attached(numbers.address)
        assert numbers.server.refused == 1
        first.close()
        assert numbers.lost.get(timeout=WAIT_S).number == 1
        wait_for(lambda: numbers.server.peers == 0)
        assert numbers.lost.empty()
        _attached(numbers.address).close()
