"""`python -m starter_training`: make the starter models from scratch, or resume a run that stopped."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionPipeline
from PIL import Image

from plait_serving.starter.manifest import WEIGHTS
from plait_serving.starter.preprocess import ImageArray
from plait_serving.starter.references import load_references
from plait_serving.starter.verify import Generate, VerificationImage, verify
from starter_training.data import DEFAULT_COUNT, NpmUnavailableError, load_images
from starter_training.plan import FULL, STAGES, override, smoke_plan
from starter_training.stages import train_all

# More than data.FAVOURED, few enough that a smoke run is quick.
SMOKE_COUNT = 40


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m starter_training", description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/plait/starter"), help="npm archives and images")
    parser.add_argument("--work", type=Path, help="checkpoints; default: below the cache")
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="where the bundle goes")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated; the first four always run")
    parser.add_argument("--set", action="append", default=[], metavar="STAGE.FIELD=N", help="change one recipe")
    parser.add_argument("--threads", type=int, help="threads for torch")
    parser.add_argument(
        "--smoke", action="store_true", help="a few steps a stage on few images, to see that all of it runs"
    )
    parser.add_argument("--verify", action="store_true", help="measure the bundle afterwards; JSON on stdout")
    return parser.parse_args(argv)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Train, export and, if requested, measure. Exit code 0 ok, 1 failed, 2 usage, 99 a figure missed its bound."""
    options = parse(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    cache = Path(expanduser(options.cache))
    try:
        plan = override(smoke_plan() if options.smoke else FULL, options.set)
        stages = tuple(options.stages.split(","))
        if unknown := set(stages) - set(STAGES):
            raise ValueError(f"unknown stages: {sorted(unknown)}; known: {', '.join(STAGES)}")
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    try:
        images = load_images(cache, SMOKE_COUNT if options.smoke else DEFAULT_COUNT)
    except NpmUnavailableError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    work = options.work or cache / ("smoke" if options.smoke else "checkpoints")
    train_all(images, plan, work, options.out, stages)
    if options.verify:
        report = verify(diffusers_generate(options.out), load_references(options.out))
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return 0 if report["passed"] else 99
    return 0


if __name__ == "__main__":
    sys.exit(main())
