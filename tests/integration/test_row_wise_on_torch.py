"""`executor: torch` with LoRA sets as inputs where requests of different sets wait together, against diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from plait_serving.diffusion.knobs import Exact, ExecutorName
from plait_serving.diffusion.lora.merged_folder import LoraFile, write_merged
from support.closeness import EQUAL, ulps
from support.denoise import max_difference
from support.engine_probe import Probe
from support.prepared import CLOSE, CONTROLLED, PLAIN, SETS, Models, asked, dressed, write_models
from support.tiny import tiny_sd


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models."""
    return write_models(tmp_path_factory.mktemp("row-wise"), partial(tiny_sd, dtype=torch.float32))


@pytest.fixture(scope="module")
def probe(models: Models) -> Iterator[Probe]:
    """The engine on torch."""
    with models.started(executor=ExecutorName.TORCH) as probe:
        yield probe


def test_requests_of_different_sets_share_every_call(models, probe):
    """Attention, two files of different ranks, text encoders, convolutions, none, a ControlNet: each request's latents
    are diffusers', and nothing is merged into the UNet."""
    requests = [*(dressed(name) for name in ("kohya", "both", "text", "conv")), PLAIN, CONTROLLED]
    probe.latents(PLAIN)  # restores what a test before may have merged
    before = probe.engine.statistics().lora_switches
    found = probe.latents(*requests)
    assert probe.batches == [6, 6]
    assert probe.engine.statistics().lora_switches == before
    for ours, one in zip(found, requests, strict=True):
        assert max_difference(ours, models.reference(one)) < CLOSE
    assert max_difference(found[0], probe.latents(PLAIN)[0][:1]) > 1e-2


def test_a_set_alone_is_merged(models, probe):
    """Nothing could share its calls; then diffusers' latents of a plain request, bit for bit."""
    probe.latents(PLAIN)  # restores what a test before may have merged
    before = probe.engine.statistics().lora_switches
    (ours,) = probe.latents(dressed("conv"))
    assert probe.engine.statistics().lora_switches == before + 1
    assert ulps(ours, models.reference(dressed("conv"))) <= EQUAL
    assert torch.equal(probe.latents(PLAIN)[0], models.reference(PLAIN))


def test_exact_always_merges_each_set(models, probe):
    """Calls of one set each, whoever waits."""
    probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"exact": Exact.ALWAYS}))
    try:
        requests = [dressed("kohya"), dressed("conv")]
        found = probe.latents(*requests)
        assert set(probe.batches) == {1}
        for ours, one in zip(found, requests, strict=True):
            assert ulps(ours, models.reference(one)) <= EQUAL
    finally:
        probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"exact": Exact.NEVER}))


def test_a_layer_that_takes_no_factors_is_merged_beside_others(models, probe):
    """The time embedding is computed before both halves: that set cannot be an input, the others go together."""
    requests = [dressed("time"), dressed("kohya"), dressed("conv")]
    found = probe.latents(*requests)
    assert sorted(probe.batches) == [1, 1, 2, 2]
    for ours, one in zip(found, requests, strict=True):
        assert max_difference(ours, models.reference(one)) < CLOSE


def test_a_model_with_a_set_in_its_weights_gives_the_images_of_the_set_as_an_input(models, probe, tmp_path):
    """`plait models merge` on float32 files: two LoRAs, convolutions, text encoders."""
    names = ("both", "conv", "text")
    row_wise = probe.latents(*map(dressed, names))
    assert probe.batches == [3, 3]
    for name, expected in zip(names, row_wise, strict=True):
        files = [
            LoraFile(name=lora.name, path=models.folder / "loras" / f"{lora.name}.safetensors", scale=lora.scale)
            for lora in SETS[name]
        ]
        write_merged(models.base, files, tmp_path / name)
        with replace(models, base=tmp_path / name).started(executor=ExecutorName.TORCH) as merged:
            (found,) = merged.latents(asked(f"dressed {name}"))
        assert max_difference(found, expected) < CLOSE
