"""A ControlNet that runs as a service: called over the fabric, and called at another replica when one dies.

The client keeps every session's constants. So a session is (re-)opened wherever its next step goes, and losing a
replica only means that its steps in flight are computed a second time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from plait_disagg.request_log import requests_at_hand
from plait_fabric import FabricError, Message, Pool
from plait_fabric.rpc.client import Connect
from plait_fabric.rpc.connection import ClientProtocol, Connection, ConnectionLost, Packed, bare
from plait_fabric.rpc.fields import Header, WireError
from plait_fabric.rpc.outages import Backoff, Outages
from plait_fabric.rpc.replicas import NoReplica, ReplicaLink
from plait_fabric.tensors import pack_tensors, tensors_of
from plait_serving.diffusion.controlnet import wire
from plait_serving.diffusion.controlnet.sessions import check_image
from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.protocols import (
    Answers,
    Conditioning,
    ControlCall,
    ControlNetClient,
    ControlSession,
    Residuals,
)
from plait_serving.diffusion.values import RgbImage

_log = logging.getLogger(__name__)

_MOVE_EVERY_S = 30.0
"""How often a client checks whether another replica has fewer clients, in case one was added or came back."""

_MAX_TRIES = 3
"""The max replicas on which one step is tried: a step that kills whichever replica computes it must not kill them
all."""

_BACKOFF = Backoff(first_s=0.2, max_s=1.0)


@dataclass(slots=True, eq=False)
class _Losses:
    """Replicas that were lost during one step; those that hung are not asked again for it."""

    lost: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, error: ConnectionLost) -> None:
        """Record one more loss."""
        self.count += 1
        self.lost.add(error.replica)
        if error.hung:
            self.hung.add(error.replica)


@dataclass(slots=True, eq=False)
class RemoteSession:
    """A request's constants, kept here. `opened_on` is the connection that has them."""

    constants: wire.Open
    opened_on: _Connection | None = None


@dataclass(slots=True, eq=False)
class _Step:
    """A step message in flight, with the calls at `indices`; its answers are cancelled if the connection is lost."""

    connection: _Connection
    indices: list[int]
    answers: Future[tuple[wire.Answer, ...]] = field(default_factory=Future)


_Connection: TypeAlias = Connection[_Step]


class RemoteControlNetClient(ControlNetClient):
    """A `ControlNetClient` over the fabric. `connect` finds a replica and returns a channel to it, when it is first
    needed, and to another replica when it is lost: the engine asks from one thread and waits for the answer.

    `worth_moving` is called from time to time to decide whether a replica's clients should move to another one;
    without it a client stays until its replica is lost.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        *,
        worth_moving: Callable[[str], bool] | None = None,
        answer_timeout_s: float = 60.0,
        backoff: Backoff = _BACKOFF,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._worth_moving = worth_moving
        self._answer_timeout_s = answer_timeout_s
        self._clock = clock
        self._next_session = 0
        self._move_at_s = clock() + _MOVE_EVERY_S
        self._connect = connect
        self._backoff = backoff
        self._failures = 0
        self._closed_until_s = -float("inf")
        self._outages = Outages(clock=clock)
        self._current: _Connection | None = None
        self._protocol = ClientProtocol(
            version=wire.VERSION,
            hello={},
            on_welcome=self._on_welcome,
            on_message=_deliver,
            on_lost=lambda _, steps, __: _cancel(steps),
            send_timeout_s=answer_timeout_s,
        )

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Keep the constants and send them to a replica. Also raises `RequestError`; refusals by the service show in
        the first step."""
        check_image(image)
        constants = wire.Open(
            session=self._next_session, image=image, conditioning=conditioning, width=width, height=height,
            request=", ".join(requests_at_hand()),
        )  # fmt: skip
        session = RemoteSession(constants)
        self._next_session += 1
        self._move_if_worth_it()
        losses = _Losses()
        while True:
            connection = self._connected(losses)
            try:
                self._open_on(connection, session)
                return session
            except ConnectionLost as error:
                self._drop(connection, error, losses)

    def start(self, calls: Sequence[ControlCall]) -> Answers:
        """Send the calls to a replica, opening their sessions there first if necessary."""
        pending = _Pending(self, calls)
        pending.ask()
        return pending.wait

    def close(self, session: ControlSession) -> None:
        """Close the session, also at the replica that has it."""
        if session.opened_on is not None:
            with suppress(ConnectionLost):
                session.opened_on.send(bare({"op": "close", "session": session.constants.session}))
            session.opened_on = None

    def shutdown(self) -> None:
        """Close the connection."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def ask(self, calls: Sequence[ControlCall], indices: list[int], losses: _Losses) -> list[_Step]:
        """Send some of the calls to a replica, first opening their sessions where it does not have them.

        Raises `ControlNetUnavailable`, or `ConnectionLost` after recording it in `losses`.
        """
        connection = self._connected(losses)
        steps: list[_Step] = []
        try:
            for at in range(0, len(indices), wire.MAX_CALLS):
                part = indices[at : at + wire.MAX_CALLS]
                for i in part:
                    self._open_on(connection, calls[i].session)
                steps.append(self._call(connection, part, [calls[i] for i in part]))
        except ConnectionLost as error:
            self._drop(connection, error, losses)
            raise
        return steps

    def collect(self, step: _Step, losses: _Losses) -> dict[int, wire.Answer]:
        """Wait for a step's answers and return them by call. Raises `ConnectionLost` after recording it in `losses`; a
        replica that takes too long counts as lost."""
        connection, timeout_s = step.connection, self._answer_timeout_s
        try:
            return dict(zip(step.indices, step.answers.result(timeout_s), strict=True))
        except (TimeoutError, CancelledError) as none:
            hung = isinstance(none, TimeoutError)
            why = f"no answer within {timeout_s:g} s" if hung else connection.why_down
            error = ConnectionLost(connection.replica, why, hung=hung)
            self._drop(connection, error, losses)
            raise error from None

    def _open_on(self, connection: _Connection, session: RemoteSession) -> None:
        """Send the session's constants unless this connection already has them. Raises `ConnectionLost`."""
        if session.opened_on is not connection:
            message = wire.open_message(session.constants)
            connection.send(lambda pool: self._pack(connection, pool, message))
            session.opened_on = connection

    def _call(self, connection: _Connection, indices: list[int], calls: Sequence[ControlCall]) -> _Step:
        step = _Step(connection, indices)
        numbered = [replace(call, session=call.session.constants.session) for call in calls]
        connection.call(step, lambda seq, pool: self._pack(connection, pool, wire.step_message(seq, numbered)))
        return step

    def _pack(self, connection: _Connection, pool: Pool, message: tuple[Header, wire.Tensors]) -> Packed:
        """Pack a message into the connection's pool. Raises `ConnectionLost` if the replica frees no memory, which
        means that it hangs: another one may have room."""
        try:
            return pack_tensors(pool, *message, timeout_s=self._answer_timeout_s)
        except FabricError as error:
            raise ConnectionLost(connection.replica, str(error)) from error

    def _connected(self, losses: _Losses) -> _Connection:
        """Return the existing connection, or a new one, without an attempt if the last one failed only recently. Raises
        `ControlNetUnavailable`."""
        if self._current is not None and self._current.up:
            return self._current
        if self._clock() >= self._closed_until_s:
            try:
                return self._connected_anew(losses)
            except (NoReplica, FabricError) as error:
                self._failures += 1
                self._outages.lost()
                pause_s = self._backoff.wait_s(self._failures)
                self._closed_until_s = self._clock() + pause_s
                _log.warning("ControlNet %s: no replica answers; next try in %.1f s: %s", self.name, pause_s, error)
        message = f"no replica of ControlNet {self.name} answers"  # the log has why
        raise ControlNetUnavailable(message, retry_after_s=self._outages.back_in_s())

    def _connected_anew(self, losses: _Losses) -> _Connection:
        while losses.count < _MAX_TRIES:
            try:
                self._current = self._greeted(self._link(losses))
            except ConnectionLost as error:
                _log.warning("ControlNet %s: replica %s: %s", self.name, error.replica, error)
                losses.add(error)
            else:
                self._failures = 0
                self._outages.found()
                return self._current
        raise NoReplica(f"lost one after the other: {', '.join(sorted(losses.lost))}")

    def _link(self, losses: _Losses) -> ReplicaLink:
        """Return a channel to a replica that was not just lost; failing that, to one that may be back."""
        try:
            return self._connect(frozenset(losses.lost))
        except (NoReplica, FabricError):
            if losses.lost == losses.hung:
                raise
        return self._connect(frozenset(losses.hung))

    def _greeted(self, link: ReplicaLink) -> _Connection:
        connection = Connection(self._protocol)
        connection.attach(link)
        self._outages.expect(link.start_s)
        threading.Thread(target=connection.read, name=f"ControlNet {self.name} answers", daemon=True).start()
        return connection

    def _drop(self, connection: _Connection, error: ConnectionLost, losses: _Losses) -> None:
        """Record that a connection was lost; the next step opens another one."""
        _log.warning("ControlNet %s: replica %s: %s", self.name, error.replica, error)
        losses.add(error)
        self._outages.lost()
        connection.close()
        if self._current is connection:
            self._current = None

    def _move_if_worth_it(self) -> None:
        """Move between two steps, when nothing is in flight; sessions follow to the new replica in their next step."""
        current = self._current
        if self._worth_moving is None or current is None or self._clock() < self._move_at_s:
            return
        self._move_at_s = self._clock() + _MOVE_EVERY_S
        try:
            if not self._worth_moving(current.replica):
                return
            self._current = self._greeted(self._connect(frozenset({current.replica})))
            _log.info("ControlNet %s moves from %s to %s", self.name, current.replica, self._current.replica)
            current.close()
        except (ConnectionLost, NoReplica, FabricError) as error:
            _log.info("ControlNet %s stays at replica %s: %s", self.name, current.replica, error)

    def _on_welcome(self, _: _Connection, payload: Header) -> None:
        name = wire.parse_welcome(payload)
        if name != self.name:
            raise WireError(f"it serves ControlNet {name!r}, not {self.name!r}")


class _Pending:
    """One batch of calls, across as many replicas as necessary. `_answers`: those that are known, by call."""

    def __init__(self, client: RemoteControlNetClient, calls: Sequence[ControlCall]) -> None:
        self._client = client
        self._calls = calls
        self._answers: dict[int, wire.Answer] = {}
        self._reopened: set[int] = set()
        self._losses = _Losses()
        self._steps: list[_Step] = []

    def ask(self) -> None:
        """Send the calls without an answer, if a replica is available."""
        try:
            self._steps = self._client.ask(self._calls, self._open_indices(), self._losses)
        except ConnectionLost:
            return
        except ControlNetUnavailable as error:
            self._answers |= dict.fromkeys(self._open_indices(), error)

    def wait(self) -> list[Residuals | EngineError]:
        """Return the answers."""
        while self._open_indices():
            if not self._steps:
                self.ask()
            while self._steps:
                self._collect(self._steps.pop(0))
        return [self._answers[i] for i in range(len(self._calls))]

    def _open_indices(self) -> list[int]:
        return [i for i in range(len(self._calls)) if i not in self._answers]

    def _collect(self, step: _Step) -> None:
        try:
            answers = self._client.collect(step, self._losses)
        except ConnectionLost:
            self._steps = []  # they were lost with it
            return
        for i, answer in answers.items():
            if isinstance(answer, Residuals):
                self._answers[i] = _like(answer, self._calls[i].sample)
            elif not isinstance(answer, wire.UnknownSession):
                self._answers[i] = type(answer)(f"ControlNet {self._client.name}: {answer.message}")
            elif i not in self._reopened:
                self._reopened.add(i)
                self._calls[i].session.opened_on = None
            else:
                why = f"ControlNet {self._client.name} has no room for the sessions of this step"
                self._answers[i] = ControlNetUnavailable(why)


def _deliver(connection: _Connection, message: Message) -> None:
    """Copy the answer out of the channel's memory. Raises `WireError` if it matches no open step."""
    with tensors_of(message) as arrived:
        copied = {name: tensor.clone() for name, tensor in arrived.tensors.items()}
        seq, answers = wire.parse_reply(arrived.header, copied)
    step = connection.take(seq)
    if step is None or len(step.indices) != len(answers):
        _cancel([] if step is None else [step])
        raise WireError(f"an answer to step {seq}, which was not asked like that")
    step.answers.set_result(answers)


def _cancel(lost: Sequence[_Step]) -> None:
    for step in lost:
        step.answers.cancel()


def _like(residuals: Residuals, sample: torch.Tensor) -> Residuals:
    """Convert to the device and dtype that the denoiser works in; free if they already match."""
    move = [tensor.to(device=sample.device, dtype=sample.dtype) for tensor in (*residuals.down, residuals.mid)]
    return Residuals(down=tuple(move[:-1]), mid=move[-1])
