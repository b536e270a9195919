"""A folder's scheduler: which ones are served, and which of their keys are read.

The requests of one model choose among many samplers, each a class of diffusers that takes some of the folder's keys and
drops the others. A key that says what the model was trained on, and that only some of them take, would make images
wrong without a sign of it; such a key is refused, and so is one that nobody here has looked at.

An EDM model is one of Karras et al. 2022 (https://huggingface.co/papers/2206.00364), which is fed noise levels instead
of timesteps: Playground v2.5, CosXL.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.config import UNetKind

OF_BETAS = frozenset(
    f"{name}Scheduler"
    for name in ("PNDM", "DDIM", "DDPM", "EulerDiscrete", "EulerAncestralDiscrete", "HeunDiscrete", "LMSDiscrete",
                 "KDPM2Discrete", "KDPM2AncestralDiscrete", "DPMSolverMultistep", "DPMSolverSinglestep", "DPMSolverSDE",
                 "DEISMultistep", "UniPCMultistep", "LCM", "TCD")
)  # fmt: skip
"""The classes of models whose noise schedule is made of betas."""
EDM = frozenset(("EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"))
COSINE = frozenset(("CosineDPMSolverMultistepScheduler",))
"""That of EDM models which are fed an angle, the arc tangent of the noise level, instead of its logarithm."""

READ = frozenset(
    # The noise schedule and what the model predicts. Heun, LMS and DPM++ SDE know no betas of zero SNR, in diffusers
    # as here.
    ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type",
     "timestep_spacing", "steps_offset", "rescale_betas_zero_snr",
     # How a sampler steps: those that have such an option read it, and it says nothing of the model.
     "algorithm_type", "solver_order", "solver_type", "lower_order_final", "euler_at_final", "disable_corrector",
     "use_lu_lambdas", "lambda_min_clipped", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas",
     "clip_sample", "clip_sample_range", "thresholding", "dynamic_thresholding_ratio", "sample_max_value",
     "variance_type", "set_alpha_to_one", "skip_prk_steps", "original_inference_steps", "timestep_scaling",
     # Of `use_flow_sigmas` and `use_dynamic_shifting`, without which they mean nothing.
     "flow_shift", "time_shift_type")
)  # fmt: skip
"""The keys that may have any value."""
EDM_READ = frozenset(("sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "rho"))
"""Those that only EDM models have."""

_BETA_SCHEDULES = ("linear", "scaled_linear", "squaredcos_cap_v2")
"""Those that every sampler knows."""

_MENDED: Mapping[str, Any] = {"steps_offset": 1, "clip_sample": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """A folder's scheduler as diffusers' pipeline has it: the configuration `written`, and the defaults of its own
    class that the pipeline changes."""

    written: Mapping[str, Any]
    own_class: str = ""
    own_defaults: Mapping[str, Any] = field(default_factory=dict)

    def of(self, class_name: str) -> Mapping[str, Any]:
        """Return the configuration that a scheduler of that class is made of."""
        return {**self.written, **(self.own_defaults if class_name == self.own_class else {})}


def scheduler_config(folder: Path, written: Mapping[str, Any], names: object, kind: UNetKind) -> SchedulerConfig:
    """Return the scheduler of a folder: what its file says, and what `model_index.json` calls it (`names`). Raises
    `ModelError`, naming the class or the key that is not served."""
    path = folder / "scheduler" / "scheduler_config.json"
    named = getattr(diffusers, str(names[-1]), None) if isinstance(names, list) and names else None
    if named is None:
        raise ModelError(f"{folder / 'model_index.json'}: scheduler names no class of diffusers: {names!r}")
    alike: frozenset[str] = next((group for group in (OF_BETAS, EDM, COSINE) if named.__name__ in group), frozenset())
    for place, name in ((folder / "model_index.json", named.__name__), (path, written.get("_class_name"))):
        if name is not None and name not in alike:
            raise ModelError(f"{place}: {name} is not supported: no sampler here steps as it does")
    is_edm = alike is not OF_BETAS
    predictions = ("epsilon", "v_prediction") if is_edm else ("epsilon", "v_prediction", "sample")
    for key, values in {"prediction_type": predictions, "beta_schedule": _BETA_SCHEDULES}.items():
        if key in written and written[key] not in values:
            raise ModelError(f"{path}: {key} = {written[key]!r} is not supported")
    known = inspect.signature(named.__init__).parameters
    for key in sorted(written.keys() & known.keys() - READ - (EDM_READ if is_edm else frozenset())):
        if written[key] is not None and written[key] != known[key].default:
            raise ModelError(f"{path}: {key} = {written[key]!r} is not supported: samplers here do not read it")
    # StableDiffusionPipeline mends outdated configurations; the SDXL pipeline takes them as they are. What the file
    # does not say is mended in the folder's own scheduler only: one of another class takes its own defaults for it.
    mended = {} if kind is UNetKind.SDXL else _MENDED
    return SchedulerConfig(
        written={**written, **{key: value for key, value in mended.items() if key in written}},
        own_class=named.__name__,
        own_defaults={key: value for key, value in mended.items() if key in known and key not in written},
    )
