"""The starter models' figures, measured over the server's own engine and its own defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait_serving.diffusion.errors import EngineError
from plait_serving.diffusion.values import ControlRef, Failed, Finished, ImageRequest, LoraRef, RgbImage
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
from plait_serving.starter.verify import PARTS, VerificationImage, verify

# Enough for full batches, few enough for any queue.
AT_ONCE = 32

Say = Callable[[int, int], None]
"""Told how many pictures are made, of how many so far asked for."""


def section_of(folder: Path) -> ImagesSection:
    """The configuration of a folder that is laid out as the starter's: ``emoji/``, ``controlnets/``, ``loras/``."""
    nets = sorted(path.parent for path in folder.glob("controlnets/*/config.json"))
    return ImagesSection(
        model=str((folder / "emoji").resolve()),
        loras=LorasSection(folder=folder / "loras"),
        controlnets={net.name: ControlNetSection(folder=net, preprocessor=net.name) for net in nets},
        defaults=DefaultsSection(guidance_scale=STARTER_GUIDANCE),
    )


def parse_parts(names: Sequence[str] | None) -> tuple[str, ...]:
    """The parts to measure; all of them if none are named. Raises ValueError for an unknown one."""
    unknown = sorted(set(names or ()) - PARTS.keys())
    if unknown:
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return tuple(names or PARTS)


def check_files(folder: Path) -> None:
    """Raises PlaitError unless every file is there and as the manifest says."""
    problems = manifest_problems(folder)
    if problems:
        raise PlaitError(f"{folder}: {'; '.join(problems[:5])}" + (" ..." if len(problems) > 5 else ""))


def measure(
    service: ImageService, folder: Path, *, parts: Sequence[str], limit: int | None, say: Say
) -> dict[str, Any]:
    """Runs ``starter.verify`` with pictures from ``service``. Raises EngineError if a picture can not be made."""
    with asyncio.Runner() as runner:
        catalog = runner.run(service.catalog())
        made = asked = 0

        def tell() -> None:
            nonlocal made
            made += 1
            say(made, asked)

        def generate(asks: Sequence[VerificationImage]) -> list[RgbImage]:
            nonlocal asked
            asked += len(asks)
            return runner.run(_make_all(service, catalog, asks, tell))

        return verify(generate, load_references(folder), parts=parts, limit=limit)


async def _make_all(
    service: ImageService, catalog: Catalog, asks: Sequence[VerificationImage], tell: Callable[[], None]
) -> list[RgbImage]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def make(index: int, ask: VerificationImage) -> RgbImage:
        async with slots:
            image = await _make(service, request_of(ask, catalog, f"verify-{index}"))
        tell()
        return image

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(make(index, ask)) for index, ask in enumerate(asks)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors  # the first to fail; the group has stopped the others
    return [task.result() for task in tasks]


async def _make(service: ImageService, request: ImageRequest) -> RgbImage:
    events = service.generate(request)
    try:
        async for event in events:
            if isinstance(event, Finished):
                return event.result.images[0]
            if isinstance(event, Failed):
                raise event.error
    finally:
        await events.aclose()
    raise EngineError("the engine ended without a result")


def request_of(ask: VerificationImage, catalog: Catalog, request_id: str) -> ImageRequest:
    """One picture at the server's defaults, except for what ``ask`` names."""
    model = catalog.model
    controls: tuple[ControlRef, ...] = ()
    if ask.controlnet is not None and ask.control_image is not None:
        controls = (ControlRef(name=ask.controlnet, image=ask.control_image),)
    return ImageRequest(
        request_id=request_id,
        prompt=ask.prompt,
        width=model.default_width,
        height=model.default_height,
        steps=ask.steps,
        guidance_scale=model.default_guidance_scale,
        seed=ask.seed,
        scheduler=model.default_scheduler,
        loras=() if ask.lora is None else (LoraRef(name=ask.lora, scale=ask.lora_scale),),
        controlnets=controls,
    )
