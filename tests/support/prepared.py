"""Models with LoRAs and a ControlNet whose engines run on prepared programs, and diffusers' latents of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_serving.diffusion.families import preparation
from plait_serving.diffusion.knobs import EngineKnobs, Exact, ExecutorName, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraRef
from support.denoise import control_image, make_request, max_difference
from support.engine_probe import Probe, fused_reference, probed
from support.tiny import tiny_controlnet, tiny_lora
from support.waiting import wait_for

CLOSE = 1e-4
"""Largest difference of fp32 latents: what README says of the default."""
CONTROL = (ControlRef(name="edges", image=control_image(1), scale=0.8),)
SETS = {
    "peft": (LoraRef(name="peft", scale=0.9),),
    "kohya": (LoraRef(name="kohya", scale=-0.7),),
    "both": (LoraRef(name="peft", scale=0.5), LoraRef(name="wide", scale=0.6)),
    "text": (LoraRef(name="text", scale=1.1),),
    "conv": (LoraRef(name="conv", scale=0.8),),
    "time": (LoraRef(name="time", scale=0.8),),
}


@dataclass
class Models:
    """A base model, its ControlNet and LoRA files, and where converted models are kept."""

    folder: Path
    base: Path
    controlnets: dict[str, Path]
    references: dict[tuple[str, torch.dtype], torch.Tensor] = field(default_factory=dict)

    @contextmanager
    def started(
        self,
        *,
        converts: bool = False,
        dtype: str = "float32",
        executor: ExecutorName = ExecutorName.AUTO,
        **knobs: Any,
    ) -> Iterator[Probe]:
        """An engine that is stopped in the end. What it converts does not give way: tests would wait for minutes."""
        engine = probed(
            model=self.base, device="cpu", dtype=dtype, lora_source=FolderSource(self.folder / "loras"),
            controlnets=self.controlnets, prepared_folder=self.folder / "prepared", converts=converts,
            executor=executor,
            knobs=EngineKnobs(**{"threads": 1, "controlnet_placement": Placement.LOCAL, **knobs}),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(preparation, "lower_priority", lambda: None)
            with engine as probe:
                yield probe

    def reference(self, asked: ImageRequest, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """diffusers' latents; asked once for each request."""
        key = asked.request_id, dtype
        if key not in self.references:
            self.references[key] = fused_reference(
                self.base, asked, loras=self.folder / "loras", controlnets=self.controlnets, dtype=dtype
            )
        return self.references[key]


def write_models(folder: Path, write_base: Callable[[Path], Path]) -> Models:
    """The models, nothing converted yet."""
    base = write_base(folder / "base")
    files: dict[str, dict[str, Any]] = {
        "peft": {"fmt": "peft", "rank": 4},
        "kohya": {"fmt": "kohya", "rank": 3},
        "wide": {"fmt": "peft", "rank": 11, "seed": 6},
        "text": {"fmt": "kohya", "rank": 5, "with_text_encoder": True, "seed": 7},
        "conv": {"fmt": "kohya", "rank": 2, "conv": True, "seed": 8},
        "time": {"fmt": "kohya", "rank": 2, "time": True, "seed": 9},
    }
    for name, options in files.items():
        tiny_lora(folder / "loras" / f"{name}.safetensors", base, **options)
    return Models(folder, base, {"edges": tiny_controlnet(folder / "edges", base)})


def asked(name: str, **changes: Any) -> ImageRequest:
    """A request of two steps; its name is its seed's and its reference's."""
    return make_request(request_id=name, **{"steps": 2, "seed": sum(name.encode()), "guidance_scale": 3.0, **changes})


def dressed(name: str, **changes: Any) -> ImageRequest:
    """A request with that LoRA set."""
    return asked(f"dressed {name}", loras=SETS[name], **changes)


PLAIN = asked("plain", n=2)
CONTROLLED = asked("controlled", controlnets=CONTROL, loras=SETS["peft"])


def unet_is_mapped(probe: Probe) -> bool:
    """Whether torch's copy of the UNet is the file's float16 bytes."""
    return next(probe.engine.pool.first.stepper.denoiser.bundle.unet.down_blocks.parameters()).dtype is torch.float16


def wait_prepared(probe: Probe, *parts: str) -> None:
    """Block until these run on programs."""
    wait_for(lambda: probe.engine.pool.prepared >= set(parts), 600.0)


@contextmanager
def exactly(probe: Probe) -> Iterator[None]:
    """The knob exact=always, for a while."""
    knobs = probe.engine.knobs
    probe.engine.reconfigure(knobs.model_copy(update={"exact": Exact.ALWAYS}))
    yield
    probe.engine.reconfigure(knobs)


def convert(models: Models) -> Models:
    """A first start: torch serves with the pipeline's bits, programs take over, and torch's weights go."""
    with models.started(converts=True) as first:
        started = first.engine.pool.prepared
        (served,) = first.latents(PLAIN)
        if not started and not first.engine.pool.prepared:
            assert torch.equal(served, models.reference(PLAIN))
        first.latents(CONTROLLED)
        wait_prepared(first, "unet", "vae", "edges")
        (served,) = first.latents(PLAIN)
        assert 0 < max_difference(served, models.reference(PLAIN)) < CLOSE
        assert unet_is_mapped(first)
    return models
