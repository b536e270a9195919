"""The ControlNet in the same process and on the same thread as the denoiser."""

from __future__ import annotations

from collections.abc import Sequence

from plait_serving.diffusion.controlnet.rows import Constants, ControlNetRunner, LaterResiduals, answers_to
from plait_serving.diffusion.errors import ControlNetUnavailable
from plait_serving.diffusion.protocols import (
    Conditioning,
    ControlCall,
    ControlNetClient,
    ControlSession,
    PendingResiduals,
)
from plait_serving.diffusion.values import RgbImage


class LocalControlNetClient(ControlNetClient):
    """Computes when the answer is awaited: on one device the ControlNet and the encoder half would only alternate."""

    def __init__(self, name: str, runner: ControlNetRunner) -> None:
        self.name = name
        self.runner = runner
        self._open: set[Constants] = set()

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Embed the control image here. Raises `RequestError` and `ModelError`."""
        constants = self.runner.constants(image=image, conditioning=conditioning, width=width, height=height)
        self._open.add(constants)
        return constants

    def start(self, calls: Sequence[ControlCall]) -> PendingResiduals:
        """Return the calls uncomputed: they are computed when the answer is awaited."""
        closed = ControlNetUnavailable("the ControlNet session was closed, or belongs to another ControlNet")
        asked = [call if call.session in self._open else closed for call in calls]
        return LaterResiduals(lambda: answers_to(self.runner, asked))

    def close(self, session: ControlSession) -> None:
        """Forget the session's constants."""
        self._open.discard(session)

    def shutdown(self) -> None:
        """Do nothing: the weights are freed with the last reference."""
