"""The peers, inside a worker process: diffusers as its documentation uses it, and as a careful user would, and
optimum-intel's OpenVINO pipelines with static shapes.

* `stock`: the pipeline, with PEFT's `load_lora_weights` and unload for each request, in arrival order.
* `fair`: ControlNets resident, LoRA sets merged into the weights from memory, requests sorted by LoRA set, warm.
* `batched`: one pipeline call for all requests, where they agree in everything but prompt and seed.
* OpenVINO runs in an environment of its own (`images.interpreter`), so this file imports nothing of plait outside of
  this package. A model is exported once, from the same folder that all systems load.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
from safetensors.torch import load_file, save_file

from plait_bench.benchmark import cache_folder
from plait_bench.images.fleet import FleetWorker
from plait_bench.images.orders import ImageArray, ImageSpec, ModelFolder, control_map

_COMPILE_MODE = "reduce-overhead"
"""CUDA graphs around what inductor makes; "max-autotune" takes a quarter of an hour for SDXL."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddim": (DDIMScheduler, {}),
    "euler": (EulerDiscreteScheduler, {}),
    "dpmpp_2m": (DPMSolverMultistepScheduler, {"algorithm_type": "dpmsolver++", "solver_order": 2}),
    "unipc": (UniPCMultistepScheduler, {}),
}


class Pipelines:
    """One base model in one dtype with its ControlNets resident, and a pipeline for each way to call it."""

    def __init__(self, models: ModelFolder, dtype: str, device: str) -> None:
        logging.disable_progress_bar()
        index = json.loads((models.base / "model_index.json").read_text(encoding="utf-8"))
        absent = {
            name: None for name, kind in index.items() if kind == [None, None]
        }  # which diffusers wants to be told
        self.plain: Any = DiffusionPipeline.from_pretrained(
            models.base, dtype=_DTYPES[dtype], local_files_only=True, use_safetensors=True, **absent
        ).to(device)
        self._schedule = dict(self.plain.scheduler.config)
        self.controlled: dict[str, Any] = {}
        for name, folder in models.controlnets.items():
            net: Any = ControlNetModel.from_pretrained(folder, dtype=_DTYPES[dtype], local_files_only=True)
            self.controlled[name] = AutoPipelineForText2Image.from_pipe(self.plain, controlnet=net.eval().to(device))
        for pipeline in (self.plain, *self.controlled.values()):
            pipeline.set_progress_bar_config(disable=True)
        nets = [pipeline.controlnet for pipeline in self.controlled.values()]
        steps = getattr(self.plain, "transformer", None) or self.plain.unet
        self.modules: list[Any] = [steps, self.plain.vae.decoder, *nets]

    def draw(self, orders: Sequence[ImageSpec]) -> list[ImageArray]:
        """Make all `orders` in one call; they agree in everything but prompt and seed (and the control drawing)."""
        first = orders[0]
        pipeline, extra = self.plain, {}
        if first.control is not None:
            pipeline = self.controlled[first.control[0]]
            drawings = [order.control[1] for order in orders if order.control is not None]
            extra = {"image": [Image.fromarray(control_map(number, first.edge)) for number in drawings]}
        kind, overrides = _SCHEDULERS[first.scheduler]
        if "FlowMatch" in type(pipeline.scheduler).__name__:
            kind = type(pipeline.scheduler)
        pipeline.scheduler = kind.from_config({**self._schedule, **overrides})
        return _drawn(pipeline, orders, **extra)


def _drawn(pipeline: Any, orders: Sequence[ImageSpec], **more: Any) -> list[ImageArray]:
    made = pipeline(
        prompt=[order.prompt for order in orders],
        width=orders[0].edge,
        height=orders[0].edge,
        num_inference_steps=orders[0].steps,
        guidance_scale=orders[0].guidance,
        generator=[torch.Generator("cpu").manual_seed(order.seed) for order in orders],
        **more,
    )
    return [np.asarray(image.convert("RGB")) for image in made.images]


class Diffusers(FleetWorker):
    """diffusers, in one of the ways of the module docstring. PEFT reads the LoRA files: for the stock way with each
    request, else once."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Load the model. `variant` is how modules compute: as they are, channels last, or compiled as diffusers'
        documentation says, which is channels last, too, where there are convolutions."""
        self._way = settings["way"]
        self._models: ModelFolder = settings["models"]
        self._pipelines = Pipelines(self._models, settings["dtype"], settings["device"])
        loras = {} if self._way == "stock" else self._models.loras
        self._merged = MergedLoras({name: read_factors(self._pipelines.plain, path) for name, path in loras.items()})
        torch.set_num_threads(settings["threads"])
        for module in self._pipelines.modules:
            if settings["variant"] and not settings["is_transformer"]:
                module.to(memory_format=torch.channels_last)
            if settings["variant"] == "compiled":
                module.compile(fullgraph=True, mode=_COMPILE_MODE if settings["device"] == "cuda" else None)

    def run(self, items: Sequence[ImageSpec], *, one_by_one: bool, keep: bool) -> list[ImageArray]:
        """Make the images, each in a call of its own, in the order of the share (`in_runs` has sorted it by LoRA set);
        batched, all in one."""
        images: list[ImageArray] = []
        with torch.inference_mode():
            for call in [items] if self._way == "batched" and not one_by_one else [[order] for order in items]:
                with self._with_loras(call[0]):
                    images += self._pipelines.draw(call)
        return images if keep else []

    @contextmanager
    def _with_loras(self, order: ImageSpec) -> Iterator[None]:
        if self._way != "stock" or not order.loras:
            self._merged.switch(order.loras)  # of the stock way nothing is ever merged
            yield
            return
        plain, names = self._pipelines.plain, [f"lora{i}" for i in range(len(order.loras))]
        for adapter, (name, _) in zip(names, order.loras, strict=True):
            path = self._models.loras[name]
            plain.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name=adapter)
        plain.set_adapters(names, [scale for _, scale in order.loras])
        yield
        plain.unload_lora_weights()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factors:
    """One LoRA's part in one weight: `down (r, in, ...)`, `up (out, r, ...)`, `c = alpha / r`."""

    weight: torch.nn.Parameter
    down: torch.Tensor
    up: torch.Tensor
    c: float

    def delta(self) -> torch.Tensor:
        """Compute `c * up @ down` in the weight's shape."""
        return self.c * (self.up.float().flatten(1) @ self.down.float().flatten(1)).reshape(self.weight.shape)


def read_factors(pipeline: Any, path: Path) -> list[Factors]:
    """Load a LoRA file through PEFT and copy the factors out of its layers; the pipeline is left unchanged."""
    from peft.tuners.lora import LoraLayer

    pipeline.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="lora")
    found: list[Factors] = []
    for part in pipeline.components.values():
        layers = part.modules() if isinstance(part, torch.nn.Module) else ()
        found += [_factors(layer) for layer in layers if isinstance(layer, LoraLayer) and "lora" in layer.lora_A]
    pipeline.unload_lora_weights()
    return found


def _factors(layer: Any) -> Factors:
    """Return the factors of the adapter `lora` in one of PEFT's layers."""
    return Factors(
        weight=layer.get_base_layer().weight,
        down=layer.lora_A["lora"].weight.detach().clone(),
        up=layer.lora_B["lora"].weight.detach().clone(),
        c=float(layer.scaling["lora"]),
    )


class MergedLoras:
    """Keeps the weights equal to the pristine ones plus one set, merged in place, as a careful user of diffusers would
    write it: W <- W0 + sum_i s_i * c_i * B_i @ A_i, with c_i = alpha_i / r_i and W0 a pristine copy; the sum is taken
    in fp32. It deliberately shares no code with our merge, so that equal images are evidence."""

    def __init__(self, loras: Mapping[str, Sequence[Factors]]) -> None:
        self._loras = loras
        touched = {id(factors.weight): factors.weight for lora in loras.values() for factors in lora}
        self._weights = touched
        self._pristine = {key: weight.detach().clone() for key, weight in touched.items()}
        self._live: tuple[tuple[str, float], ...] = ()

    @torch.no_grad()
    def switch(self, target: tuple[tuple[str, float], ...]) -> None:
        """Make `target` live; do nothing if it already is."""
        if target == self._live:
            return
        sums: dict[int, torch.Tensor] = {}
        for name, scale in target:
            for factors in self._loras[name]:
                key = id(factors.weight)
                sums[key] = sums.get(key, self._pristine[key].float()) + scale * factors.delta()
        for name, _ in self._live:
            for factors in self._loras[name]:
                sums.setdefault(id(factors.weight), self._pristine[id(factors.weight)])
        for key, value in sums.items():
            self._weights[key].copy_(value)
        self._live = target


_PRECISION = {"float32": "f32", "bfloat16": "bf16"}
_TEXT_PREFIX = "text_model."


class OpenVino(FleetWorker):
    """optimum-intel's pipeline of one exported model, compiled for one batch size, and images of the one edge."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Export the model unless that has been done. `cache` holds the exports, the benchmarks' own if empty."""
        from optimum.intel import OVStableDiffusionPipeline, OVStableDiffusionXLPipeline

        models, cache = settings["models"], settings.get("cache")
        self._precision = _PRECISION[settings["dtype"]]
        index = json.loads((models.base / "model_index.json").read_text(encoding="utf-8"))
        xl = "XL" in index["_class_name"]
        self._kind: Any = OVStableDiffusionXLPipeline if xl else OVStableDiffusionPipeline
        root = Path(cache) if cache else cache_folder()
        self._folder = self._export(models.base, root / "openvino-models" / _key(models.base))
        self._edge, self._threads, self._batch = settings["edge"], settings["threads"], 0
        self._is_batched = settings["variant"] == "batched"  # equal orders are one call
        self._pipeline: Any = None

    def run(self, items: Sequence[ImageSpec], *, one_by_one: bool, keep: bool) -> list[ImageArray]:
        """Make the calls."""
        batch = len(items) if self._is_batched and not one_by_one else 1
        if batch != self._batch:
            self._compile(batch)
        calls = [items[at : at + batch] for at in range(0, len(items), batch)]
        images = [image for call in calls for image in _drawn(self._pipeline, call)]
        return images if keep else []

    def _compile(self, batch: int) -> None:
        """Compile for a batch: a static shape cannot be widened again."""
        self._pipeline, self._batch = None, batch
        config = {
            "INFERENCE_PRECISION_HINT": self._precision,
            "INFERENCE_NUM_THREADS": str(self._threads),
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
        self._pipeline = pipeline = self._kind.from_pretrained(
            self._folder, compile=False, device="CPU", ov_config=config
        )
        pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.reshape(batch_size=batch, height=self._edge, width=self._edge, num_images_per_prompt=1)
        shape = pipeline.vae_decoder.model.input(0).partial_shape
        shape[0] = batch  # `reshape` leaves it at the number of images of one prompt
        pipeline.vae_decoder.model.reshape(shape)
        pipeline.compile()

    def _export(self, base: Path, folder: Path) -> Path:
        """Return the folder of the exported model."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fcntl.flock(lock, fcntl.LOCK_EX)  # exporting takes the memory of several copies of a model
            if (folder / "model_index.json").is_file():
                return folder
            source, made = Path(scratch) / "source", Path(scratch) / "made"
            _copy_links(base, source)
            pipeline = self._kind.from_pretrained(source, export=True, compile=False, load_in_8bit=False)
            pipeline.save_pretrained(made)
            del pipeline
            made.rename(folder)
        return folder


def _key(base: Path) -> str:
    """Return a name for the exports of a model folder: where it is, and what its files look like."""
    files = sorted(path for path in base.rglob("*") if path.is_file())
    facts = [str(base.resolve()), *(f"{path.relative_to(base)} {path.stat().st_size}" for path in files)]
    return f"{base.name}-{hashlib.sha256(chr(10).join(facts).encode()).hexdigest()[:12]}"


def _copy_links(base: Path, into: Path) -> None:
    """Link all files of a model. Text encoders saved by a newer transformers get the key names of this one."""
    for path in sorted(base.rglob("*")):
        target = into / path.relative_to(base)
        if path.is_dir():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        is_text = path.parent.name.startswith("text_encoder") and path.suffix == ".safetensors"
        tensors = load_file(path) if is_text else {}
        if is_text and not any(name.startswith(_TEXT_PREFIX) for name in tensors):
            own = {"text_projection.weight"}
            save_file(
                {name if name in own else _TEXT_PREFIX + name: tensor for name, tensor in tensors.items()},
                target,
                metadata={"format": "pt"},
            )
        else:
            target.symlink_to(path.resolve())
