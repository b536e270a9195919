"""Schedules of flow models, and a request's sampler.

Legend: s a noise level, 1 to 0; latents are `(1 - s) * image + s * noise`, and the model predicts `noise - image`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from plait_serving.diffusion.errors import ModelError, RequestError
from plait_serving.diffusion.families.samplers import SchedulerSampler, spacing
from plait_serving.diffusion.request_terms import SamplerChoice
from plait_serving.diffusion.values import Scheduler, Sigmas

Config: TypeAlias = Mapping[str, Any]

_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
_CLASSES: Mapping[Scheduler, tuple[type[Any], Config]] = {
    Scheduler.EULER: (FlowMatchEulerDiscreteScheduler, {"stochastic_sampling": False}),
    Scheduler.EULER_A: (FlowMatchEulerDiscreteScheduler, {"stochastic_sampling": True}),
    Scheduler.HEUN: (FlowMatchHeunDiscreteScheduler, {}),
    Scheduler.DPMPP_2M: (DPMSolverMultistepScheduler, _FLOW),
    Scheduler.UNIPC: (UniPCMultistepScheduler, _FLOW),
}
_SPACED = (Scheduler.EULER, Scheduler.EULER_A)
_STARTS_FROM_IMAGES = (*_SPACED, Scheduler.HEUN)


@dataclass(frozen=True, kw_only=True)
class Schedules:
    """What a folder's scheduler makes of requests. `even`: FLUX.1's noise levels lie evenly from 1 to 1 / steps, before
    they are shifted; those of SD3 between bounds that the scheduler has shifted already, and it shifts them again."""

    config: Config
    even: bool

    @classmethod
    def of(cls, written: Config, path: object, *, even: bool) -> Schedules:
        """Take what a folder's file says. Raises `ModelError`, naming the file, for a scheduler of another kind."""
        kind = written.get("_class_name")
        if kind != FlowMatchEulerDiscreteScheduler.__name__:
            raise ModelError(f"{path}: {kind} is not supported; FlowMatchEulerDiscreteScheduler is")
        for key in ("invert_sigmas", "shift_terminal"):
            if written.get(key):
                raise ModelError(f"{path}: {key} = {written[key]!r} is not supported")
        return cls(config=dict(FlowMatchEulerDiscreteScheduler.from_config(dict(written)).config), even=even)

    @property
    def choice(self) -> SamplerChoice:
        """What requests may choose among: all that can be made as the pipelines would."""
        among = tuple(kind for kind in _CLASSES if self._can(kind))
        default = Scheduler.EULER_A if self.config["stochastic_sampling"] else Scheduler.EULER
        starts = tuple(kind for kind in among if kind in _STARTS_FROM_IMAGES)
        return SamplerChoice(among=among, default=default, spaced=_SPACED, starts=starts)

    def _can(self, kind: Scheduler) -> bool:
        try:
            self.make(kind, steps=4, tokens=256)
        except RequestError:
            return False
        return True

    def make(
        self,
        kind: Scheduler,
        *,
        steps: int,
        tokens: int,
        sigmas: Sigmas | None = None,
        device: torch.device | str = "cpu",
    ) -> Any:
        """Return a scheduler object for so many steps of images of so many tokens. Raises `RequestError`."""
        made_of, changes = _CLASSES[kind]
        known = inspect.signature(made_of.__init__).parameters
        config = {key: value for key, value in self.config.items() if key in known}
        shift = {"flow_shift": self.config["shift"]} if changes is _FLOW else {}
        given: dict[str, Any] = {"num_inference_steps": steps}
        if self.even and kind in _SPACED:
            given = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
        if self.even or self.config["use_dynamic_shifting"]:
            given["mu"] = self._mu(tokens)
        try:
            scheduler = made_of.from_config({**config, **spacing(sigmas), **changes, **shift})
            scheduler.set_timesteps(device=device, **given)
        except (ValueError, TypeError, AssertionError, RuntimeError) as error:
            raise RequestError(f"{kind} cannot take {steps} steps of this model: {error}", param="scheduler") from error
        return scheduler

    def _mu(self, tokens: int) -> float:
        """Return the shift of an image of so many tokens: on a line through two lengths, in diffusers' order."""
        low, high = self.config["base_image_seq_len"], self.config["max_image_seq_len"]
        slope = (self.config["max_shift"] - self.config["base_shift"]) / (high - low)
        return float(tokens * slope + (self.config["base_shift"] - slope * low))


class FlowSampler(SchedulerSampler):
    """A `RequestSampler`."""

    def init_latents(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return `(n, c, h, w)` noise, drawn or given."""
        return self.draw() if noise is None else noise

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Return clean `latents` as noisy as before step `step`: the first one, or the one that is taken next."""
        return cast("torch.Tensor", self._scheduler.scale_noise(latents, self.timesteps[step : step + 1], noise))

    def scale_input(self, latents: torch.Tensor, step: int) -> torch.Tensor:  # noqa: ARG002  # of no step
        """Return the model's input for `latents`: they are never scaled."""
        return latents

    def predicted_original(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the x0 estimate at step `step`, for previews. Changes no state and draws no noise."""
        level = self._scheduler.sigmas[self._first + step]
        original: torch.Tensor = latents.float() - level * output.float()
        return original.to(latents.dtype)
