"""The interface between the routers and what makes the images: an engine in this process, or Serve handles.

Imports neither FastAPI nor torch, so a command, a test or a replica can use it.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.diffusion.values import Event, ImageRequest, RgbImage, Scheduler
from plait_serving.health import Health
from plait_serving.replica_metrics import ReplicaMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelCard:
    """A base model, what requests for it may say, and the defaults for fields that one leaves out. `controlnets`: the
    names of those that it takes; None: all."""

    name: str
    family: str
    default_width: int
    default_height: int
    default_steps: int = 20
    default_guidance_scale: float = 7.5
    default_scheduler: Scheduler = Scheduler.EULER
    terms: RequestTerms = field(default_factory=RequestTerms)
    dtype: str = "float32"
    controlnets: tuple[str, ...] | None = None
    limits: ImageLimits = field(default_factory=ImageLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraCard:
    """A LoRA that requests may name."""

    name: str
    family: str
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetCard:
    """A ControlNet that requests may name; `preprocessor` turns an ordinary image into its control map."""

    name: str
    family: str
    preprocessor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasCard:
    """Another name that requests may use: a base model with LoRAs and their scales."""

    name: str
    model: str
    loras: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What can be requested now; LoRAs may come and go while the server runs. The first model is what requests without
    one mean. `refused`: why models of the configuration, or in its folder, are not served, by name."""

    models: tuple[BaseModelCard, ...]
    aliases: tuple[AliasCard, ...] = ()
    loras: tuple[LoraCard, ...] = ()
    controlnets: tuple[ControlNetCard, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> BaseModelCard:
        """What requests without a model mean."""
        return self.models[0]

    def base(self, name: str) -> BaseModelCard | None:
        """Return the base model of that name, or None."""
        return next((card for card in self.models if card.name == name), None)

    def alias(self, name: str) -> AliasCard | None:
        """Return the alias of that name, or None."""
        return next((card for card in self.aliases if card.name == name), None)

    def controlnet(self, name: str) -> ControlNetCard | None:
        """Return the ControlNet of that name, or None."""
        return next((card for card in self.controlnets if card.name == name), None)


Preprocessors = Mapping[str, Callable[[RgbImage], RgbImage]]
"""The functions that make a control map from an ordinary image, by name."""

# A new request's seed is below 2**32: short to type, and exact in every JSON reader (those of browsers lose bits at
# 2**53).
_RANDOM_SEED_END = 2**32


def random_seed() -> int:
    """Return a seed for a request that gives none."""
    return secrets.randbelow(_RANDOM_SEED_END)


class ImageService(Protocol):
    """Makes images. All methods may be called concurrently from many tasks of one event loop."""

    async def catalog(self, *, anew: bool = False) -> Catalog:
        """Return what existed a moment ago, which costs nothing: it is called with every request. `anew`: what exists
        now, which may be asked of another process."""

    def generate(self, request: ImageRequest) -> AsyncGenerator[Event, None]:
        """Yield the request's events, `Finished` or `Failed` last; nothing is submitted before the first read.

        Errors of the engine arrive as `Failed`; they are not raised. Closing the generator (or cancelling the task
        that reads it) before the last event cancels the work within one step.
        """

    async def rest(self, model: str, *, asleep: bool) -> None:
        """Let the weights of a base model leave the memory of every replica once its requests have ended, until it is
        asked for or woken; or bring them back. Returns at once. Raises `NotFound` and `EngineStopped`."""

    async def health(self) -> Health:
        """Return ready only after a warm-up image was made. Never blocks on the queue."""

    async def counts(self) -> Sequence[ReplicaMetrics]:
        """Return what each replica of the service counts; may be empty."""
