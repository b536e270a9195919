"""The naive twin of `UNetDenoiser`: one request at a time, the whole UNet, ControlNets in place, like the pipelines.

Tests compare the fast path with it; it accepts no `ControlNetClient`, only diffusers' own modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.families.rows import guidance_embedding, rescaled
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.protocols import Conditioning, ControlCall, PendingResiduals, Residuals, StepCall
from plait_serving.diffusion.values import RgbImage


class WholeUNetDenoiser(UNetDenoiser):
    """Shares prepare and finish; `predict` calls the UNet once per request, its ControlNets just before.

    Its ControlNets must answer at once: `WholeControlNet`.
    """

    @torch.inference_mode()
    def predict(self, calls: Sequence[StepCall]) -> list[torch.Tensor | EngineError]:
        """Call the whole UNet once per request; raises whatever the modules raise."""
        return [self._predict_one(call) for call in calls]

    def _predict_one(self, call: StepCall) -> torch.Tensor:
        conditioning = call.conditioning
        sample = torch.cat([call.sample] * 2) if conditioning.branches == 2 else call.sample
        text, added = conditioning.expand(conditioning.text), _expand(conditioning)
        down, mid = _local_residuals(call, sample)
        if call.extra is not None:
            sample = torch.cat([sample, call.extra.repeat(len(sample) // len(call.extra), 1, 1, 1)], dim=1)
        output: torch.Tensor = self.bundle.unet(
            sample,
            call.timestep,
            encoder_hidden_states=text,
            timestep_cond=self._timestep_cond(call),
            added_cond_kwargs=added or None,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
            return_dict=False,
        )[0]
        if conditioning.branches == 1:
            return output
        unconditional, conditional = output.chunk(2)
        scale, rescale = call.request.guidance_scale, call.request.guidance_rescale
        guided = unconditional + scale * (conditional - unconditional)
        return rescaled(guided, conditional, rescale) if rescale else guided

    def _timestep_cond(self, call: StepCall) -> torch.Tensor | None:
        if not self.bundle.embeds_guidance:
            return None
        width = int(self.bundle.config["time_cond_proj_dim"])
        scales = [call.request.guidance_scale] * call.conditioning.n
        return guidance_embedding(scales, width, self.bundle.dtype, self.bundle.device)


@dataclass(frozen=True, slots=True, eq=False)
class WholeSession:
    """The preprocessed control image; nothing is computed ahead."""

    controlnet: str
    image: torch.Tensor
    conditioning: Conditioning


@dataclass(frozen=True, slots=True, eq=False)
class _Immediate:
    residuals: list[Residuals | EngineError]

    def wait(self) -> list[Residuals | EngineError]:
        return self.residuals


class WholeControlNet:
    """A `ControlNetClient` that calls diffusers' ControlNet module anew for every request and step."""

    def __init__(self, name: str, net: Any) -> None:
        self.name = name
        self._net = net

    def open(self, *, image: RgbImage, conditioning: Conditioning, width: int, height: int) -> WholeSession:
        """Resize and scale the image like `StableDiffusionControlNetPipeline.prepare_image`."""
        processor = VaeImageProcessor(vae_scale_factor=1, do_convert_rgb=True, do_normalize=False)
        pixels = processor.preprocess(Image.fromarray(image), height=height, width=width)
        return WholeSession(self.name, pixels.to(device=self._net.device, dtype=self._net.dtype), conditioning)

    def start(self, calls: Sequence[ControlCall]) -> PendingResiduals:
        """Compute at once."""
        return _Immediate([self._residuals(call) for call in calls])

    def close(self, session: object) -> None:
        """Do nothing: no state is held."""

    def shutdown(self) -> None:
        """Do nothing: no state is held."""

    @torch.inference_mode()
    def _residuals(self, call: ControlCall) -> Residuals:
        session = call.session
        assert isinstance(session, WholeSession)
        conditioning = session.conditioning
        down, mid = self._net(
            call.sample,
            call.timestep,
            encoder_hidden_states=conditioning.expand(conditioning.text),
            controlnet_cond=session.image.repeat_interleave(len(call.sample), dim=0),
            conditioning_scale=call.scale,
            added_cond_kwargs=_expand(conditioning) or None,
            return_dict=False,
        )
        return Residuals(down=tuple(down), mid=mid)


def _expand(conditioning: Conditioning) -> Mapping[str, torch.Tensor]:
    return {name: conditioning.expand(value) for name, value in conditioning.added.items()}


def _local_residuals(
    call: StepCall, sample: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...] | None, torch.Tensor | None]:
    """Return the residuals of all ControlNets summed in list order, or (None, None)."""
    down: tuple[torch.Tensor, ...] | None = None
    mid: torch.Tensor | None = None
    for control in call.controls:
        question = ControlCall(session=control.session, sample=sample, timestep=call.timestep, scale=control.scale)
        answer = control.client.start([question]).wait()[0]
        if isinstance(answer, EngineError):
            raise answer
        if down is None or mid is None:
            down, mid = answer.down, answer.mid
        else:
            down = tuple(a + b for a, b in zip(down, answer.down, strict=True))
            mid = mid + answer.mid
    return down, mid
