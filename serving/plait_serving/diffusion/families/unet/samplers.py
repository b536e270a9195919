"""One request's sampler: its own scheduler object, made of what the model's folder says.

Legend: x latents, e model output, s sigma, a_t the cumulative alpha of a timestep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from diffusers import (
    CosineDPMSolverMultistepScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSDEScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    UniPCMultistepScheduler,
)

from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.samplers import SEED_LIMIT, SchedulerSampler, spacing
from plait_serving.diffusion.families.unet.scheduler import COSINE, EDM, SchedulerConfig
from plait_serving.diffusion.request_terms import SamplerChoice
from plait_serving.diffusion.values import ImageRequest, Scheduler

# A folder made with the SDE or the DEIS variant names its algorithm; ours is the one the request asked for.
_2M = {"algorithm_type": "dpmsolver++", "solver_order": 2}
_2M_SDE = {"algorithm_type": "sde-dpmsolver++", "solver_order": 2}
_Classes: TypeAlias = Mapping[Scheduler, tuple[type[Any], Mapping[str, Any]]]
_OF_BETAS: _Classes = {
    Scheduler.DDIM: (DDIMScheduler, {}),
    Scheduler.DDPM: (DDPMScheduler, {}),
    Scheduler.EULER: (EulerDiscreteScheduler, {}),
    Scheduler.EULER_A: (EulerAncestralDiscreteScheduler, {}),
    Scheduler.HEUN: (HeunDiscreteScheduler, {}),
    Scheduler.LMS: (LMSDiscreteScheduler, {}),
    Scheduler.DPMPP_2M: (DPMSolverMultistepScheduler, _2M),
    Scheduler.DPMPP_2M_SDE: (DPMSolverMultistepScheduler, _2M_SDE),
    Scheduler.DPMPP_SDE: (DPMSolverSDEScheduler, {}),
    Scheduler.UNIPC: (UniPCMultistepScheduler, {}),
    Scheduler.LCM: (LCMScheduler, {}),
}
_OF_EDM: _Classes = {
    Scheduler.EULER: (EDMEulerScheduler, {}),
    Scheduler.DPMPP_2M: (EDMDPMSolverMultistepScheduler, _2M),
    Scheduler.DPMPP_2M_SDE: (EDMDPMSolverMultistepScheduler, _2M_SDE),
}
_OF_COSINE: _Classes = {Scheduler.DPMPP_2M_SDE: (CosineDPMSolverMultistepScheduler, {"solver_order": 2})}

SPACED = tuple(kind for kind in Scheduler if kind not in (
    Scheduler.DDIM, Scheduler.DDPM, Scheduler.EULER_A, Scheduler.LCM))  # fmt: skip
"""Those whose spacing of noise levels may be chosen, for models whose noise schedule is made of betas."""
_GENERATES = (Scheduler.DDIM, Scheduler.DDPM, Scheduler.EULER, Scheduler.EULER_A, Scheduler.DPMPP_2M,
              Scheduler.DPMPP_2M_SDE, Scheduler.LCM)  # fmt: skip
"""Those whose `step` takes generators, whether or not it draws."""
_KEEPS_SCALED = (EulerDiscreteScheduler, EulerAncestralDiscreteScheduler, HeunDiscreteScheduler, LMSDiscreteScheduler,
                 DPMSolverSDEScheduler)  # fmt: skip
"""Their latents are x0 + s * e, scaled down for the model's input only."""
_BY_ALPHA = (DDIMScheduler, DDPMScheduler, LCMScheduler)
_BY_LEVEL = (EDMEulerScheduler, EDMDPMSolverMultistepScheduler, CosineDPMSolverMultistepScheduler)
_LEARNED = {"variance_type": ("learned", "learned_range")}
_UNABLE: Mapping[Scheduler, Mapping[str, tuple[object, ...]]] = {
    Scheduler.DDPM: _LEARNED,
    Scheduler.DPMPP_2M: _LEARNED,
    Scheduler.DPMPP_2M_SDE: _LEARNED,
    Scheduler.EULER_A: {"prediction_type": ("sample",)},
    Scheduler.DPMPP_SDE: {"prediction_type": ("sample",)},
    Scheduler.UNIPC: {"lower_order_final": (False,), "solver_type": ("bh1",)},
}
"""What diffusers makes a scheduler of that raises, or divides by zero, when it steps."""


class Sampler(SchedulerSampler):
    """A `RequestSampler`."""

    def init_latents(self, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Return `(n, c, h, w)` noise, drawn or given, at the schedule's initial level."""
        return cast("torch.Tensor", (self.draw() if noise is None else noise) * self._scheduler.init_noise_sigma)

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        """Return clean `latents` as noisy as before step `step`: the first one, or the one that is taken next (the
        schedulers know where they are, and some of them look at nothing else)."""
        return cast("torch.Tensor", self._scheduler.add_noise(latents, noise, self.timesteps[step : step + 1]))

    def scale_input(self, latents: torch.Tensor, step: int) -> torch.Tensor:
        """Return the model's input for `latents` in step `step`; may be the same tensor."""
        return cast("torch.Tensor", self._scheduler.scale_model_input(latents, self.timesteps[step]))

    def predicted_original(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the x0 estimate at step `step`, for previews. Changes no state and draws no noise."""
        if isinstance(self._scheduler, _BY_LEVEL):
            sigma = self._scheduler.sigmas[self._first + step]
            found: torch.Tensor = self._scheduler.precondition_outputs(latents.float(), output.float(), sigma)
            return found.to(latents.dtype)
        signal, noise, scale = self._levels(step)
        # With x = signal * x0 + noise * eps; Euler keeps its latents scaled up by ``scale``.
        x, e = latents.float() / scale, output.float()
        prediction = self._scheduler.config.prediction_type
        if prediction == "sample":
            original = e
        elif prediction == "v_prediction":
            original = signal * x - noise * e
        else:
            original = (x - noise * e) / signal
        return original.to(latents.dtype)

    def _levels(self, step: int) -> tuple[float, float, float]:
        """Return `(signal, noise, scale)` of step `step`: x / scale = signal * x0 + noise * eps."""
        scheduler = self._scheduler
        if isinstance(scheduler, _BY_ALPHA):
            alpha = float(scheduler.alphas_cumprod[int(self.timesteps[step])])
            return math.sqrt(alpha), math.sqrt(1.0 - alpha), 1.0
        sigma = float(scheduler.sigmas[self._first + step])
        if isinstance(scheduler, DPMSolverSDEScheduler) and not scheduler.state_in_first_order:
            sigma = float(scheduler.mid_point_sigma)
        signal = 1.0 / math.sqrt(sigma**2 + 1.0)
        return signal, sigma * signal, 1.0 / signal if isinstance(scheduler, _KEEPS_SCALED) else 1.0


def sampler_of(
    config: SchedulerConfig,
    request: ImageRequest,
    seeds: Sequence[int],
    *,
    shape: tuple[int, int, int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Sampler:
    """Return the sampler of a request's images with these seeds, of one `shape` `(c, h, w)`, with a model's scheduler.
    Step 0 is the first that runs. Raises `RequestError`, naming `num_inference_steps` if the scheduler cannot take that
    many steps."""
    kind = request.scheduler
    # DPM++ SDE takes no generators: each image has a Brownian path of its own, which its seed decides.
    paths = {"noise_sampler_seed": [seed % SEED_LIMIT for seed in seeds]} if kind is Scheduler.DPMPP_SDE else {}
    return Sampler(
        _make(kind, config, {**spacing(request.sigmas), **paths}, request.steps, device),
        seeds=seeds,
        shape=shape,
        draws=kind in _GENERATES,
        first_step=request.first_step,
        dtype=dtype,
        device=device,
        **({"eta": request.eta} if kind is Scheduler.DDIM else {}),
    )


def samplers_of(config: SchedulerConfig) -> SamplerChoice:
    """Return what a model of that scheduler takes. Requests that name no sampler get an EDM model's own."""
    classes = _classes(config)
    if classes is _OF_BETAS:
        return SamplerChoice(spaced=SPACED)
    own = [kind for kind, (scheduler_class, _) in classes.items() if scheduler_class.__name__ == config.own_class]
    is_random = config.written.get("algorithm_type") == _2M_SDE["algorithm_type"]
    return SamplerChoice(among=tuple(classes), default=own[-1] if is_random else own[0])


def _classes(config: SchedulerConfig) -> _Classes:
    return _OF_EDM if config.own_class in EDM else _OF_COSINE if config.own_class in COSINE else _OF_BETAS


def _make(
    kind: Scheduler, config: SchedulerConfig, wishes: Mapping[str, Any], steps: int, device: torch.device | str
) -> Any:
    scheduler_class, overrides = _classes(config)[kind]
    if steps < 1:
        raise RequestError("must be at least 1", param="num_inference_steps")
    try:
        scheduler = scheduler_class.from_config({**config.of(scheduler_class.__name__), **wishes, **overrides})
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise RequestError(f"{kind} cannot be made of this model's scheduler: {error}", param="scheduler") from error
    for key, values in _UNABLE.get(kind, {}).items():
        if (value := scheduler.config.get(key)) in values:
            raise RequestError(f"{kind} cannot step with this model's {key}: {value}", param="scheduler")
    max_steps = int(scheduler.config.num_train_timesteps)
    if kind is Scheduler.LCM:
        # LCM steps are a subset of the distillation's own schedule.
        max_steps = int(scheduler.config.original_inference_steps)
    if steps > max_steps:
        raise RequestError(f"{kind} takes at most {max_steps} steps with this model", param="num_inference_steps")
    try:
        scheduler.set_timesteps(steps, device=device)
    except (ValueError, IndexError, RuntimeError) as error:
        raise RequestError(f"{kind} cannot take {steps} steps: {error}", param="num_inference_steps") from error
    _check_schedule(kind, scheduler, steps)
    return scheduler


def _check_schedule(kind: Scheduler, scheduler: Any, steps: int) -> None:
    """Refuse schedules that diffusers makes but cannot step through, most when there are nearly as many steps as
    timesteps.

    An offset of 1 puts the first of 1000 steps outside the table, and the multistep solvers divide by the distance
    of neighbouring noise levels, which is zero for a repeated one.
    """
    outside = int(scheduler.timesteps.max()) >= int(scheduler.config.num_train_timesteps)
    multistep = kind in (Scheduler.DPMPP_2M, Scheduler.DPMPP_2M_SDE, Scheduler.UNIPC, Scheduler.LMS)
    if outside or (multistep and steps > 1 and float(scheduler.sigmas.diff().max()) >= 0.0):
        raise RequestError(f"{steps} steps are too many for {kind} with this model", param="num_inference_steps")
    predicts_noise = isinstance(scheduler, _BY_ALPHA) and scheduler.config.prediction_type == "epsilon"
    if predicts_noise and not float(scheduler.alphas_cumprod[int(scheduler.timesteps.max())]):
        # Where there is no signal, the noise does not tell x0.
        raise RequestError(f"{kind} cannot step with this model's rescale_betas_zero_snr: True", param="scheduler")
