"""From an ``images`` section to a warmed-up engine. The module imports no torch; opening does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.images.config import ImagesSection
from plait_serving.images.service import ImageService

__all__ = ["EngineSource", "HostedEngine", "ImagesSource"]


class HostedEngine(Protocol):
    """A warmed-up engine with what the deployment needs of it."""

    @property
    def service(self) -> ImageService:
        """The way in for requests."""

    @property
    def alive(self) -> bool:
        """Whether the compute thread runs."""

    def reconfigure(self, knobs: EngineKnobs) -> None:
        """Applies new knobs; running requests go on."""

    def stop(self, *, drain_s: float) -> None:
        """Refuses new requests, gives the accepted ones ``drain_s``, fails the rest. Blocks. Idempotent."""


class EngineSource(Protocol):
    """A picklable recipe of an engine; it travels to the replica and is opened there."""

    def open(self, controlnets: Mapping[str, Any]) -> HostedEngine:
        """Builds the engine, makes the warm-up picture and returns. ``controlnets``: Serve handles by name."""


@dataclass(frozen=True, slots=True)
class ImagesSource:
    """An `EngineSource` for a section of plait.yaml; builds nothing until it is opened."""

    images: ImagesSection

    def open(self, controlnets: Mapping[str, Any]) -> HostedEngine:
        """Loads the models and makes the warm-up images. Raises `ModelError`."""
        from plait_serving.deployments.images.hosted import open_images

        return open_images(self.images, controlnets)
