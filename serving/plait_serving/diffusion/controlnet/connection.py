"""A ControlNet client's connection to one replica: sessions are handed over, steps are called and waited for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from plait_fabric import FabricError, Message, Pool
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost, Packed, bare
from plait_fabric.rpc.fields import Header, WireError
from plait_fabric.rpc.replicas import Link
from plait_fabric.tensors import pack_tensors, tensors_of
from plait_serving.diffusion.controlnet.wire import (
    VERSION,
    Call,
    Tensors,
    close_header,
    open_message,
    parse_reply,
    parse_welcome,
    step_message,
)
from plait_serving.diffusion.protocols import Conditioning, Residuals
from plait_serving.diffusion.values import RgbImage

__all__ = ["Answer", "ControlNetConnection", "StepCall"]

Answer: TypeAlias = Residuals | tuple[str, str]
"""Of one call: residuals, or ``(code, message)``."""


@dataclass(slots=True, eq=False)
class StepCall:
    """A step under way. ``answers`` is set before ``ready``; it stays None if the connection was lost first."""

    calls: int
    ready: threading.Event = field(default_factory=threading.Event)
    answers: tuple[Answer, ...] | None = None


class ControlNetConnection:
    """One greeted channel. Steps come from one thread; closing may come from any."""

    def __init__(self, link: Link, *, controlnet: str, timeout_s: float) -> None:
        """Greet the replica. Raises `ConnectionLost`, with the channel closed."""
        self.replica = link.replica
        self._controlnet = controlnet
        self._timeout_s = timeout_s
        self._connection: Connection[StepCall] = Connection(
            ClientProtocol(
                version=VERSION,
                hello={},
                on_welcome=self._on_welcome,
                on_message=self._on_message,
                on_lost=self._on_lost,
                send_timeout_s=timeout_s,
            )
        )
        self._connection.attach(link)
        name = f"controlnet {controlnet} answers"
        self._thread = threading.Thread(target=self._connection.read, name=name, daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """False once the replica was lost."""
        return self._connection.up

    def open(self, session: int, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> None:
        """Send a session's constants; whether they are accepted shows in its first step. Raises `ConnectionLost`."""
        message = open_message(session, image=image, conditioning=conditioning, width=width, height=height)
        self._or_lost(lambda: self._connection.send(lambda pool: self._pack(pool, message)))

    def ask(self, calls: Sequence[Call]) -> StepCall:
        """Send a step, whose answers are to be waited for. Raises `ConnectionLost`."""
        step = StepCall(len(calls))
        self._or_lost(
            lambda: self._connection.call(step, lambda seq, pool: self._pack(pool, step_message(seq, tuple(calls))))
        )
        return step

    def wait(self, step: StepCall) -> tuple[Answer, ...]:
        """Wait for the answers. Raises `ConnectionLost`; a replica that takes too long counts as lost."""
        hung = not step.ready.wait(self._timeout_s)
        if step.answers is not None:
            return step.answers
        self._connection.close()
        why = f"no answer within {self._timeout_s:g} s" if hung else self._connection.why_down
        raise ConnectionLost(self.replica, why, hung=hung)

    def forget(self, session: int) -> None:
        """Close a session at the replica, if that is still there."""
        with contextlib.suppress(ConnectionLost):
            self._connection.send(bare(close_header(session)))

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._connection.close()
        if self._thread is not threading.current_thread():
            self._thread.join(self._timeout_s)

    def _or_lost(self, send: Callable[[], object]) -> None:
        """Take a message that the fabric has no room for as a replica that hangs: another one may have room."""
        try:
            send()
        except FabricError as error:
            self._connection.close()
            raise ConnectionLost(self.replica, str(error)) from error

    def _pack(self, pool: Pool, message: tuple[Header, Tensors]) -> Packed:
        return pack_tensors(pool, *message, timeout_s=self._timeout_s)

    # On the thread that reads, but for the welcome.

    def _on_welcome(self, _: Connection[StepCall], payload: Header) -> None:
        name = parse_welcome(payload)
        if name != self._controlnet:
            raise WireError(f"it serves ControlNet {name!r}, not {self._controlnet!r}")

    def _on_message(self, connection: Connection[StepCall], message: Message) -> None:
        """Copy the answer out of the channel's memory. A number that nobody asked for is a broken replica."""
        with tensors_of(message) as arrived:
            reply = parse_reply(arrived.header, {name: tensor.clone() for name, tensor in arrived.tensors.items()})
        step = connection.take(reply.seq)
        if step is not None and step.calls == len(reply.answers):
            step.answers = reply.answers
            step.ready.set()
            return
        self._on_lost(connection, [] if step is None else [step], "")
        raise WireError(f"an answer to step {reply.seq}, which was not asked like that")

    def _on_lost(self, _: Connection[StepCall], steps: list[StepCall], __: str) -> None:
        for step in steps:
            step.ready.set()
