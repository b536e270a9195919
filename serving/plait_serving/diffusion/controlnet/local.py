"""The ControlNet in the same process and on the same thread as the denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from plait_serving.diffusion.controlnet.rows import Constants, ControlNetRunner, ControlRows
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


@dataclass(slots=True, eq=False)
class LocalSession:
    """A session; `constants` is None once it was closed."""

    controlnet: str
    constants: Constants | None


class LocalControlNetClient(ControlNetClient):
    """Computes when the answer is awaited: on one device the ControlNet and the encoder half would only alternate."""

    def __init__(self, name: str, runner: ControlNetRunner) -> None:
        self._name = name
        self.runner = runner

    @property
    def name(self) -> str:
        """The ControlNet's name."""
        return self._name

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Embed the control image here. Raises `RequestError` and `ModelError`."""
        constants = self.runner.constants(image=image, conditioning=conditioning, width=width, height=height)
        return LocalSession(controlnet=self._name, constants=constants)

    def start(self, calls: Sequence[ControlCall]) -> PendingResiduals:
        """Return the calls uncomputed: they are computed when the answer is awaited."""
        return _LocalPending(self, tuple(calls))

    def close(self, session: ControlSession) -> None:
        """Drop the session's constants."""
        if isinstance(session, LocalSession):
            session.constants = None

    def constants_of(self, session: ControlSession) -> Constants | None:
        """Return what `open` computed; None for a closed session and for one of another ControlNet."""
        if isinstance(session, LocalSession) and session.controlnet == self._name:
            return session.constants
        return None

    def shutdown(self) -> None:
        """Do nothing: the weights are freed with the last reference."""


class _LocalPending(PendingResiduals):
    """Calls that have not been computed yet."""

    def __init__(self, client: LocalControlNetClient, calls: tuple[ControlCall, ...]) -> None:
        self._client = client
        self._calls = calls
        self._answers: list[Residuals | EngineError] | None = None

    def wait(self) -> list[Residuals | EngineError]:
        if self._answers is None:
            self._answers = self._compute()
        return self._answers

    def _compute(self) -> list[Residuals | EngineError]:
        blocks: dict[int, ControlRows] = {}
        for i, call in enumerate(self._calls):
            constants = self._client.constants_of(call.session)
            if constants is not None:
                blocks[i] = ControlRows(
                    constants=constants,
                    sample=call.sample,
                    timestep=call.timestep,
                    scale=call.scale,
                    exact=call.exact,
                )
        computed = dict(zip(blocks, self._client.runner.try_residuals(list(blocks.values())), strict=True))
        closed = ControlNetUnavailable("the ControlNet session was closed, or belongs to another ControlNet")
        return [computed.get(i, closed) for i in range(len(self._calls))]
