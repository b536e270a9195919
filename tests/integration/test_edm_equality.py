"""EDM models against diffusers' pipelines with their own scheduler: images within 2 of 255 levels.

Tiny random SDXL models, shaped as Playground v2.5 (with a mean and a deviation of latents) and CosXL. For masks the
reference is diffusers' pipeline with what it forgets: mean and deviation when it encodes, and with a ControlNet also
when it decodes.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

from plait_serving.deployments.images.hosted import HostedImages
from plait_serving.deployments.images.lora_cards import LoraCards
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import ControlRef, Edit, ImageRequest, Scheduler
from plait_serving.images.config import ImagesSection
from support.denoise import IMAGE, MASK, control_image, edits_of, reference_pipeline, run_pipeline
from support.families import edit_json
from support.rig import ask as any_request
from support.rig import rig_of

__all__ = ["rig_of"]

PLAYGROUND = {
    "_class_name": "EDMDPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "euler_at_final": False,
    "dynamic_thresholding_ratio": 0.995, "final_sigmas_type": "zero", "lower_order_final": True, "solver_order": 2,
    "num_train_timesteps": 1000, "prediction_type": "epsilon", "rho": 7.0, "sample_max_value": 1.0, "sigma_data": 0.5,
    "sigma_max": 80.0, "sigma_min": 0.002, "solver_type": "midpoint", "thresholding": False,
}  # fmt: skip
COSXL = {
    "_class_name": "EDMEulerScheduler", "num_train_timesteps": 1000, "prediction_type": "v_prediction", "rho": 7.0,
    "sigma_data": 1.0, "sigma_max": 120.0, "sigma_min": 0.002, "sigma_schedule": "exponential",
}  # fmt: skip
MOMENTS = {
    "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
    "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
    "scaling_factor": 0.5,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], Scheduler]] = {
    "playground": (PLAYGROUND, MOMENTS, Scheduler.DPMPP_2M),
    "cosxl": (COSXL, {}, Scheduler.EULER),
}

CONTROL = ControlRef(name="a", image=control_image(1), scale=0.8, end=0.7)
IMG2IMG = Edit(image=IMAGE, strength=0.7)
INPAINT = Edit(image=IMAGE, mask=MASK, strength=0.7, overlay=False)
ANEW = replace(INPAINT, strength=1.0)


def shaped(base: Path, folder: Path, scheduler: dict[str, Any], vae: dict[str, Any]) -> Path:
    """Writes a copy of `base` with that scheduler and those entries of the VAE's configuration."""
    shutil.copytree(base, folder)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    edit_json(folder / "model_index.json", scheduler=["diffusers", scheduler["_class_name"]])
    edit_json(folder / "vae" / "config.json", **vae)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def model(request, rig_of, tmp_path_factory, tiny_sdxl_folder, tiny_sdxl_controlnets):
    """A model's folder, its ControlNet, an engine on both and the sampler that is the folder's own."""
    scheduler, vae, own = MODELS[request.param]
    folder = shaped(tiny_sdxl_folder, tmp_path_factory.mktemp("edm") / request.param, scheduler, vae)
    probe, _ = rig_of(folder, {"a": tiny_sdxl_controlnets[0]})
    return folder, tiny_sdxl_controlnets[0], probe, own


def ask(scheduler: Scheduler, seed: int = 11, **more: Any) -> ImageRequest:
    """A request of 6 steps."""
    return any_request(seed, steps=6, guidance_scale=3.0, scheduler=scheduler, **more)


def _moments(vae: Any) -> tuple[torch.Tensor | float, torch.Tensor | float]:
    if vae.config.latents_mean is None:
        return 0.0, 1.0
    return tuple(torch.tensor(each).view(1, 4, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))


def _encode(pipeline: Any, image: torch.Tensor, generator: Any) -> torch.Tensor:
    """`_encode_vae_image` as it would be with mean and deviation."""
    (own,) = generator
    mean, deviation = _moments(pipeline.vae)
    latents = pipeline.vae.encode(image).latent_dist.sample(own)
    return (latents - mean) * pipeline.vae.config.scaling_factor / deviation


def theirs(folder: Path, controlnet: Path, asked: ImageRequest) -> list[np.ndarray]:
    """The images of diffusers' pipeline with the folder's own scheduler."""
    pipeline = reference_pipeline(folder, None, (controlnet,) * len(asked.controlnets), edits=edits_of(asked))
    forgets = edits_of(asked) == "Inpaint"
    if forgets:
        pipeline._encode_vae_image = MethodType(_encode, pipeline)
    with torch.inference_mode():
        images = run_pipeline(pipeline, asked, output_type="latent" if forgets and asked.controlnets else "pil")
        if torch.is_tensor(images):
            mean, deviation = _moments(pipeline.vae)
            images = pipeline.vae.decode(images * deviation / pipeline.vae.config.scaling_factor + mean).sample
            images = pipeline.image_processor.postprocess(images)
    return [np.asarray(image).astype(int) for image in images]


REQUESTS: dict[str, dict[str, Any]] = {
    "whole": {"n": 2},
    "img2img": {"edit": IMG2IMG},
    "inpaint-controlnet": {"edit": INPAINT, "controlnets": (CONTROL,)},
    "anew": {"edit": ANEW},
}


def test_images_are_those_of_the_model_s_own_pipeline(model):
    """Generations and edits, with and without a ControlNet, all at once; each is as diffusers makes it alone."""
    folder, controlnet, probe, own = model
    asked = [ask(own, request_id=name, seed=i, **fields) for i, (name, fields) in enumerate(REQUESTS.items())]
    with ThreadPoolExecutor(len(asked)) as pool:
        results = list(pool.map(probe.engine.generate, asked))
    for one, result in zip(asked, results, strict=True):
        for ours, image in zip(result.images, theirs(folder, controlnet, one), strict=True):
            assert np.abs(ours - image).max() <= 2, one.request_id


def test_requests_that_name_no_sampler_get_the_model_s_own(model, tmp_path):
    """Unless the configuration names one that it takes."""
    folder, _, probe, own = model
    cards = LoraCards(FolderSource(tmp_path), lambda: "sdxl")
    for configured, expected in (("heun", own), ("dpmpp_2m_sde", Scheduler.DPMPP_2M_SDE)):
        images = ImagesSection.model_validate({"model": str(folder), "defaults": {"scheduler": configured}})
        catalog = asyncio.run(HostedImages(images, probe.engine, cards).catalog())
        assert catalog.model.default_scheduler is expected
