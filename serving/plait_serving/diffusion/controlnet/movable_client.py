"""One ControlNet that can run here or as a service, and move while the server runs.

`MovableControlNetClient` is what the engine gets: it makes each client when first needed, and hands every session to
the place that was chosen when it was opened; sessions end where they began.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from plait_serving.diffusion.controlnet.placement import PlacementTrial, StepTimes
from plait_serving.diffusion.errors import ControlNetUnavailable, EngineError
from plait_serving.diffusion.knobs import Placement
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


class _MovableSession(NamedTuple):
    """A session and the client that it belongs to."""

    client: ControlNetClient
    inner: ControlSession


class MovableControlNetClient(ControlNetClient):
    """A `ControlNetClient`. `local` and `remote` make the two clients; None: there is no service.

    With AUTO and both possible, sessions try both in turn, until steps alike have shown which is faster; then all go
    there, and later it is looked at again. While a service that was chosen has no replica, new sessions run here.
    """

    def __init__(
        self,
        name: str,
        *,
        local: Callable[[], ControlNetClient],
        remote: Callable[[], ControlNetClient] | None,
        wanted: Callable[[], Placement],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._local, self._remote = local, remote
        self._clients: dict[Placement, ControlNetClient] = {}
        self._wanted = wanted
        self._trial = PlacementTrial(clock)
        self._chosen: tuple[Placement, StepTimes | None, Placement] | None = None
        self._asked: set[Placement] = set()
        self._is_away = False

    @property
    def times(self) -> StepTimes | None:
        """The times that AUTO has decided by, if any."""
        return self._trial.times

    def place(self) -> Placement:
        """Return where new sessions go now: LOCAL or REMOTE. Raises `ControlNetUnavailable`."""
        wanted = self._wanted()
        if wanted is Placement.AUTO and self._remote is not None and not self._trial.is_over:
            self._chosen = None
            return self._trial.next_place()
        if self._chosen is not None and self._chosen[:2] == (wanted, self.times):
            return self._chosen[2]
        place, why = self._choice(wanted)
        _log.info("ControlNet %s runs %s: %s", self.name, place.value, why)
        self._chosen = (wanted, self.times, place)
        if place is Placement.REMOTE:
            self._clients.pop(Placement.LOCAL, None)  # its weights go with the last session that lives there
        return place

    def _choice(self, wanted: Placement) -> tuple[Placement, str]:
        """Return a place and why it is that: with AUTO the faster one, and as long as that is not known the one that
        depends on no other process. What was chosen by name is never replaced by the other."""
        if wanted is Placement.REMOTE and self._remote is None:
            raise ControlNetUnavailable(f"controlnet_placement is {wanted.value}, which is not possible here")
        if wanted is not Placement.AUTO:
            return wanted, "as configured"
        if self._remote is None:
            return Placement.LOCAL, "nothing else is possible"
        if self.times is None:
            return Placement.LOCAL, "nothing was measured"
        local_s, remote_s = self.times
        faster = Placement.REMOTE if remote_s < local_s else Placement.LOCAL
        return faster, f"steps took {local_s * 1e3:.1f} ms local, {remote_s * 1e3:.1f} ms remote"

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Open a session at the place where new sessions go now; here, with AUTO, while the service is away. Steps that
        were in flight do not move here: one of them may be what ended the service."""
        place = self.place()
        client = self._client(place)
        try:
            inner = client.open(image=image, conditioning=conditioning, width=width, height=height)
        except ControlNetUnavailable as error:
            if place is not Placement.REMOTE or self._wanted() is not Placement.AUTO:
                raise
            if not self._is_away:
                _log.warning("ControlNet %s runs here while its service is away: %s", self.name, error)
            self._is_away = True
            client = self._client(Placement.LOCAL)
            inner = client.open(image=image, conditioning=conditioning, width=width, height=height)
        else:
            if self._is_away and place is Placement.REMOTE:
                _log.info("ControlNet %s: its service is back", self.name)
                self._is_away = False
                if self._trial.is_over:
                    self._clients.pop(Placement.LOCAL, None)
        self._trial.opened(place)
        return _MovableSession(client, inner)

    def start(self, calls: Sequence[ControlCall]) -> Answers:
        """Start each call at the place of its session."""
        groups: dict[ControlNetClient, dict[int, ControlCall]] = defaultdict(dict)
        for i, call in enumerate(calls):
            groups[call.session.client][i] = replace(call, session=call.session.inner)
        self._asked.update(place for place, client in self._clients.items() if client in groups)
        parts = [(list(group), client.start(list(group.values()))) for client, group in groups.items()]

        def answers() -> list[Residuals | EngineError]:
            found = {i: answer for part, wait in parts for i, answer in zip(part, wait(), strict=True)}
            return [found[i] for i in range(len(calls))]

        return answers

    def stepped(self, kind: Hashable, seconds: float) -> None:
        """Take what a step has cost, if one place alone was asked in it."""
        asked, self._asked = self._asked, set()
        if len(asked) == 1:
            self._trial.record(asked.pop(), kind, seconds)

    def close(self, session: ControlSession) -> None:
        """Close the session at its place."""
        session.client.close(session.inner)

    def shutdown(self) -> None:
        """Shut down the clients that were made."""
        for client in self._clients.values():
            client.shutdown()

    def _client(self, placement: Placement) -> ControlNetClient:
        if placement not in self._clients:
            make = self._remote if placement is Placement.REMOTE and self._remote else self._local
            self._clients[placement] = make()
        return self._clients[placement]
