"""A base model as the engine has it: what is always here, and the parts with weights while they are in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait_serving.diffusion.admission import ImageLimits
from plait_serving.diffusion.decoding import Decoder
from plait_serving.diffusion.protocols import ControlNetClient, LoraProvider
from plait_serving.diffusion.queue.costs import StepCosts
from plait_serving.diffusion.queue.forecast import WorkForecast
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.values import ImageRequest, LoraSet, PromptSize, SamplerChoice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelParts:
    """What holds a model's weights, or refers to who does. `switch_cost_s`: of making a LoRA set live."""

    stepper: Stepper
    decoder: Decoder
    switch_cost_s: Callable[[LoraSet], float]


@dataclass(slots=True, kw_only=True, eq=False)
class ServedModel:
    """One base model. `load` brings its parts into memory, on a thread that then ends; it raises `ModelError`.
    `nbytes`: of its weights there. `leave` is called when they have left, `close` when they have left for good.

    `parts`: None while the model is not resident. `leaves`: it is about to make room, and begins no request any more.
    Both are the compute thread's. `is_retired`: it takes no request any more, and leaves for good after the last one.
    `goes_to_sleep`: it leaves after the last one, until it is asked for again.
    """

    name: str
    limits: ImageLimits
    loras: LoraProvider
    controlnets: Mapping[str, ControlNetClient]
    measure: Callable[[ImageRequest], PromptSize]
    load: Callable[[], ModelParts]
    leave: Callable[[], None]
    nbytes: int
    costs: StepCosts
    forecast: WorkForecast
    close: Callable[[], None] = lambda: None
    samplers: SamplerChoice = field(default_factory=SamplerChoice)
    parts: ModelParts | None = None
    leaves: bool = False
    is_retired: bool = False
    goes_to_sleep: bool = False
