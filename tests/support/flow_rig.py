"""An engine on a tiny Stable Diffusion 3 or FLUX.1 with LoRAs, beside diffusers' pipelines on the same files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait_serving.diffusion.knobs import EngineKnobs, Exact, ExecutorName
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import Event, Finished, ImageRequest, Scheduler
from support.engine import Watch
from support.engine_probe import Probe, probed
from support.tiny import IMAGE_SIZE
from support.tiny_flow import FlowReference, tiny_flow_lora, tiny_flux, tiny_sd3

MAKE = {
    "sd3": tiny_sd3,
    "sd3-without-t5": lambda folder: tiny_sd3(folder, t5=False),
    "dev": tiny_flux,
    "schnell": lambda folder: tiny_flux(folder, guidance=False),
    "kontext": lambda folder: tiny_flux(folder, kontext=True),
    "de-distilled": lambda folder: tiny_flux(folder, guidance_embeds=False),
}


@dataclass
class FlowRig:
    """A probe on a model, and diffusers on the same."""

    name: str
    probe: Probe
    reference: FlowReference

    def ask(self, seed: int, **more: Any) -> ImageRequest:
        """A small request with defaults that the model takes."""
        fields: dict[str, Any] = {
            "request_id": f"r{seed}", "prompt": "a red cat", "width": IMAGE_SIZE, "height": IMAGE_SIZE, "steps": 4,
            "guidance_scale": 0.0 if self.name in ("schnell", "de-distilled") else 3.5, "seed": seed,
            "scheduler": Scheduler.EULER, "max_sequence_length": 24, **more,
        }  # fmt: skip
        return ImageRequest(**fields)

    def images(self, *requests: ImageRequest) -> list[np.ndarray]:
        """All at once (they wait for each other); the first image of each request."""
        found: dict[str, np.ndarray] = {}

        def keep(event: Any) -> None:
            if isinstance(event, Finished):
                found[event.result.request_id] = event.result.images[0]

        self.probe.latents(*requests, on_event=keep)
        return [found[one.request_id] for one in requests]

    def events(self, request: ImageRequest) -> list[Event]:
        """What the request is told, to its end."""
        watch = Watch(self.probe.engine, request)
        watch.end()
        return watch.events


@pytest.fixture(scope="module")
def flow_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``flow_rig(name)``: the model with LoRAs "one", "two" (of other ranks and layers), "text" and "dora"."""
    rigs: dict[str, FlowRig] = {}

    def rig_of(
        name: str, *, dtype: str = "float32", executor: str = "auto", exact: str = "never", apart: bool = False
    ) -> FlowRig:
        key = f"{name}-{dtype}-{executor}-{exact}-{apart}"
        if key not in rigs:
            folder = MAKE[name](tmp_path_factory.mktemp("models") / key)
            loras = write_loras(folder, tmp_path_factory.mktemp("loras"))
            engine = probed(
                model=folder, device="cpu", dtype=dtype, lora_source=FolderSource(loras),
                executor=ExecutorName(executor), knobs=EngineKnobs(threads=1, exact=Exact(exact)),
            )  # fmt: skip
            reference = FlowReference(folder, loras, getattr(torch, dtype))
            rigs[key] = FlowRig(name, stack.enter_context(engine), reference)
        return rigs[key]

    with ExitStack() as stack:
        yield rig_of


def write_loras(folder: Path, loras: Path) -> Path:
    """Writes the LoRAs of a model into a folder, and returns that."""
    tiny_flow_lora(loras / "one.safetensors", folder, rank=3)
    tiny_flow_lora(loras / "two.safetensors", folder, rank=9, seed=7, only="attn")
    tiny_flow_lora(loras / "text.safetensors", folder, rank=2, seed=8, text=True, strength=0.8, only="attn")
    tiny_flow_lora(loras / "dora.safetensors", folder, rank=2, seed=9, dora=True, only="attn")
    return loras
