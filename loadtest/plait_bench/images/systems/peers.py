"""The peers: diffusers as its documentation uses it, and as a careful user would. All calls of its pipelines are here.

* `stock`: the pipeline, with PEFT's `load_lora_weights` and unload for each request, in arrival order.
* `fair`: ControlNets resident, LoRA sets merged into the weights from memory, requests sorted by LoRA set, warm.
* `batched`: one pipeline call for all requests, where they agree in everything but prompt and seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import (
    AutoPipelineForText2Image,
    ControlNetModel,
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.utils import logging
from PIL import Image

from plait_bench.errors import BenchError, SystemUnavailable
from plait_bench.fleet.values import Item, ItemOutcome
from plait_bench.images.drawings import control_map
from plait_bench.images.models import ModelFolder
from plait_bench.images.pixels import encode
from plait_bench.images.sizes import DeviceName, DTypeName
from plait_bench.images.systems.merging import MergedLoras, read_factors
from plait_bench.images.workloads import ImageSpec

_COMPILE_MODE = "reduce-overhead"
"""CUDA graphs around what inductor makes; "max-autotune" takes a quarter of an hour for SDXL."""

ImageArray = npt.NDArray[np.uint8]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddim": (DDIMScheduler, {}),
    "euler": (EulerDiscreteScheduler, {}),
    "dpmpp_2m": (DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    "unipc": (UniPCMultistepScheduler, {}),
}


class Pipelines:
    """One base model in one dtype with its ControlNets resident, and a pipeline for each way to call it."""

    def __init__(self, models: ModelFolder, dtype: DTypeName, device: DeviceName) -> None:
        logging.disable_progress_bar()
        self.plain: Any = DiffusionPipeline.from_pretrained(
            models.base, dtype=_DTYPES[dtype], local_files_only=True, use_safetensors=True
        ).to(device)
        if getattr(self.plain, "safety_checker", None) is not None:
            raise BenchError("the benchmarks compare models without a safety checker")
        self._schedule = dict(self.plain.scheduler.config)
        self.controlled: dict[str, Any] = {}
        for name, folder in models.controlnets.items():
            net: Any = ControlNetModel.from_pretrained(folder, dtype=_DTYPES[dtype], local_files_only=True)
            self.controlled[name] = AutoPipelineForText2Image.from_pipe(self.plain, controlnet=net.eval().to(device))
        for pipeline in (self.plain, *self.controlled.values()):
            pipeline.set_progress_bar_config(disable=True)
        self._is_compiled = False
        self._own_edge = int(self.plain.unet.config.sample_size) * self.plain.vae_scale_factor

    def draw(self, orders: Sequence[ImageSpec]) -> list[ImageArray]:
        """Make all `orders` in one call; they agree in everything but prompt and seed (and the control drawing)."""
        first = orders[0]
        edge = first.edge or self._own_edge
        pipeline, extra = self.plain, {}
        if first.control is not None:
            name = first.control[0]
            pipeline = self.controlled[name]
            drawings = [order.control[1] for order in orders if order.control is not None]
            extra = {"image": [Image.fromarray(control_map(name, i, edge, edge)) for i in drawings]}
        kind, overrides = _SCHEDULERS[first.scheduler]
        pipeline.scheduler = kind.from_config({**self._schedule, **overrides})
        made = pipeline(
            prompt=[order.prompt for order in orders],
            width=edge,
            height=edge,
            num_inference_steps=first.steps,
            guidance_scale=first.guidance,
            generator=[torch.Generator("cpu").manual_seed(order.seed) for order in orders],
            **extra,
        )
        return [np.asarray(image.convert("RGB")) for image in made.images]

    def set_memory_format(self, memory_format: torch.memory_format) -> None:
        """Set the memory format of the UNet, the VAE and the ControlNets."""
        modules = [self.plain.unet, self.plain.vae, *(pipeline.controlnet for pipeline in self.controlled.values())]
        for module in modules:
            module.to(memory_format=memory_format)

    def compile(self) -> None:
        """Compile the UNet, the VAE's decoder and the ControlNets, as diffusers' documentation says for GPUs; once."""
        if not self._is_compiled:
            self._is_compiled = True
            for module in (self.plain.unet, *(pipeline.controlnet for pipeline in self.controlled.values())):
                module.compile(fullgraph=True, mode=_COMPILE_MODE)
            self.plain.vae.decode = torch.compile(self.plain.vae.decode, fullgraph=True, mode=_COMPILE_MODE)


class DiffusersSubject:
    """A `FleetWorker` over diffusers: orders are grouped into calls, each of which runs inside `with_loras`."""

    def __init__(
        self,
        pipelines: Pipelines,
        with_loras: Callable[[ImageSpec], Any],
        calls: Callable[[list[ImageSpec]], list[list[int]]],
    ) -> None:
        self._pipelines = pipelines
        self._with_loras = with_loras
        self._calls = calls

    def configure(self, *, threads: int, variant: str) -> None:
        """Set threads and the memory format, which is the variant; "compiled" is channels-last, too, and stays."""
        torch.set_num_threads(threads)
        self._pipelines.set_memory_format(torch.channels_last if variant else torch.contiguous_format)
        if variant == "compiled":
            self._pipelines.compile()

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[ItemOutcome]:
        """Make the calls; one by one, every order is a call of its own."""
        orders = [ImageSpec.from_json(item) for item in items]
        calls = [[i] for i in range(len(orders))] if one_by_one else self._calls(orders)
        outcomes: dict[int, ItemOutcome] = {}
        with torch.inference_mode():
            for call in calls:
                with self._with_loras(orders[call[0]]):
                    images = self._pipelines.draw([orders[i] for i in call])
                now_s = time.monotonic()
                for i, image in zip(call, images, strict=True):
                    outcomes[i] = ItemOutcome(finished_s=now_s, result=encode(image) if keep else None)
        return [outcomes[i] for i in range(len(orders))]

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


def stock(models: ModelFolder, dtype: DTypeName, device: DeviceName) -> DiffusersSubject:
    """Build the `stock` peer (see the module docstring). Raises `SystemUnavailable` without PEFT."""
    _need_peft("diffusers")
    pipelines = Pipelines(models, dtype, device)

    @contextmanager
    def with_loras(order: ImageSpec) -> Iterator[None]:
        if not order.loras:
            yield
            return
        names = [f"lora{i}" for i in range(len(order.loras))]
        for adapter, (name, _) in zip(names, order.loras, strict=True):
            path = models.loras[name]
            pipelines.plain.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=adapter)
        pipelines.plain.set_adapters(names, [scale for _, scale in order.loras])
        yield
        pipelines.plain.unload_lora_weights()

    return DiffusersSubject(pipelines, with_loras, _arrival)


def fair(models: ModelFolder, dtype: DTypeName, device: DeviceName) -> DiffusersSubject:
    """Build the `fair` peer (see the module docstring). Raises `SystemUnavailable` without PEFT, which reads the LoRA
    files once, at the start."""
    _need_peft("diffusers_fair")
    return _merging(models, dtype, device, _arrival)


def batched(models: ModelFolder, dtype: DTypeName, device: DeviceName) -> DiffusersSubject:
    """Build the `batched` peer (see the module docstring). Raises `SystemUnavailable` without PEFT."""
    _need_peft("diffusers_batched")
    return _merging(models, dtype, device, _all_at_once)


def _merging(
    models: ModelFolder, dtype: DTypeName, device: DeviceName, calls: Callable[[list[ImageSpec]], list[list[int]]]
) -> DiffusersSubject:
    pipelines = Pipelines(models, dtype, device)
    merged = MergedLoras({name: read_factors(pipelines.plain, path) for name, path in models.loras.items()})

    @contextmanager
    def with_loras(order: ImageSpec) -> Iterator[None]:
        merged.switch(order.loras)
        yield

    return DiffusersSubject(pipelines, with_loras, calls)


def _arrival(orders: list[ImageSpec]) -> list[list[int]]:
    """Return one call for each order, in the order of the share (`sharing.in_runs` has sorted it by LoRA set)."""
    return [[i] for i in range(len(orders))]


def _all_at_once(orders: list[ImageSpec]) -> list[list[int]]:
    return [list(range(len(orders)))]


def _need_peft(system: str) -> None:
    try:
        import peft  # noqa: F401 - only whether it is there
    except ImportError:
        raise SystemUnavailable(f"{system} needs PEFT to read LoRA files: pip install 'plait[dev]'") from None
