"""What the samplers of all families share: a scheduler object of diffusers and one CPU generator per image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from diffusers.utils.torch_utils import randn_tensor

from plait_serving.diffusion.values import Sigmas

SEED_LIMIT = 2**64
"""Seeds are taken modulo this, as torch's generators do for negative numbers."""

_SPACINGS = {
    Sigmas.KARRAS: "use_karras_sigmas",
    Sigmas.EXPONENTIAL: "use_exponential_sigmas",
    Sigmas.BETA: "use_beta_sigmas",
}


def spacing(sigmas: Sigmas | None) -> dict[str, bool]:
    """Return what a configuration says of a spacing; a folder's own may name another."""
    return {} if sigmas is None else {key: sigmas is each for each, key in _SPACINGS.items()}


class SchedulerSampler:
    """The part of a `RequestSampler` that calls the scheduler exactly like diffusers' pipelines do, so that the latents
    are the same. Steps must be taken in order; the object belongs to one request.

    A step here is one denoiser call: a schedule of N steps has 2 N - 1 of them if its steps make two.
    """

    def __init__(
        self,
        scheduler: Any,
        *,
        seeds: Sequence[int],
        shape: tuple[int, int, int],
        draws: bool,
        first_step: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **extra: Any,
    ) -> None:
        """Take the scheduler object, whose steps before `first_step` are left out; `shape` is one image's `(c, h, w)`.
        Its `step` takes generators, if it `draws`, and what is `extra`."""
        self._scheduler = scheduler
        self._first = first_step * int(scheduler.order)
        # Without this, schedules with a repeated timestep would start at the second of the two.
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(self._first)
        self._generators = [torch.Generator("cpu").manual_seed(seed % SEED_LIMIT) for seed in seeds]
        self._shape = (len(seeds), *shape)
        self._dtype, self._device = dtype, torch.device(device)
        self._extra = extra | ({"generator": self._generators} if draws else {})
        timesteps = scheduler.timesteps[self._first :]
        # Models read timesteps as float32; what crosses to ControlNets need not know of a wider one.
        self.timesteps: torch.Tensor = timesteps.float() if timesteps.dtype is torch.float64 else timesteps

    def draw(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return standard normal `(n, c, h, w)`; image i is drawn from its own generator, which moves on."""
        noise = randn_tensor(self._shape, generator=self._generators, device=self._device, dtype=dtype or self._dtype)
        return cast("torch.Tensor", noise)

    def step(self, output: torch.Tensor, step: int, latents: torch.Tensor) -> torch.Tensor:
        """Return the latents after step `step`, given the guided model output. Random samplers draw noise."""
        taken = self._scheduler.step(output, self.timesteps[step], latents, **self._extra, return_dict=False)
        return cast("torch.Tensor", taken[0])
