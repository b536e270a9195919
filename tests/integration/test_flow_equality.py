"""Stable Diffusion 3 and FLUX.1 against diffusers' own pipelines: same request, same latents.

Tiny random models with LoRAs. Those of requests in company are in `test_flow_company`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from plait_kernels.attention import FasterAttention
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.families.flux import denoiser as flux
from plait_serving.diffusion.values import LoraRef, Preview, Scheduler, Sigmas
from support.closeness import EQUAL, ulps
from support.denoise import EDITS
from support.flow_rig import flow_rig

__all__ = ["flow_rig"]

SAMPLERS = [
    *(("sd3", each, 5) for each in (Scheduler.EULER, Scheduler.HEUN, Scheduler.DPMPP_2M, Scheduler.UNIPC)),
    *(("dev", each, 5) for each in (Scheduler.EULER, Scheduler.DPMPP_2M, Scheduler.UNIPC)),
    *(("schnell", each, 5) for each in (Scheduler.EULER, Scheduler.UNIPC)),
    ("sd3", Scheduler.HEUN, 1), ("dev", Scheduler.UNIPC, 1), ("schnell", Scheduler.EULER, 1),
]  # fmt: skip
SET = (LoraRef(name="one", scale=0.9), LoraRef(name="two", scale=-0.5))


@pytest.mark.parametrize(("model", "scheduler", "steps"), SAMPLERS)
def test_every_sampler_equals_diffusers(flow_rig, model, scheduler, steps):
    """Two images, of one step and of several."""
    rig = flow_rig(model)
    asked = rig.ask(11, n=2, scheduler=scheduler, steps=steps)
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL


@pytest.mark.parametrize("model", ["sd3", "dev", "schnell"])
def test_the_random_sampler_draws_from_each_images_seed(flow_rig, model):
    """Two images are those of their own seeds, and diffusers' where it is handed the generators."""
    rig = flow_rig(model)
    asked = rig.ask(12, n=2, scheduler=Scheduler.EULER_A)
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL
    (second,) = rig.probe.latents(replace(asked, n=1, seed=13))
    assert ulps(ours[1:], second) <= EQUAL


@pytest.mark.parametrize(
    ("model", "scheduler"), [("sd3", Scheduler.EULER_A), ("dev", Scheduler.EULER), ("schnell", Scheduler.EULER)]
)
def test_every_spacing_of_noise_levels_equals_diffusers(flow_rig, model, scheduler):
    """Karras', exponential and beta, each unlike the model's own."""
    rig = flow_rig(model)
    own = rig.probe.latents(rig.ask(14, scheduler=scheduler))[0]
    for sigmas in (Sigmas.KARRAS, Sigmas.EXPONENTIAL, Sigmas.BETA):
        asked = rig.ask(14, scheduler=scheduler, sigmas=sigmas)
        (ours,) = rig.probe.latents(asked)
        assert ulps(ours, rig.reference.latents(asked)) <= EQUAL
        assert (ours - own).abs().max() > 1e-3


@pytest.mark.parametrize(("model", "more"), [
    ("sd3", {"guidance_scale": 1.0}),
    ("sd3", {"guidance_scale": 7.0, "negative_prompt": "blue tree", "clip_skip": 1}),
    ("sd3", {"prompt_2": "a photo", "negative_prompt": "dog", "negative_prompt_2": "tree"}),
    ("sd3", {"max_sequence_length": None}),
    ("sd3-without-t5", {"negative_prompt": "blue"}),
    ("sd3-without-t5", {"guidance_scale": 0.0, "max_sequence_length": 40}),
    ("dev", {"guidance_scale": 1.0}),
    ("dev", {"guidance_scale": 7.5, "prompt_2": "a photo with the face"}),
    ("dev", {"true_cfg_scale": 4.0, "negative_prompt": "blue tree"}),
    ("dev", {"true_cfg_scale": 2.0, "negative_prompt": "", "negative_prompt_2": "dog"}),
    ("dev", {"max_sequence_length": None}),
    ("schnell", {"max_sequence_length": 256}),
    ("de-distilled", {"true_cfg_scale": 4.0, "negative_prompt": "blue tree", "max_sequence_length": 300}),
    ("kontext", {}),
])  # fmt: skip
def test_texts_and_guidance_equal_diffusers(flow_rig, model, more):
    """By CFG, by an input, by true CFG, and none; T5's padded length, and no T5; and each really changes the image."""
    rig = flow_rig(model)
    asked = rig.ask(21, n=2, **more)
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL
    if more:
        assert (ours - rig.probe.latents(rig.ask(21, n=2))[0]).abs().max() > 1e-3


@pytest.mark.parametrize("model", ["sd3", "dev"])
def test_a_long_prompt_is_read_by_t5_and_begun_by_clip(flow_rig, model):
    """Words behind the 77 tokens of CLIP are part of the image; what T5 has no room for is refused, by field."""
    rig = flow_rig(model)
    long = "a red cat with the blue house and " * 9
    asked = rig.ask(22, prompt=f"{long} green", max_sequence_length=128)
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL
    assert (ours - rig.probe.latents(replace(asked, prompt=f"{long} apple"))[0]).abs().max() > 1e-4
    with pytest.raises(RequestError, match="max_sequence_length") as caught:
        rig.probe.engine.generate(rig.ask(23, prompt=long))
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("model", ["sd3", "dev", "schnell"])
@pytest.mark.parametrize("names", [("one", "two"), ("text",)], ids="+".join)
def test_lora_sets_equal_diffusers_fused(flow_rig, model, names):
    """Every linear layer of the transformer, two files at once, and a text encoder's: nothing is merged into the
    transformer."""
    rig = flow_rig(model)
    asked = rig.ask(31, n=2, loras=tuple(LoraRef(name=name, scale=0.8) for name in names))
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL
    assert (ours - rig.probe.latents(rig.ask(31, n=2))[0]).abs().max() > 1e-2
    assert rig.probe.engine.statistics().lora_switches == 0


@pytest.mark.parametrize("model", ["sd3", "dev", "schnell"])
@pytest.mark.parametrize(("edit", "calls"), [("img2img", 4), ("inpaint", 4), ("anew", 5)])
def test_edits_equal_diffusers(flow_rig, model, edit, calls):
    """Two images; a share of a step runs, as in these pipelines."""
    rig = flow_rig(model)
    asked = rig.ask(41, n=2, steps=5, edit=EDITS[edit], loras=SET)
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL
    assert len(rig.probe.batches) == calls


def test_an_edit_by_heun_equals_diffusers(flow_rig):
    """It starts between two halves of nothing: at the first half of a step."""
    rig = flow_rig("sd3")
    asked = rig.ask(42, scheduler=Scheduler.HEUN, steps=6, edit=EDITS["inpaint"])
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL


@pytest.fixture
def small_sizes(monkeypatch):
    """Sizes that references are snapped to, a tenth of Kontext's, in both."""
    from diffusers.pipelines.flux import pipeline_flux_kontext

    sizes = [(w // 160 * 8, h // 160 * 8) for w, h in flux.KONTEXT_SIZES]
    assert list(flux.KONTEXT_SIZES) == pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
    monkeypatch.setattr(flux, "KONTEXT_SIZES", sizes)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)


@pytest.mark.parametrize(("shape", "size"), [((40, 40), (32, 32)), ((90, 45), (48, 24)), ((31, 77), (32, 32))])
def test_references_equal_kontext(flow_rig, small_sizes, shape, size):
    """Images of any size, snapped, as tokens with positions of their own; with true CFG and LoRAs."""
    rig, (width, height) = flow_rig("kontext"), size
    image = np.random.default_rng(1).integers(0, 256, (*shape, 3), dtype=np.uint8)
    asked = rig.ask(51, n=2, width=width, height=height, reference=image)
    for each in (asked, replace(asked, negative_prompt="blue", true_cfg_scale=3.0, loras=SET)):
        (ours,) = rig.probe.latents(each)
        assert ulps(ours, rig.reference.latents(each)) <= EQUAL
        assert (ours - rig.probe.latents(replace(each, reference=None))[0]).abs().max() > 1e-3


def test_a_reference_costs_its_tokens(flow_rig, small_sizes):
    """Text, image and reference; another size of reference is no company."""
    family = flow_rig("kontext").probe.engine.pool.first.family
    ask = flow_rig("kontext").ask
    alone = family.measure(ask(1))
    square, wide = (family.measure(ask(1, reference=np.zeros((h, w, 3), np.uint8))) for h, w in ((64, 64), (64, 128)))
    assert alone.row.size == 64 + 24
    assert square.row.size == 64 + 24 + (48 // 4) ** 2
    assert len({alone.shape, square.shape, wide.shape}) == 3


@pytest.mark.parametrize("model", ["sd3", "dev"])
def test_other_sizes_equal_diffusers(flow_rig, model):
    """Images that are not square; their tokens shift FLUX.1's schedule."""
    rig = flow_rig(model)
    asked = rig.ask(61, width=48, height=20)
    (ours,) = rig.probe.latents(asked)
    assert ulps(ours, rig.reference.latents(asked)) <= EQUAL


@pytest.mark.parametrize("model", ["sd3", "dev", "schnell"])
def test_bfloat16_rounds_where_diffusers_does(flow_rig, model):
    """Noise, timesteps, guidance and latents of each step: a request alone has the pipeline's bits."""
    rig = flow_rig(model, dtype="bfloat16")
    for scheduler in (Scheduler.EULER, Scheduler.UNIPC):
        asked = rig.ask(71, n=2, steps=6, scheduler=scheduler)
        (ours,) = rig.probe.latents(asked)
        assert ours.dtype is torch.bfloat16
        assert torch.equal(ours, rig.reference.latents(asked))


@pytest.mark.parametrize(
    ("model", "asked_for"),
    [("sd3", {"apart": True}), ("dev", {"apart": True}), ("sd3", {"executor": "torch"}), ("dev", {"exact": "always"})],
)
def test_who_asks_for_torch_or_exact_bits_in_bfloat16_gets_them(flow_rig, monkeypatch, model, asked_for):
    """Attention is replaced unless a setting asks for torch or for bits; the image is decoded as near as that."""
    monkeypatch.setattr("plait_serving.diffusion.families.flow.denoiser.pays", lambda *_: True)
    rig = flow_rig(model, dtype="bfloat16", **asked_for)
    replaced = []
    monkeypatch.setattr(FasterAttention, "__enter__", lambda self: replaced.append(self) or self)
    monkeypatch.setattr(FasterAttention, "__exit__", lambda *_: None)
    (ours,), theirs = rig.probe.latents(rig.ask(73)), rig.reference.latents(rig.ask(73))
    is_free = "apart" in asked_for  # a rig of its own, made with this patch
    assert bool(replaced) is is_free
    assert torch.equal(ours, theirs)
    (image,) = rig.images(rig.ask(73))
    decoded = (rig.reference.image(rig.ask(73))[0].float() * 255).round().permute(1, 2, 0).numpy()
    assert np.abs(image - decoded).max() <= (8 if is_free else 1)


@pytest.mark.parametrize("model", ["sd3", "dev"])
def test_lora_sets_are_inputs_in_bfloat16_too(flow_rig, model):
    """Their image is as near to the one in float32 as that of diffusers, which rounds the weights that it fuses."""
    rig = flow_rig(model, dtype="bfloat16")
    asked = rig.ask(72, loras=SET)
    (ours,), theirs = rig.probe.latents(asked), rig.reference.latents(asked)
    wide = flow_rig(model).reference.latents(asked)
    assert (ours.float() - wide).abs().mean() <= 1.5 * (theirs.float() - wide).abs().mean()
    assert rig.probe.engine.statistics().lora_switches == 0


@pytest.mark.parametrize(("model", "scheduler"), [("sd3", Scheduler.UNIPC), ("dev", Scheduler.EULER)])
def test_previews_come_to_the_image(flow_rig, model, scheduler):
    """Each of three is nearer to it than the one before."""
    *told, end = flow_rig(model).events(flow_rig(model).ask(91, steps=12, scheduler=scheduler, partial_images=3))
    previews = [event.image.astype(float) for event in told if isinstance(event, Preview)]
    distances = [float(np.abs(image - end.result.images[0]).mean()) for image in previews]
    assert len(distances) == 3
    assert distances == sorted(distances, reverse=True)
