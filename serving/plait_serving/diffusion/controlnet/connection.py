"""A client's channel to one replica: requests go out from the caller, answers are taken in by a thread of its own.

The thread is what lets an answer cross the wire while the caller computes, and a big question leave while a big answer
arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from plait_fabric import FabricError, FabricTimeout, recv_tensors, send_tensors
from plait_fabric.rpc.replicas import Link
from plait_serving.diffusion.controlnet.wire import (
    Call,
    Header,
    Reply,
    Tensors,
    WireError,
    close_header,
    hello_header,
    open_message,
    parse_reply,
    parse_welcome,
    step_message,
)
from plait_serving.diffusion.protocols import Conditioning, Residuals
from plait_serving.diffusion.values import RgbImage

__all__ = ["Answer", "Connection", "ConnectionLost", "Link"]

Answer = Residuals | tuple[str, str]
"""Of one call: residuals, or ``(code, message)``."""


_GREET_S = 10.0
"""How long a replica may take to say welcome; a thread of its own does, whatever it computes."""


class ConnectionLost(Exception):
    """The replica died, hung or misbehaved; nothing that was asked there will be answered any more.

    ``hung``: it did not answer in time, so asking it again may cost as much again.
    """

    def __init__(self, replica: str, why: str, *, hung: bool = False) -> None:
        super().__init__(f"replica {replica}: {why}")
        self.replica = replica
        self.hung = hung


@dataclass(slots=True, eq=False)
class _Slot:
    """An answer to come. ``answers`` is set before ``ready``; it stays None if the connection ended first."""

    calls: int
    ready: threading.Event
    answers: tuple[Answer, ...] | None = None


class Connection:
    """One greeted channel. Questions come from one thread; closing may come from any."""

    def __init__(self, link: Link, *, controlnet: str, timeout_s: float) -> None:
        """Greets the replica. Raises `ConnectionLost`, with the channel closed."""
        self._link = link
        self._channel = link.channel
        self._timeout_s = timeout_s
        self._slots: dict[int, _Slot] = {}
        self._lock = threading.Lock()
        self._next_seq = 0
        self._why_lost: str | None = None
        self._greet(controlnet)
        self._thread = threading.Thread(target=self._receive, name=f"controlnet {controlnet} answers", daemon=True)
        self._thread.start()

    @property
    def replica(self) -> str:
        """The replica at the other end."""
        return self._link.replica

    @property
    def usable(self) -> bool:
        """False once the replica was lost."""
        return self._why_lost is None

    def open(self, session: int, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> None:
        """Sends a session's constants; whether they are accepted shows in its first step. Raises `ConnectionLost`."""
        self._send(*open_message(session, image=image, conditioning=conditioning, width=width, height=height))

    def ask(self, calls: Sequence[Call]) -> int:
        """Sends a step and returns the number of the answer to `wait` for. Raises `ConnectionLost`."""
        with self._lock:
            if self._why_lost is not None:
                raise ConnectionLost(self.replica, self._why_lost)
            seq = self._next_seq
            self._next_seq += 1
            self._slots[seq] = _Slot(len(calls), threading.Event())
        self._send(*step_message(seq, tuple(calls)))
        return seq

    def wait(self, seq: int) -> tuple[Answer, ...]:
        """The answer, once. Raises `ConnectionLost`; a replica that takes too long counts as lost."""
        slot = self._slots[seq]
        hung = not slot.ready.wait(self._timeout_s)
        if hung:
            self._lose(f"no answer within {self._timeout_s:g} s")
        with self._lock:
            del self._slots[seq]
        if slot.answers is None:
            raise ConnectionLost(self.replica, self._why_lost or "lost", hung=hung)
        return slot.answers

    def forget(self, session: int) -> None:
        """Closes a session at the replica, if that is still there."""
        try:
            self._send(close_header(session), {})
        except ConnectionLost:
            return

    def close(self) -> None:
        """Hangs up. Idempotent."""
        self._lose("this side hung up")
        if self._thread is not threading.current_thread():
            self._thread.join(self._timeout_s)

    def _greet(self, controlnet: str) -> None:
        try:
            send_tensors(self._channel, hello_header(), {}, timeout_s=_GREET_S)
            with recv_tensors(self._channel, _GREET_S) as message:
                name = parse_welcome(message.header, message.tensors)
            if name != controlnet:
                raise WireError(f"it serves ControlNet {name!r}, not {controlnet!r}")
        except (FabricError, WireError) as error:
            self._channel.close()
            raise ConnectionLost(self.replica, str(error), hung=isinstance(error, FabricTimeout)) from error

    def _send(self, header: Header, tensors: Tensors) -> None:
        try:
            send_tensors(self._channel, header, tensors, timeout_s=self._timeout_s)
        except FabricError as error:
            self._lose(str(error))
            raise ConnectionLost(self.replica, str(error), hung=isinstance(error, FabricTimeout)) from error

    def _receive(self) -> None:
        try:
            while True:
                with recv_tensors(self._channel) as message:
                    self._deliver(parse_reply(message.header, message.tensors))
        except (FabricError, WireError) as error:
            self._lose(str(error))

    def _deliver(self, reply: Reply) -> None:
        """Copies the answer out of the channel's memory. A number that nobody asked for is a broken replica."""
        slot = self._slots.get(reply.seq)
        if slot is None or slot.ready.is_set() or slot.calls != len(reply.answers):
            raise WireError(f"an answer to step {reply.seq}, which was not asked like that")
        slot.answers = tuple(_own(answer) for answer in reply.answers)
        slot.ready.set()

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._why_lost is None:
                self._why_lost = why
            waiting = list(self._slots.values())
        self._channel.close()
        for slot in waiting:
            slot.ready.set()


def _own(answer: Answer) -> Answer:
    if isinstance(answer, tuple):
        return answer
    return Residuals(down=tuple(tensor.clone() for tensor in answer.down), mid=answer.mid.clone())
