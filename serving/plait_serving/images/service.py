"""The seam between the routers and whatever makes the pictures: an engine in this process, or Serve handles.

Imports neither FastAPI nor torch, so a command, a test or a replica can use it alike.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.values import Event, ImageRequest, RgbImage, Scheduler
from plait_serving.health import Health


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelCard:
    """A base model and what a request gets when it leaves a field out."""

    name: str
    family: str
    default_width: int
    default_height: int
    default_steps: int = 20
    default_guidance_scale: float = 7.5
    default_scheduler: Scheduler = Scheduler.EULER
    limits: ImageLimits = field(default_factory=ImageLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCard:
    """A LoRA that requests may name."""

    name: str
    family: str
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetCard:
    """A ControlNet that requests may name; ``preprocessor`` turns an ordinary picture into its control map."""

    name: str
    family: str
    preprocessor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What can be asked for at this moment; LoRAs may come and go while the server runs."""

    model: BaseModelCard
    loras: tuple[LoraCard, ...] = ()
    controlnets: tuple[ControlNetCard, ...] = ()
    preprocessors: tuple[str, ...] = ()

    def has_lora(self, name: str) -> bool:
        """Whether a LoRA of that name exists."""
        return any(card.name == name for card in self.loras)

    def controlnet(self, name: str) -> ControlNetCard | None:
        """The ControlNet of that name, if there is one."""
        return next((card for card in self.controlnets if card.name == name), None)


Preprocessors = Mapping[str, Callable[[RgbImage], RgbImage]]
"""What makes a control map of an ordinary picture, by name."""

# A new request's seed is below 2**32: short to type, and exact in every JSON reader (those of browsers lose bits at
# 2**53).
_RANDOM_SEED_END = 2**32


def random_seed() -> int:
    """A seed for a request that gives none."""
    return secrets.randbelow(_RANDOM_SEED_END)


class ImageService(Protocol):
    """Makes pictures. All methods may be called from many tasks of one event loop at once."""

    async def catalog(self) -> Catalog:
        """What exists now. Cheap: it is asked for with every request."""

    def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """The request's events; the last one is Finished or Failed, and nothing is submitted before the first read.

        Errors of the engine arrive as `Failed`, they are not raised. Closing the generator (or cancelling the task
        that reads it) before the last event cancels the work within one step.
        """

    async def health(self) -> Health:
        """Ready only after a warm-up picture was made. Never blocks on the queue."""

    async def metrics_text(self) -> str:
        """The service's own metrics in Prometheus' text format; may be empty."""
