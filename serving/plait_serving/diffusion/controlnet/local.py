"""The ControlNet in the same process and on the same thread as the denoiser."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from plait_serving.diffusion.controlnet.rows import ControlNetRunner
from plait_serving.diffusion.protocols import Answers, Conditioning, ControlCall, ControlNetClient, ControlSession
from plait_serving.diffusion.values import RgbImage


class LocalControlNetClient(ControlNetClient):
    """Computes when the answer is awaited: on one device the ControlNet and the encoder half would only alternate."""

    def __init__(self, name: str, runner: ControlNetRunner) -> None:
        self.name = name
        self.runner = runner

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> ControlSession:
        """Embed the control image here. Raises `RequestError` and `ModelError`."""
        return self.runner.constants(image=image, conditioning=conditioning, width=width, height=height)

    def start(self, calls: Sequence[ControlCall]) -> Answers:
        """Return what computes the calls."""
        return partial(self.runner.try_residuals, calls)

    def close(self, session: ControlSession) -> None:
        """Do nothing: the constants go with the last reference."""

    def shutdown(self) -> None:
        """Do nothing: so do the weights."""
