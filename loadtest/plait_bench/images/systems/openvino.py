"""The OpenVINO peer: optimum-intel's Stable Diffusion pipelines, with static shapes.

Runs in an environment of its own (`environment`), and so imports nothing of plait outside of this package. A model is
exported once, from the same folder that all systems load.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDIMScheduler
from optimum.intel import OVStableDiffusionPipeline, OVStableDiffusionXLPipeline
from safetensors.torch import load_file, save_file

from plait_bench.cache import cache_folder
from plait_bench.errors import BenchError
from plait_bench.fleet.values import Item, ItemOutcome
from plait_bench.images.models import ModelFolder
from plait_bench.images.pixels import encode
from plait_bench.images.sizes import DTypeName
from plait_bench.images.workloads import ImageSpec

__all__ = ["OpenVinoPipeline"]

_PRECISION = {"float32": "f32", "bfloat16": "bf16"}
_TEXT_PREFIX = "text_model."


class OpenVinoPipeline:
    """A `FleetWorker` over one exported model, compiled for one batch size, image size and number of threads."""

    def __init__(self, models: ModelFolder, *, dtype: DTypeName, cache: str, edge: int | None) -> None:
        """Export the model unless that has been done, and compile it for one image. Raises `BenchError`."""
        self._precision = _PRECISION[dtype]
        index = json.loads((models.base / "model_index.json").read_text(encoding="utf-8"))
        xl = "XL" in index["_class_name"]
        self._kind: Any = OVStableDiffusionXLPipeline if xl else OVStableDiffusionPipeline
        root = Path(cache) if cache else cache_folder()
        self._folder = self._export(models.base, root / "openvino-models" / _key(models.base))
        self._threads, self._is_batched = os.cpu_count() or 1, False
        self._compiled: tuple[int, int, int] | None = None
        self._pipeline: Any = None
        self._ready(1, edge)

    def configure(self, *, threads: int, variant: str) -> None:
        """Set threads, and whether equal orders are one call."""
        self._threads, self._is_batched = threads, variant == "batched"

    def run(self, items: Sequence[Item], *, one_by_one: bool, keep: bool) -> list[ItemOutcome]:
        """Make the calls."""
        orders = [ImageSpec.from_json(item) for item in items]
        together = self._is_batched and not one_by_one
        outcomes: list[ItemOutcome] = []
        for call in [orders] if together else [[order] for order in orders]:
            images = self._draw(call)
            now_s = time.monotonic()
            outcomes += [ItemOutcome(finished_s=now_s, result=encode(image) if keep else None) for image in images]
        return outcomes

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _draw(self, orders: Sequence[ImageSpec]) -> list[Any]:
        first = orders[0]
        if first.scheduler != "ddim" or first.loras or first.control:
            raise BenchError("the openvino system draws with ddim, without LoRAs and ControlNets")
        pipeline, edge = self._ready(len(orders), first.edge)
        made = pipeline(
            prompt=[order.prompt for order in orders],
            num_inference_steps=first.steps,
            guidance_scale=first.guidance,
            width=edge,
            height=edge,
            generator=[torch.Generator("cpu").manual_seed(order.seed) for order in orders],
        )
        return [np.asarray(image.convert("RGB")) for image in made.images]

    def _ready(self, batch: int, edge: int | None) -> tuple[Any, int]:
        """Return the pipeline compiled for a batch and an edge, and the edge."""
        if self._pipeline is None:
            self._pipeline = self._load()
            self._pipeline.scheduler = DDIMScheduler.from_config(self._pipeline.scheduler.config)
            self._pipeline.set_progress_bar_config(disable=True)
        edge = edge or int(self._pipeline.unet.config["sample_size"]) * self._pipeline.vae_scale_factor
        wanted = (batch, edge, self._threads)
        if self._compiled != wanted:
            if self._compiled is not None:  # a static shape cannot be widened again
                self._pipeline = None
                self._compiled = None
                return self._ready(batch, edge)
            self._pipeline.reshape(batch_size=batch, height=edge, width=edge, num_images_per_prompt=1)
            _widen(self._pipeline.vae_decoder.model, batch)
            self._pipeline.compile()
            self._compiled = wanted
        return self._pipeline, edge

    def _load(self) -> Any:
        config = {
            "INFERENCE_PRECISION_HINT": self._precision,
            "INFERENCE_NUM_THREADS": str(self._threads),
            "NUM_STREAMS": "1",
            "PERFORMANCE_HINT": "LATENCY",
        }
        return self._kind.from_pretrained(self._folder, compile=False, device="CPU", ov_config=config)

    def _export(self, base: Path, folder: Path) -> Path:
        """Return the folder of the exported model."""
        if (folder / "model_index.json").is_file():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            if (folder / "model_index.json").is_file():  # another worker was faster
                return folder
            source, made = Path(scratch) / "source", Path(scratch) / "made"
            _copy_links(base, source)
            pipeline = self._kind.from_pretrained(source, export=True, compile=False, load_in_8bit=False)
            pipeline.save_pretrained(made)
            del pipeline
            made.rename(folder)
        return folder


def _widen(decoder: Any, batch: int) -> None:
    """Set a decoder's batch size, which `reshape` leaves at the number of images of one prompt."""
    shape = decoder.input(0).partial_shape
    shape[0] = batch
    decoder.reshape(shape)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: exporting takes the memory of several copies of a model."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
