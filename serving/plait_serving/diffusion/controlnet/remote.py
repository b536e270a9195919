"""A ControlNet that runs as a service elsewhere: asked over the fabric, and asked again elsewhere when a replica dies.

The client keeps every session's constants. So a session is (re-)opened wherever its next step goes, and a replica that
is lost costs its steps in flight a second computation, nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from plait_fabric import FabricError
from plait_fabric.rpc.backoff import Backoff
from plait_fabric.rpc.client import Connect
from plait_fabric.rpc.connection import ConnectionLost
from plait_fabric.rpc.replicas import Link, NoReplica
from plait_serving.diffusion.controlnet.connection import Answer, ControlNetConnection, StepCall
from plait_serving.diffusion.controlnet.model import check_image
from plait_serving.diffusion.controlnet.wire import LARGEST_CALLS, UNKNOWN_SESSION, Call, error_of
from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.protocols import (
    Conditioning,
    ControlCall,
    ControlNetClient,
    ControlSession,
    PendingResiduals,
    Residuals,
)
from plait_serving.diffusion.values import RgbImage

__all__ = ["RemoteControlNetClient"]

_log = logging.getLogger(__name__)

_MOVE_EVERY_S = 30.0
"""How often a client asks whether another replica has fewer clients: after one was added, or came back."""

_LARGEST_TRIES = 3
"""Replicas that one step is tried on; a step that kills whoever computes it must not kill them all."""


_BACKOFF = Backoff(first_s=0.2, max_s=5.0)


@dataclass(slots=True, eq=False, kw_only=True)
class RemoteSession:
    """A request's constants, kept here. ``opened_on`` is the connection that has them."""

    controlnet: str
    number: int
    image: RgbImage
    conditioning: Conditioning
    width: int
    height: int
    opened_on: ControlNetConnection | None = None
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Losses:
    """Replicas that were lost during one step (or open); those that hung are not asked again for it."""

    lost: set[str] = field(default_factory=set)
    hung: set[str] = field(default_factory=set)
    count: int = 0

    def add(self, error: ConnectionLost) -> None:
        self.count += 1
        self.lost.add(error.replica)
        if error.hung:
            self.hung.add(error.replica)


@dataclass(slots=True, eq=False)
class _Asked:
    """Steps under way on one connection: indices of the calls that each holds."""

    connection: ControlNetConnection
    indices: dict[StepCall, list[int]] = field(default_factory=dict)


class RemoteControlNetClient(ControlNetClient):
    """See `ControlNetClient`. ``connect`` says which replicas there are and how to reach them.

    ``worth_moving`` is asked from time to time whether a replica's clients should go elsewhere; without it a client
    stays until its replica is lost.
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
        self._name = name
        self._connect = connect
        self._worth_moving = worth_moving
        self._answer_timeout_s = answer_timeout_s
        self._backoff = backoff
        self._clock = clock
        self._connection: ControlNetConnection | None = None
        self._next_session = 0
        self._failures = 0
        self._closed_until_s = -float("inf")
        self._move_at_s = clock() + _MOVE_EVERY_S

    @property
    def name(self) -> str:
        """See `ControlNetClient.name`."""
        return self._name

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """See `ControlNetClient.open`. Also raises `RequestError`; what the service refuses shows in the first step."""
        check_image(image)
        session = RemoteSession(
            controlnet=self._name,
            number=self._next_session,
            image=image,
            conditioning=conditioning,
            width=width,
            height=height,
        )
        self._next_session += 1
        self._move_if_worth_it()
        losses = _Losses()
        while True:
            connection = self._connected(losses)
            try:
                _open_on(connection, session)
                return session
            except ConnectionLost as error:
                self._drop(connection, error, losses)

    def start(self, calls: Sequence[ControlCall]) -> PendingResiduals:
        """See `ControlNetClient.start`."""
        pending = _Pending(self, tuple(calls))
        pending.ask()
        return pending

    def close(self, session: ControlSession) -> None:
        """See `ControlNetClient.close`."""
        if not isinstance(session, RemoteSession) or session.closed:
            return
        session.closed = True
        connection, session.opened_on = session.opened_on, None
        if connection is not None and connection.usable:
            connection.forget(session.number)

    def shutdown(self) -> None:
        """See `ControlNetClient.shutdown`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, calls: Sequence[ControlCall], indices: Sequence[int], losses: _Losses) -> _Asked:
        """Sends some of the calls to a replica, opening their sessions first where it does not have them.

        Raises `ControlNetUnavailable`, or `ConnectionLost` after noting it in ``losses``.
        """
        connection = self._connected(losses)
        asked = _Asked(connection)
        try:
            for part in _messages(calls, indices):
                for i in part:
                    _open_on(connection, _remote(calls[i].session))
                asked.indices[connection.ask([_wire_call(calls[i]) for i in part])] = part
        except ConnectionLost as error:
            self._drop(connection, error, losses)
            raise
        return asked

    def collect(self, asked: _Asked, losses: _Losses) -> dict[int, Answer]:
        """Waits for what was asked, by call. Raises `ConnectionLost` after noting it in ``losses``."""
        answers: dict[int, Answer] = {}
        try:
            for step, indices in asked.indices.items():
                answers.update(zip(indices, asked.connection.wait(step), strict=True))
        except ConnectionLost as error:
            self._drop(asked.connection, error, losses)
            raise
        return answers

    def _connected(self, losses: _Losses) -> ControlNetConnection:
        """The connection that is there, or a new one. Raises `ControlNetUnavailable`."""
        current = self._connection
        if current is not None and current.usable:
            return current
        if self._clock() < self._closed_until_s:
            raise ControlNetUnavailable(f"no replica of ControlNet {self._name} answered a moment ago")
        while losses.count < _LARGEST_TRIES:
            try:
                link = self._link(losses)
                self._connection = ControlNetConnection(link, controlnet=self._name, timeout_s=self._answer_timeout_s)
            except ConnectionLost as error:
                _log.warning("ControlNet %s: replica %s: %s", self._name, error.replica, error)
                losses.add(error)
            except (ControlNetUnavailable, NoReplica, FabricError) as error:
                raise self._nobody(str(error)) from error
            else:
                self._failures = 0
                return self._connection
        raise self._nobody(f"lost one after the other: {', '.join(sorted(losses.lost))}")

    def _move_if_worth_it(self) -> None:
        """Between two steps nothing is under way; sessions follow to the new replica with their next step."""
        current = self._connection
        if self._worth_moving is None or current is None or self._clock() < self._move_at_s:
            return
        self._move_at_s = self._clock() + _MOVE_EVERY_S
        try:
            if not self._worth_moving(current.replica):
                return
            link = self._connect(frozenset({current.replica}))
            self._connection = ControlNetConnection(link, controlnet=self._name, timeout_s=self._answer_timeout_s)
        except (ConnectionLost, ControlNetUnavailable, NoReplica, FabricError) as error:
            _log.info("ControlNet %s stays at replica %s: %s", self._name, current.replica, error)
            return
        _log.info("ControlNet %s moves from replica %s to %s", self._name, current.replica, link.replica)
        current.close()

    def _link(self, losses: _Losses) -> Link:
        """A channel to a replica that was not lost just now; failing that, to one that may be back."""
        try:
            return self._connect(frozenset(losses.lost))
        except (ControlNetUnavailable, NoReplica, FabricError):
            if losses.lost == losses.hung:
                raise
        return self._connect(frozenset(losses.hung))

    def _nobody(self, why: str) -> ControlNetUnavailable:
        self._failures += 1
        pause_s = self._backoff.wait_s(self._failures)
        self._closed_until_s = self._clock() + pause_s
        _log.warning("ControlNet %s: no replica answers; next try in %.1f s: %s", self._name, pause_s, why)
        return ControlNetUnavailable(f"no replica of ControlNet {self._name} answers: {why}")

    def _drop(self, connection: ControlNetConnection, error: ConnectionLost, losses: _Losses) -> None:
        _log.warning("ControlNet %s: replica %s: %s", self._name, error.replica, error)
        losses.add(error)
        connection.close()
        if self._connection is connection:
            self._connection = None


class _Pending(PendingResiduals):
    """One batch of calls, across as many replicas as it takes."""

    def __init__(self, client: RemoteControlNetClient, calls: tuple[ControlCall, ...]) -> None:
        self._client = client
        self._calls = calls
        self._answers: dict[int, Residuals | EngineError] = {}
        self._reopened: set[int] = set()
        self._losses = _Losses()
        self._asked: _Asked | None = None
        for i, call in enumerate(calls):
            session = call.session
            if not isinstance(session, RemoteSession) or session.closed or session.controlnet != client.name:
                self._answers[i] = ControlNetUnavailable("the session was closed, or belongs to another ControlNet")

    def ask(self) -> None:
        """Sends what has no answer yet, if a replica can be reached."""
        try:
            self._asked = self._client.ask(self._calls, self._open_indices(), self._losses)
        except ConnectionLost:
            self._asked = None
        except ControlNetUnavailable as error:
            self._asked = None
            self._fail_rest(error)

    def wait(self) -> list[Residuals | EngineError]:
        while self._open_indices():
            if self._asked is None:
                self.ask()
            else:
                self._collect()
        return [self._answers[i] for i in range(len(self._calls))]

    def _open_indices(self) -> list[int]:
        return [i for i in range(len(self._calls)) if i not in self._answers]

    def _collect(self) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None
        try:
            answers = self._client.collect(asked, self._losses)
        except ConnectionLost:
            return
        for i, answer in answers.items():
            if isinstance(answer, Residuals):
                self._answers[i] = _like(answer, self._calls[i].sample)
            elif answer[0] == UNKNOWN_SESSION and i not in self._reopened:
                self._reopened.add(i)
                _remote(self._calls[i].session).opened_on = None
            else:
                self._answers[i] = self._error(*answer)

    def _error(self, code: str, message: str) -> EngineError:
        if code == UNKNOWN_SESSION:
            return ControlNetUnavailable(f"ControlNet {self._client.name} has no room for the sessions of this step")
        return error_of(code, f"ControlNet {self._client.name}: {message}")

    def _fail_rest(self, error: EngineError) -> None:
        for i in self._open_indices():
            self._answers[i] = error


def _remote(session: ControlSession) -> RemoteSession:
    assert isinstance(session, RemoteSession)
    return session


def _open_on(connection: ControlNetConnection, session: RemoteSession) -> None:
    """Hands the constants over if this connection does not have them."""
    if session.opened_on is connection:
        return
    connection.open(
        session.number,
        image=session.image,
        conditioning=session.conditioning,
        width=session.width,
        height=session.height,
    )
    session.opened_on = connection


def _messages(calls: Sequence[ControlCall], indices: Sequence[int]) -> list[list[int]]:
    """Indices by the shape of a row (nearly always one list), in messages of bounded length."""
    groups: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for i in indices:
        sample = calls[i].sample
        groups.setdefault((sample.shape[1:], sample.dtype), []).append(i)
    return [group[at : at + LARGEST_CALLS] for group in groups.values() for at in range(0, len(group), LARGEST_CALLS)]


def _wire_call(call: ControlCall) -> Call:
    return Call(
        session=_remote(call.session).number,
        sample=call.sample,
        timestep=float(call.timestep),
        scale=float(call.scale),
        exact=call.exact,
    )


def _like(residuals: Residuals, sample: torch.Tensor) -> Residuals:
    """Where and in which dtype the denoiser works; costs nothing if that is so already."""
    move = [tensor.to(device=sample.device, dtype=sample.dtype) for tensor in (*residuals.down, residuals.mid)]
    return Residuals(down=tuple(move[:-1]), mid=move[-1])
