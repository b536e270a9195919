"""A workload of the fabric's request and reply layer: numbers go there, numbers come back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from plait_fabric import Buffer, Message, Pool, connect, listen, new_secret
from plait_fabric.rpc import fields
from plait_fabric.rpc.connection import ClientProtocol, Connection
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from plait_fabric.rpc.server import Peer, Server, ServerProtocol

SECRET = new_secret()
VERSION = 7
WAIT_S = 30.0


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


def client_protocol(
    *,
    service: str = "numbers",
    version: int = VERSION,
    answer_timeout_s: float | None = None,
    send_timeout_s: float = 1.0,
) -> ClientProtocol[Question]:
    """Greets a service of that name; answers and losses reach the questions."""

    def on_welcome(_: Connection[Question], payload: Mapping[str, Any]) -> None:
        if fields.text(payload, "service") != service:
            raise fields.WireError(f"it serves {payload['service']}")

    def on_message(connection: Connection[Question], message: Message) -> None:
        with message:
            number, value = (fields.integer(message.header, name) for name in ("number", "value"))
        question = connection.take(number)
        if question is None:
            raise fields.WireError(f"an answer to {number}, which was not asked")
        question.answers.append(value)
        question.done.set()

    def on_lost(_: Connection[Question], lost: list[Question], why: str) -> None:
        for question in lost:
            question.why_lost = why
            question.done.set()

    return ClientProtocol(
        version=version,
        hello={"service": service},
        on_welcome=on_welcome,
        on_message=on_message,
        on_lost=on_lost,
        send_timeout_s=send_timeout_s,
        answer_timeout_s=answer_timeout_s,
    )


@dataclass(eq=False)
class Numbers:
    """A server whose questions a test answers itself, or that answers each with twice its value."""

    server: Server
    asked: queue.SimpleQueue[tuple[Peer, int, int]]
    lost: queue.SimpleQueue[Peer]

    @property
    def address(self) -> str:
        """Where it listens."""
        return self.server.addresses[0]

    def stop(self, flush_s: float = 0.0) -> None:
        """Nobody new; everybody leaves."""
        self.server.close_listeners()
        self.server.hang_up(flush_s)


@contextmanager
def serving(address: str, *, doubles: bool = True, **options: Any) -> Iterator[Numbers]:
    """A service of numbers in this process; ``options`` as for `ServerProtocol`."""
    asked: queue.SimpleQueue[tuple[Peer, int, int]] = queue.SimpleQueue()
    lost: queue.SimpleQueue[Peer] = queue.SimpleQueue()

    def on_hello(payload: Mapping[str, Any]) -> None:
        fields.only(payload, {"service"})
        if payload["service"] != "numbers":
            raise fields.WireError("the service is numbers")

    def on_message(peer: Peer, message: Message) -> None:
        with message:
            number, value = (fields.integer(message.header, name) for name in ("number", "value"))
        if doubles:
            peer.send({"number": number, "value": 2 * value})
        else:
            asked.put((peer, number, value))

    options = {"version": VERSION, "send_timeout_s": 1.0} | options
    protocol = ServerProtocol(
        on_hello=on_hello,
        welcome=lambda: {"service": "numbers"},
        on_message=options.pop("on_message", on_message),
        on_lost=lost.put,
        **options,
    )
    made = Numbers(Server(protocol, [listen(address, secret=SECRET)], name="numbers"), asked, lost)
    try:
        yield made
    finally:
        made.stop()


@dataclass(eq=False)
class Fleet:
    """Replicas by name: where each listens. What is asked of it is kept."""

    addresses: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[float, frozenset[str]]] = field(default_factory=list)

    def connect(self, left_out: frozenset[str]) -> ReplicaLink:
        """To the first that is not left out."""
        self.asked.append((time.monotonic(), left_out))
        for name, address in list(self.addresses.items()):
            if name not in left_out:
                return ReplicaLink(replica=name, channel=connect(address, secret=SECRET, timeout_s=5))
        raise NoReplica("there is no other")


def until(true: Callable[[], bool]) -> None:
    """Waits until it is true."""
    until_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.005)
