"""Latents to images: VAE decoding as the pipelines do it, and the safety checker."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.families.unet.bundle import safety_of
from plait_serving.diffusion.families.unet.denoiser import UNetDenoiser
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.values import Scheduler
from support.bundles import load_bundle
from support.denoise import make_request, reference_pipeline, run_pipeline
from support.tiny import seeded, tiny_sd


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_pictures_are_the_pipelines(name, request):
    """Two images: the 8-bit images of the pipeline, from its own latents."""
    folder = request.getfixturevalue(f"tiny_{name}_folder")
    pipeline = reference_pipeline(folder, Scheduler.EULER)
    asked = make_request(scheduler=Scheduler.EULER, n=2, steps=2)
    pictures = run_pipeline(pipeline, asked, output_type="pil")
    ours = UNetDenoiser(load_bundle(folder)).finish(run_pipeline(pipeline, asked))
    assert ours.dtype == torch.float32
    for mine, theirs in zip(to_rgb(ours), pictures, strict=True):
        difference = np.abs(mine.astype(int) - np.asarray(theirs).astype(int))
        assert difference.max() <= 1, "one by one or in a batch may round a half differently"
        assert (difference != 0).mean() < 0.01


def test_decoding_leaves_the_vae_alone(tiny_sdxl_folder):
    """float16 SDXL decodes in float32 without touching the shared module."""
    bundle = load_bundle(tiny_sdxl_folder, dtype=torch.float16)
    denoiser = UNetDenoiser(bundle)
    before = {key: value.clone() for key, value in bundle.vae.state_dict().items()}
    with seeded(1):
        latents = torch.randn(2, 4, 16, 16).half()
    plain = denoiser.finish(latents)
    assert plain.shape == (2, 3, 32, 32)
    assert all(torch.equal(value, before[key]) for key, value in bundle.vae.state_dict().items())


def test_the_folders_own_checker_agrees_with_diffusers(tmp_path):
    """A folder's (random) checker flags the same images as the pipeline; without one, nothing is checked."""
    folder = tiny_sd(tmp_path / "checked", safety_checker=True)
    bundle = load_bundle(folder)
    pipeline = reference_pipeline(folder, Scheduler.DDIM)
    with seeded(5):
        latents = torch.randn(4, 4, 16, 16)
        # Random weights flag at random; thresholds are moved so that some images are flagged and some are not.
        denoiser = UNetDenoiser(bundle)
        images = denoiser.finish(latents)
        pipeline.safety_checker, pipeline.feature_extractor = bundle.safety_checker, bundle.feature_extractor
        bundle.safety_checker.concept_embeds_weights.fill_(1e9)
        bundle.safety_checker.special_care_embeds_weights.fill_(1e9)
        bundle.safety_checker.concept_embeds_weights[0] = _median_score(bundle, images)
    theirs = pipeline.run_safety_checker(images.clone() * 2 - 1, "cpu", torch.float32)[1]
    pictures, flags = Stepper(denoiser=denoiser, controlnets={}, clock=time.monotonic).decode(latents)
    assert list(flags) == theirs
    assert set(flags) == {True, False}
    assert [bool((image == 0).all()) for image in pictures] == list(flags)
    assert safety_of(load_bundle(folder, safety_checker=False)) is None


def _median_score(bundle, images: torch.Tensor) -> float:
    from PIL import Image

    pixels = bundle.feature_extractor([Image.fromarray(p) for p in to_rgb(images)], return_tensors="pt").pixel_values
    checker = bundle.safety_checker
    embedded = checker.visual_projection(checker.vision_model(pixels)[1])
    scores = torch.nn.functional.cosine_similarity(embedded, checker.concept_embeds[:1])
    return float(scores.sort().values[1:3].mean())
