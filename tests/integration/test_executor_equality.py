"""The engine on prepared programs against diffusers' pipelines: a model of real widths (160, 320), float16 files.

LoRA sets are inputs here, so requests of different sets share calls; what programs cannot take is computed by torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait_kernels.cores import has_bfloat16
from support.denoise import max_difference
from support.engine_probe import Probe
from support.prepared import (
    CLOSE,
    CONTROLLED,
    PLAIN,
    SETS,
    Models,
    asked,
    convert,
    dressed,
    exactly,
    unet_is_mapped,
    write_models,
)
from support.tiny import tiny_sd


def mid_sd(folder: Path) -> Path:
    """Writes Stable Diffusion 1.x with two blocks of half its width (10 M parameters), float16 files as people have."""
    return tiny_sd(
        folder,
        seed=3,
        dtype=torch.float16,
        block_out_channels=(160, 320),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=32,
    )


def mean_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The mean over images of the root of the mean square difference."""
    return float((found.float() - truth).square().flatten(1).mean(1).sqrt().mean())


pytest.importorskip("openvino", reason="needs openvino")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models after a first start."""
    return convert(write_models(tmp_path_factory.mktemp("mid"), mid_sd))


@pytest.fixture(scope="module")
def probe(converted: Models) -> Iterator[Probe]:
    """A second start: the engine runs on what the first one converted."""
    with converted.started() as probe:
        assert probe.engine.pool.prepared == {"unet", "vae"}
        yield probe


def test_alone_and_without_guidance(converted, probe):
    """Two images with CFG, one without: diffusers' latents within the tolerance, and torch's weights stay in the
    file."""
    unguided = asked("unguided", guidance_scale=1.0, width=48)
    for one in (PLAIN, unguided):
        assert max_difference(probe.latents(one)[0], converted.reference(one)) < CLOSE
    assert unet_is_mapped(probe)


def test_four_lora_sets_share_each_call(converted, probe):
    """PEFT, kohya, two files of different ranks, one with text encoders, one on convolutions; two steps of each, a
    call for all, nothing merged."""
    requests = [dressed(name) for name in ("kohya", "both", "text", "conv")]
    probe.latents(PLAIN)  # restores what a test before may have merged
    before = probe.engine.statistics().lora_switches
    found = probe.latents(*requests)
    assert probe.batches == [4, 4]
    assert probe.engine.statistics().lora_switches == before
    assert unet_is_mapped(probe)
    for ours, one in zip(found, requests, strict=True):
        assert max_difference(ours, converted.reference(one)) < CLOSE
        assert max_difference(ours, probe.latents(replace(one, loras=()))[0]) > 1e-2


def test_a_controlnet_and_a_lora(converted, probe):
    """The ControlNet runs on its own program beside the UNet's; alone, and beside a request without it."""
    assert "edges" in probe.engine.pool.prepared or probe.latents(CONTROLLED)
    assert "edges" in probe.engine.pool.prepared
    (alone,) = probe.latents(CONTROLLED)
    together = probe.latents(CONTROLLED, dressed("kohya"))
    assert probe.batches == [2, 2]
    for ours in (alone, together[0]):
        assert max_difference(ours, converted.reference(CONTROLLED)) < CLOSE
    assert max_difference(together[1], converted.reference(dressed("kohya"))) < CLOSE


def test_a_long_prompt_beside_a_short_one(converted, probe):
    """Two chunks of text and one share a step, which parts them by their lengths; within the tolerance of torch."""
    long = asked("long", prompt="a red apple and the cat " * 20, loras=SETS["peft"])
    found = probe.latents(long, dressed("peft"))
    assert probe.batches == [2] * 2
    assert max_difference(found[1], converted.reference(dressed("peft"))) < CLOSE
    (short,) = probe.latents(asked("long", prompt="a red apple and the cat " * 4, loras=SETS["peft"]))
    assert max_difference(found[0], short) > 1e-3
    with converted.started() as own:  # torch's weights come into memory for this
        with exactly(own):
            (wanted,) = own.latents(long)
    assert 0 < max_difference(found[0], wanted) < CLOSE


@pytest.mark.skipif(not has_bfloat16(), reason="needs a CPU with instructions for bfloat16")
def test_bfloat16_is_as_near_to_fp32_as_diffusers(converted):
    """Over eight seeds the mean error of bf16 latents is at most 1.1 times that of diffusers in bf16, LoRAs included,
    alone and in company."""
    requests = [asked("bf16", n=4, seed=100), asked("bf16 text", n=4, seed=200, loras=SETS["text"])]
    with converted.started(dtype="bfloat16") as probe:
        assert probe.engine.pool.prepared
        together = probe.latents(*requests)
        for ours, one in zip(together, requests, strict=True):
            truth, theirs = converted.reference(one), converted.reference(one, torch.bfloat16)
            limit = 1.1 * mean_error(theirs, truth)
            assert 0 < mean_error(ours, truth) <= limit
            assert mean_error(probe.latents(one)[0], truth) <= limit
