"""One ControlNet that can run here or as a service, and move while the server runs.

`MovableControlNetClient` is what the engine gets: it makes each client when first needed, and hands every session to
the place that was chosen when it was opened; sessions end where they began.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from plait_serving.diffusion.controlnet.placement import PlacementTrial, StepTimes, choose_placement
from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.knobs import Placement
from plait_serving.diffusion.protocols import (
    Conditioning,
    ControlCall,
    ControlNetClient,
    ControlSession,
    PendingResiduals,
    Residuals,
)
from plait_serving.diffusion.values import RgbImage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _MovableSession:
    """A session and the client that it belongs to."""

    controlnet: str
    client: ControlNetClient
    inner: ControlSession


class MovableControlNetClient(ControlNetClient):
    """A `ControlNetClient`. `local` and `remote` make the two clients; None means that a place is not possible.

    With AUTO and both possible, sessions try both in turn, until steps alike have shown which is faster; then all go
    there, and later it is looked at again. While a service that was chosen has no replica, new sessions run here.
    """

    def __init__(
        self,
        name: str,
        *,
        local: Callable[[], ControlNetClient] | None,
        remote: Callable[[], ControlNetClient] | None,
        wanted: Callable[[], Placement],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._factories = {Placement.LOCAL: local, Placement.REMOTE: remote}
        self._clients: dict[Placement, ControlNetClient] = {}
        self._wanted = wanted
        is_open = None not in self._factories.values()
        self._trial = PlacementTrial(clock) if is_open else None
        self._chosen: tuple[Placement, StepTimes | None, Placement] | None = None
        self._asked: set[Placement] = set()
        self._is_away = False

    @property
    def name(self) -> str:
        """The ControlNet's name."""
        return self._name

    @property
    def times(self) -> StepTimes | None:
        """The times that AUTO has decided by, if any."""
        return None if self._trial is None else self._trial.times

    def place(self) -> Placement:
        """Return where new sessions go now: LOCAL or REMOTE. Raises `ControlNetUnavailable`."""
        wanted, trial = self._wanted(), self._trial
        if wanted is Placement.AUTO and trial is not None and not trial.is_over:
            self._chosen = None
            return trial.next_place()
        if self._chosen is not None and self._chosen[:2] == (wanted, self.times):
            return self._chosen[2]
        choice = choose_placement(
            wanted,
            local_possible=self._factories[Placement.LOCAL] is not None,
            remote_possible=self._factories[Placement.REMOTE] is not None,
            times=self.times,
        )
        _log.info("ControlNet %s runs %s: %s", self._name, choice.placement.value, choice.why)
        self._chosen = (wanted, self.times, choice.placement)
        if choice.placement is Placement.REMOTE:
            self._clients.pop(Placement.LOCAL, None)  # its weights go with the last session that lives there
        return choice.placement

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Open a session at the place where new sessions go now."""
        place = self.place()
        client = self._client(place)
        try:
            inner = client.open(image=image, conditioning=conditioning, width=width, height=height)
        except ControlNetUnavailable as error:
            if place is not Placement.REMOTE or not self._can_stand_in():
                raise
            client = self._stand_in(error)
            inner = client.open(image=image, conditioning=conditioning, width=width, height=height)
        else:
            self._back_at(place)
        if self._trial is not None:
            self._trial.opened(place)
        return _MovableSession(controlnet=self._name, client=client, inner=inner)

    def start(self, calls: Sequence[ControlCall]) -> PendingResiduals:
        """Start each call at the place of its session."""
        groups: dict[int, tuple[ControlNetClient, list[int]]] = {}
        for i, call in enumerate(calls):
            if isinstance(call.session, _MovableSession) and call.session.controlnet == self._name:
                groups.setdefault(id(call.session.client), (call.session.client, []))[1].append(i)
        self._asked.update(place for place, client in self._clients.items() if id(client) in groups)
        parts = [(indices, client.start([_inner(calls[i]) for i in indices])) for client, indices in groups.values()]
        return _PendingParts(len(calls), parts)

    def stepped(self, kind: Hashable, seconds: float | None) -> None:
        """Take what a step has cost, if one place alone was asked in it."""
        asked, self._asked = self._asked, set()
        if self._trial is not None and seconds is not None and len(asked) == 1:
            self._trial.record(asked.pop(), kind, seconds)

    def close(self, session: ControlSession) -> None:
        """Close the session at its place."""
        if isinstance(session, _MovableSession):
            session.client.close(session.inner)

    def shutdown(self) -> None:
        """Shut down the clients that were made."""
        for client in self._clients.values():
            client.shutdown()

    def _client(self, placement: Placement) -> ControlNetClient:
        if placement not in self._clients:
            factory = self._factories[placement]
            if factory is None:
                raise ControlNetUnavailable(f"ControlNet {self._name} cannot run {placement.value}")
            self._clients[placement] = factory()
        return self._clients[placement]

    def _can_stand_in(self) -> bool:
        """Whether sessions may run here while the service is away. Steps that were in flight do not move here: one of
        them may be what ended the service."""
        return self._wanted() is Placement.AUTO and self._factories[Placement.LOCAL] is not None

    def _stand_in(self, error: ControlNetUnavailable) -> ControlNetClient:
        if not self._is_away:
            _log.warning("ControlNet %s runs here while its service is away: %s", self._name, error)
        self._is_away = True
        return self._client(Placement.LOCAL)

    def _back_at(self, place: Placement) -> None:
        """Let go of what stood in for the service."""
        if self._is_away and place is Placement.REMOTE:
            _log.info("ControlNet %s: its service is back", self._name)
            self._is_away = False
            if self._trial is None or self._trial.is_over:
                self._clients.pop(Placement.LOCAL, None)


class _PendingParts(PendingResiduals):
    """Answers from up to two places, put back into call order."""

    def __init__(self, calls: int, parts: list[tuple[list[int], PendingResiduals]]) -> None:
        self._calls = calls
        self._parts = parts

    def wait(self) -> list[Residuals | EngineError]:
        answers: dict[int, Residuals | EngineError] = {}
        for indices, pending in self._parts:
            answers.update(zip(indices, pending.wait(), strict=True))
        unavailable = ControlNetUnavailable("the session belongs to another ControlNet")
        return [answers.get(i, unavailable) for i in range(self._calls)]


def _inner(call: ControlCall) -> ControlCall:
    assert isinstance(call.session, _MovableSession)
    return replace(call, session=call.session.inner)
