"""Makes images with diffusers' own pipelines from an exported folder, as `verify` needs during training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionPipeline
from PIL import Image

from plait_serving.starter.preprocess import ImageArray
from plait_serving.starter.verify import Generate, VerificationImage

GUIDANCE = 3.0
GROUP = 25


def _pipeline(folder: Path, controlnet: str | None, lora: str | None) -> Any:
    base = folder / "emoji"
    if controlnet is None:
        pipe = StableDiffusionPipeline.from_pretrained(base)
    else:
        net = ControlNetModel.from_pretrained(folder / "controlnets" / controlnet)
        pipe = StableDiffusionControlNetPipeline.from_pretrained(base, controlnet=net)
    if lora is not None:
        pipe.load_lora_weights(folder / "loras", weight_name=f"{lora}.safetensors")
        pipe.fuse_lora(components=["unet", "text_encoder"])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _make(pipe: Any, orders: Sequence[VerificationImage]) -> list[ImageArray]:
    extra = {}
    if orders[0].control_image is not None:
        extra["image"] = [Image.fromarray(a.control_image) for a in orders if a.control_image is not None]
    made = pipe(
        [a.prompt for a in orders],
        generator=[torch.Generator().manual_seed(a.seed) for a in orders],
        num_inference_steps=orders[0].steps,
        guidance_scale=GUIDANCE,
        height=64,
        width=64,
        output_type="np",
        **extra,
    ).images
    return [np.asarray(np.rint(image * 255), dtype=np.uint8) for image in made]


def diffusers_generate(folder: Path) -> Generate:
    """Return a `generate` for `verify` over the bundle in `folder`; LoRAs are fused at scale 1."""

    def generate(orders: Sequence[VerificationImage]) -> list[ImageArray]:
        groups: dict[tuple[str | None, str | None], list[int]] = defaultdict(list)
        for index, order in enumerate(orders):
            groups[order.controlnet, order.lora].append(index)
        made: dict[int, ImageArray] = {}
        for (controlnet, lora), indices in groups.items():
            pipe = _pipeline(folder, controlnet, lora)
            for start in range(0, len(indices), GROUP):
                part = indices[start : start + GROUP]
                made.update(zip(part, _make(pipe, [orders[i] for i in part]), strict=True))
        return [made[i] for i in range(len(orders))]

    return generate
