"""From an `images` section to a warmed-up engine. The module imports no torch; opening does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from plait_serving.deployments.ray_internals import given_knobs
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.images.config import ImagesSection
from plait_serving.imports import importing

if TYPE_CHECKING:
    from plait_serving.deployments.images.hosted import HostedImages


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first event of every request that reached a replica: from then on it waits for its turn, not for a
    replica."""


_UNREAD = {"replicas", "num_cpus", "num_gpus", "results", "knobs"}


class EngineSource(Protocol):
    """A picklable recipe for an engine; it travels to the replica and is opened there."""

    def open(self, controlnets: Mapping[str, Any]) -> HostedImages:
        """Build the engine, make the warm-up image and return the engine. `controlnets` holds Serve handles by name."""


@dataclass(frozen=True, slots=True)
class ImagesSource:
    """An `EngineSource` for a section of plait.yaml; nothing is built until `open`."""

    images: ImagesSection

    @classmethod
    def for_replicas(cls, images: ImagesSection) -> Self:
        """Return a source whose section sets what replicas read: no numbers of replicas, what Ray reserves, knobs, and
        what others read."""
        controlnets = {
            name: {"folder": section.folder, "preprocessor": section.preprocessor}
            for name, section in images.resolved_controlnets().items()
        }
        return cls(ImagesSection(**images.model_dump(exclude=_UNREAD) | {"controlnets": controlnets}))

    def open(self, controlnets: Mapping[str, Any]) -> HostedImages:
        """Load the models and make the warm-up images, with the replica's knobs. Raises `ModelError`."""
        with importing():
            from plait_serving.deployments.images.hosted import open_images

        knobs = EngineKnobs.model_validate(given_knobs())
        return open_images(self.images.model_copy(update={"knobs": knobs}), controlnets)
