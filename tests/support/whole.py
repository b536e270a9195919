"""A ControlNet without a service and without batches: diffusers' own module, in place, like the pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.protocols import Conditioning, ControlCall, PendingResiduals, Residuals
from plait_serving.diffusion.values import RgbImage


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
            added_cond_kwargs={k: conditioning.expand(value) for k, value in conditioning.added.items()} or None,
            return_dict=False,
        )
        return Residuals(down=tuple(down), mid=mid)
