"""Small requests, a denoiser's call without an engine, and diffusers' answers to compare with."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import ControlNetModel
from PIL import Image

from plait_kernels.executors import MODULES
from plait_serving.diffusion.protocols import ActiveControl, Conditioning, ControlNetClient, Denoiser, StepCall
from plait_serving.diffusion.values import ControlRef, Edit, ImageRequest, Scheduler

SCHEDULER_CLASSES = {
    Scheduler.DDIM: diffusers.DDIMScheduler,
    Scheduler.DDPM: diffusers.DDPMScheduler,
    Scheduler.EULER: diffusers.EulerDiscreteScheduler,
    Scheduler.EULER_A: diffusers.EulerAncestralDiscreteScheduler,
    Scheduler.HEUN: diffusers.HeunDiscreteScheduler,
    Scheduler.LMS: diffusers.LMSDiscreteScheduler,
    Scheduler.DPMPP_2M_SDE: diffusers.DPMSolverMultistepScheduler,
    Scheduler.DPMPP_SDE: diffusers.DPMSolverSDEScheduler,
    Scheduler.DPMPP_2M: diffusers.DPMSolverMultistepScheduler,
    Scheduler.UNIPC: diffusers.UniPCMultistepScheduler,
    Scheduler.LCM: diffusers.LCMScheduler,
}


def make_request(**changes: Any) -> ImageRequest:
    """A small request; ``changes`` override its fields."""
    fields: dict[str, Any] = {
        "request_id": "r", "prompt": "a red apple and a cat", "width": 32, "height": 32, "steps": 4,
        "guidance_scale": 5.0, "seed": 7, "scheduler": Scheduler.DDIM,
    }  # fmt: skip
    return ImageRequest(**{**fields, **changes})


def control_image(seed: int, side: int = 32) -> np.ndarray:
    """A random ``uint8 (side, side, 3)`` image."""
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def _mask() -> np.ndarray:
    """Its edge is no multiple of a latent, with grey values on both sides of a half in rows that latents are taken
    from."""
    found = np.zeros((32, 32), np.uint8)
    found[5:22, 3:18] = 255
    found[22:24, 3:18] = 127
    found[24:26, 3:18] = 128
    return found


IMAGE, MASK = control_image(5), _mask()
EDITS = {
    "img2img": Edit(image=IMAGE, strength=0.7),
    "inpaint": Edit(image=IMAGE, mask=MASK, strength=0.7),
    "anew": Edit(image=IMAGE, mask=MASK, strength=1.0),
}


def prepared(encoder: Any, request: ImageRequest) -> Conditioning:
    """The prompts, encoded at once by a denoiser or a `PromptEncoder`."""
    encoding = encoder.begin(request)
    while (found := encoding.advance()) is None:
        pass
    return found


def first_call(
    denoiser: Denoiser, request: ImageRequest, clients: Mapping[str, ControlNetClient] | None = None
) -> StepCall:
    """A request's part of its first denoiser call."""
    sampler = denoiser.sampler(request, request.seeds)
    conditioning = prepared(denoiser, request)
    controls = []
    for ref in request.controlnets:
        client = (clients or {})[ref.name]
        session = client.open(image=ref.image, conditioning=conditioning, width=request.width, height=request.height)
        controls.append(ActiveControl(client=client, session=session, scale=ref.scale))
    return StepCall(
        request=request,
        conditioning=conditioning,
        sample=sampler.scale_input(sampler.init_latents(), 0),
        timestep=sampler.timesteps[0],
        controls=tuple(controls),
    )


@lru_cache(maxsize=8)
def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The folder's own pipeline, whose parts all others of it share."""
    index = json.loads((folder / "model_index.json").read_text())
    # diffusers wants to be told what the folder says is not there.
    absent = {part: None for part, kind in index.items() if kind == [None, None]}
    with MODULES:  # an engine may convert behind
        return getattr(diffusers, index["_class_name"]).from_pretrained(folder, dtype=dtype, **absent)


def pipeline_of(name: str, folder: Path, dtype: torch.dtype, **parts: Any) -> Any:
    """A stock pipeline of that name on a folder, with these parts in place of the folder's."""
    own, kind = _loaded(folder, dtype), getattr(diffusers, name)
    wanted = {**own.config, **own.components, **parts}
    pipeline = kind(**{part: it for part, it in wanted.items() if part in inspect.signature(kind).parameters})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def reference_pipeline(
    folder: Path,
    scheduler: Scheduler | None,
    controlnets: Sequence[Path] = (),
    dtype: torch.dtype = torch.float32,
    edits: str = "",
) -> Any:
    """A stock pipeline with that scheduler (None: the folder's own) and those ControlNets; ``edits``: "Img2Img" or
    "Inpaint"."""
    is_xl = (folder / "text_encoder_2").is_dir()
    name = f"StableDiffusion{'XL' if is_xl else ''}{'ControlNet' if controlnets else ''}{edits}Pipeline"
    extra: dict[str, Any] = {} if is_xl else {"safety_checker": None}
    if controlnets:
        with MODULES:
            nets = [ControlNetModel.from_pretrained(path, torch_dtype=dtype) for path in controlnets]
        extra["controlnet"] = nets if len(nets) > 1 else nets[0]
    pipeline = pipeline_of(name, folder, dtype, **extra)
    if scheduler is not None:
        pipeline.scheduler = SCHEDULER_CLASSES[scheduler].from_config(pipeline.scheduler.config)
    return pipeline


@contextmanager
def scheduled(pipeline: Any, scheduler: Scheduler) -> Iterator[Any]:
    """The pipeline with that scheduler, made of the configuration of its own, which it has again afterwards."""
    own = pipeline.scheduler
    pipeline.scheduler = SCHEDULER_CLASSES[scheduler].from_config(own.config)
    yield pipeline
    pipeline.scheduler = own


def fused(pipeline: Any, loras: Path | None, request: ImageRequest) -> Any:
    """The pipeline with the request's LoRAs, files of a folder, in weights of its own."""
    names = [lora.name for lora in request.loras]
    for part in ("unet", "transformer", "text_encoder", "text_encoder_2") if names else ():
        if getattr(pipeline, part, None) is not None:
            setattr(pipeline, part, copy.deepcopy(getattr(pipeline, part)))
    for name in names:
        pipeline.load_lora_weights(loras, weight_name=f"{name}.safetensors", adapter_name=name)
    if names:
        pipeline.set_adapters(names, [lora.scale for lora in request.loras])
        pipeline.fuse_lora(adapter_names=names)
    return pipeline


def edits_of(request: ImageRequest) -> str:
    """What diffusers calls the pipeline for a request's edit."""
    if request.edit is None:
        return ""
    return "Img2Img" if request.edit.mask is None else "Inpaint"


def run_pipeline(pipeline: Any, request: ImageRequest, **extra: Any) -> torch.Tensor:
    """Latents of a stock pipeline (or what ``output_type`` in ``extra`` asks for). Edits are run seed by seed:
    diffusers inpaints n images with the first one's sample of the image's latents."""
    if request.edit is not None and request.n > 1:
        alone = [replace(request, n=1, seed=seed) for seed in request.seeds]
        return torch.cat([run_pipeline(pipeline, one, **extra) for one in alone])
    own_scheduler = pipeline.scheduler
    extra |= _sampling_arguments(pipeline, request)
    if request.controlnets:
        extra |= _control_arguments(request.controlnets, "XL" in type(pipeline).__name__)
    if request.edit is not None:
        extra = {"control_image" if key == "image" else key: value for key, value in extra.items()}
        extra |= {"image": Image.fromarray(request.edit.image), "strength": request.edit.strength}
        if request.edit.mask is not None:
            extra["mask_image"] = Image.fromarray(request.edit.mask)
    if "width" in inspect.signature(pipeline.__call__).parameters:
        extra |= {"width": request.width, "height": request.height}
    output = pipeline(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        num_inference_steps=request.steps,
        guidance_scale=request.guidance_scale,
        num_images_per_prompt=request.n,
        generator=[torch.Generator().manual_seed(seed) for seed in request.seeds],
        **{"output_type": "latent", **extra},
    )
    pipeline.scheduler = own_scheduler  # others make theirs of its configuration
    return output.images


def configure_scheduler(pipeline: Any, request: ImageRequest) -> None:
    """Gives the pipeline the request's scheduler, spacing and (for the sampler that takes no generators) seeds."""
    changes: dict[str, Any] = {}
    if request.sigmas is not None:
        changes = {f"use_{name}_sigmas": request.sigmas == name for name in ("karras", "exponential", "beta")}
    if request.scheduler is Scheduler.DPMPP_2M_SDE:
        changes["algorithm_type"] = "sde-dpmsolver++"
    pipeline.scheduler = SCHEDULER_CLASSES[request.scheduler].from_config(pipeline.scheduler.config, **changes)
    if request.scheduler is Scheduler.DPMPP_SDE:
        pipeline.scheduler.noise_sampler_seed = list(request.seeds)


def _sampling_arguments(pipeline: Any, request: ImageRequest) -> dict[str, Any]:
    """What is not diffusers' default; a pipeline without an argument that is asked for fails."""
    if request.sigmas is not None or request.scheduler in (Scheduler.DPMPP_2M_SDE, Scheduler.DPMPP_SDE):
        configure_scheduler(pipeline, request)
    if request.clip_skip and not hasattr(pipeline.text_encoder, "text_model"):
        # Where transformers dropped this level, diffusers' own clip_skip needs its name.
        object.__setattr__(pipeline.text_encoder, "text_model", pipeline.text_encoder)
    wanted: dict[str, Any] = {
        "eta": request.eta,
        "guidance_rescale": request.guidance_rescale,
        "clip_skip": request.clip_skip,
    }
    wanted |= {"prompt_2": request.prompt_2, "negative_prompt_2": request.negative_prompt_2}
    wanted |= {name: (size[1], size[0]) for name, size in _sizes(request).items() if size not in (None, (0, 0))}
    return {name: value for name, value in wanted.items() if value}


def _sizes(request: ImageRequest) -> dict[str, Any]:
    return {"original_size": request.original_size, "target_size": request.target_size,
            "crops_coords_top_left": request.crop}  # fmt: skip


def _control_arguments(controls: Sequence[ControlRef], is_xl: bool) -> dict[str, Any]:
    images = [Image.fromarray(control.image) for control in controls]
    values: dict[str, Any] = {
        "image": images,
        "controlnet_conditioning_scale": [control.scale for control in controls],
        "control_guidance_start": [control.start for control in controls],
        "control_guidance_end": [control.end for control in controls],
    }
    return values if len(controls) > 1 else {key: value[0] for key, value in values.items()}


def max_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max |a - b|; infinite where either is not finite."""
    difference = (a.float() - b.float()).abs().max()
    return float(difference) if bool(torch.isfinite(difference)) else float("inf")
