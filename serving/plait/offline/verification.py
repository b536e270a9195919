"""The starter models' figures, measured with the server's own engine and defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraRef, RgbImage
from plait_serving.http.edge.feed import finished
from plait_serving.images.config import (
    STARTER_GUIDANCE,
    ControlNetSection,
    DefaultsSection,
    ImagesSection,
    LorasSection,
)
from plait_serving.images.service import Catalog, ImageService
from plait_serving.starter.manifest import manifest_problems
from plait_serving.starter.references import load_references
from plait_serving.starter.verify import PARTS, STEPS, VerificationImage, verify

# Enough for full batches, few enough for any queue.
AT_ONCE = 32

Say = Callable[[int, int], None]
"""Receives how many images are finished, and how many have been requested so far."""


def section_of(folder: Path) -> ImagesSection:
    """Return the configuration of a folder laid out like the starter's: `emoji/`, `controlnets/`, `loras/`."""
    nets = sorted(path.parent for path in folder.glob("controlnets/*/config.json"))
    return ImagesSection(
        model=str((folder / "emoji").resolve()),
        loras=LorasSection(folder=folder / "loras"),
        controlnets={net.name: ControlNetSection(folder=net) for net in nets},
        defaults=DefaultsSection(guidance_scale=STARTER_GUIDANCE),
    )


def parse_parts(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the parts to measure; all of them if none are named. Raises ValueError for an unknown one."""
    unknown = sorted(set(names or ()) - PARTS.keys())
    if unknown:
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return tuple(names or PARTS)


def check_files(folder: Path) -> None:
    """Check that every file is present and matches the manifest. Raises `PlaitError` if not."""
    problems = manifest_problems(folder)
    if problems:
        raise PlaitError(f"{folder}: {'; '.join(problems[:5])}" + (" ..." if len(problems) > 5 else ""))


def measure(
    service: ImageService, folder: Path, *, parts: Sequence[str], limit: int | None, say: Say
) -> dict[str, Any]:
    """Run `starter.verify` with images from `service`. Raises `EngineError` if an image cannot be made."""
    with asyncio.Runner() as runner:
        catalog = runner.run(service.catalog())
        made = count()
        ordered = 0

        def generate(orders: Sequence[VerificationImage]) -> list[RgbImage]:
            nonlocal ordered
            ordered += len(orders)
            return runner.run(_make_all(service, catalog, orders, lambda: say(next(made) + 1, ordered)))

        return verify(generate, load_references(folder), parts=parts, limit=limit)


async def _make_all(
    service: ImageService, catalog: Catalog, orders: Sequence[VerificationImage], tell: Callable[[], None]
) -> list[RgbImage]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def make(index: int, order: VerificationImage) -> RgbImage:
        async with slots:
            result = await finished(service.generate(request_of(order, catalog, f"verify-{index}")))
        tell()
        return result.images[0]

    # Of those that fail the first is told; the runner, which is closed then, ends the others.
    return await asyncio.gather(*(make(index, order) for index, order in enumerate(orders)))


def request_of(order: VerificationImage, catalog: Catalog, request_id: str) -> ImageRequest:
    """Return a request for one image at the server's defaults, except for what `order` specifies."""
    model = catalog.model
    net, image = order.controlnet, order.control_image
    return ImageRequest(
        request_id=request_id,
        prompt=order.prompt,
        width=model.default_width,
        height=model.default_height,
        steps=STEPS,
        guidance_scale=model.default_guidance_scale,
        seed=order.seed,
        scheduler=model.default_scheduler,
        loras=() if order.lora is None else (LoraRef(name=order.lora, scale=1.0),),
        controlnets=() if net is None or image is None else (ControlRef(name=net, image=image),),
    )
