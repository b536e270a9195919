"""Loading folders: what is accepted, and a clear `ModelError` for what is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
    StableDiffusionPipeline,
)
from safetensors.torch import load_file, save_file

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.bundle import outline_bundle
from plait_serving.diffusion.families.unet.config import UNetKind, check_controlnet
from plait_serving.diffusion.families.unet.samplers import sampler_of
from plait_serving.diffusion.sources import hub
from plait_serving.diffusion.sources.hub import fetch_from_hub, wanted_files
from plait_serving.diffusion.sources.resolve import resolve_source
from plait_serving.diffusion.values import Scheduler
from support.bundles import load_bundle, texts_of
from support.denoise import make_request
from support.families import edit_json
from support.tiny import tiny_sd

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tiny_sd_folder, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_sd_folder, tmp_path / "model"))


def test_a_stable_diffusion_folder(tiny_sd_folder):
    """UNetKind, sizes and modes of what was loaded."""
    bundle = load_bundle(tiny_sd_folder)
    assert (bundle.kind, bundle.width, bundle.height, bundle.vae_factor) == (UNetKind.SD1, 32, 32, 2)
    assert len(texts_of(bundle)) == len(bundle.tokenizers) == 1
    assert bundle.safety_checker is None
    parts = (bundle.unet, bundle.vae, *texts_of(bundle))
    assert not any(part.training or next(part.parameters()).requires_grad for part in parts)


def test_what_a_configuration_leaves_out_is_the_default_of_its_class(tmp_path):
    """As diffusers has it, which writes all keys and needs none."""
    down = ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")
    up = ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D")
    levels = {"block_out_channels": (16, 16, 16, 32), "down_block_types": down, "up_block_types": up}
    folder = tiny_sd(tmp_path / "model", **levels)
    path = folder / "unet" / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in written.items() if not key.endswith("_block_types")}))
    assert load_bundle(folder).config["down_block_types"] == down


@pytest.mark.parametrize(
    "part", ["model_index.json", "unet", "vae/config.json", "text_encoder", "tokenizer", "scheduler"]
)
def test_a_missing_part_is_named(folder, part):
    """The error names the path that is missing."""
    path = folder / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ModelError, match=part.replace(".", r"\.")):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("file", "changes", "reason"),
    [
        ("unet/config.json", {"class_embed_type": "timestep"}, "class conditioning"),
        ("unet/config.json", {"num_class_embeds": 3}, "class conditioning"),
        ("unet/config.json", {"attention_type": "gated"}, "GLIGEN"),
        ("unet/config.json", {"encoder_hid_dim_type": "ip_image_proj"}, "IP-Adapter"),
        ("unet/config.json", {"addition_embed_type": "image"}, "addition_embed_type"),
        ("unet/config.json", {"dual_cross_attention": True}, "dual_cross_attention"),
        ("unet/config.json", {"class_embeddings_concat": True}, "class_embeddings_concat"),
        ("unet/config.json", {"encoder_hid_dim": 32}, "encoder_hid_dim"),
        ("unet/config.json", {"in_channels": 8}, "inpainting"),
        ("unet/config.json", {"down_block_types": ["DownBlock2D", "SimpleCrossAttnDownBlock2D"]}, "SimpleCrossAttn"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "laplace"}, "beta_schedule"),
    ],
)
def test_what_can_not_run_is_refused_with_a_reason(folder, file, changes, reason):
    """Features whose inputs nobody feeds, and refiners: an error naming file and reason."""
    edit_json(folder / file, **changes)
    with pytest.raises(ModelError, match=reason) as caught:
        load_bundle(folder)
    assert file in caught.value.message


def test_missing_unknown_and_corrupt_weights_are_refused(folder):
    """Never random numbers for a weight that is not there, never a weight dropped in silence."""
    whole = load_file(folder / WEIGHTS)
    less = {key: value for key, value in whole.items() if key != "conv_out.bias"}
    for stored, reason in ((less, "conv_out.bias"), ({**whole, "extra.weight": torch.zeros(2)}, "extra.weight")):
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=reason):
            load_bundle(folder)
    (folder / WEIGHTS).write_bytes(b"not safetensors at all")
    with pytest.raises(ModelError, match="unet"):
        load_bundle(folder)


def test_a_source_that_is_no_folder():
    """A path must exist; a hub id needs a commit, not a branch."""
    with pytest.raises(ModelError, match="no such folder"):
        resolve_source("/nowhere/at/all")
    with pytest.raises(ModelError, match="needs a revision"):
        resolve_source("someone/something")
    with pytest.raises(ModelError, match="not a commit"):
        fetch_from_hub("someone/something", "main")


def test_a_hub_id_is_fetched_at_its_revision(tiny_sd_folder, monkeypatch):
    """The fetcher gets id and commit; what it returns is taken."""
    asked = []

    def fetch(repository: str, revision: str) -> Path:
        asked.append((repository, revision))
        return tiny_sd_folder

    monkeypatch.setattr(hub, "fetch_from_hub", fetch)
    assert resolve_source("someone/something", "a" * 40) == tiny_sd_folder
    assert asked == [("someone/something", "a" * 40)]


def test_only_what_is_needed_is_downloaded():
    """No pickles, no whole-pipeline checkpoints, and a variant only where the plain weights are missing."""
    files = [
        "README.md", "model_index.json", "v1-5-pruned.safetensors", "v1-5-pruned.ckpt",
        "unet/config.json", "unet/diffusion_pytorch_model.bin", "unet/diffusion_pytorch_model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors", "tokenizer/merges.txt",
        "vae/diffusion_pytorch_model.fp16.safetensors", "vae/diffusion_pytorch_model.fp16.bin",
        "text_encoder/model-00001-of-00002.safetensors", "text_encoder/model-00002-of-00002.safetensors",
        "text_encoder/model.safetensors.index.json",
    ]  # fmt: skip
    assert wanted_files(files) == [
        "model_index.json", "text_encoder/model-00001-of-00002.safetensors",
        "text_encoder/model-00002-of-00002.safetensors", "text_encoder/model.safetensors.index.json",
        "tokenizer/merges.txt", "unet/config.json", "unet/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    ]  # fmt: skip
    assert wanted_files(["config.json", "diffusion_pytorch_model.safetensors"]) == [
        "config.json", "diffusion_pytorch_model.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"clip_sample": True}, {"clip_sample": False}, {"steps_offset": 0}])
@pytest.mark.parametrize("kind", [DDIMScheduler, PNDMScheduler, EulerDiscreteScheduler, DPMSolverMultistepScheduler])
def test_ddim_in_a_folder_of_another_scheduler_steps_as_diffusers_does(folder, kind, changes):
    """A class that knows no `clip_sample` leaves it to DDIM, which clips (finding 11). Its own scheduler does not."""
    path = folder / "scheduler" / "scheduler_config.json"
    path.unlink()
    kind(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").save_pretrained(path.parent)
    config = json.loads(path.read_text())
    for name in ("clip_sample", "steps_offset"):
        config.pop(name, None)  # a folder made before there was such a field
    path.write_text(json.dumps({**config, **changes}))
    edit_json(folder / "model_index.json", scheduler=["diffusers", kind.__name__])
    nothing = dict.fromkeys(("unet", "vae", "text_encoder", "tokenizer"))
    pipeline = StableDiffusionPipeline.from_pretrained(folder, **nothing)
    own = isinstance(pipeline.scheduler, DDIMScheduler)
    theirs = pipeline.scheduler if own else DDIMScheduler.from_config(pipeline.scheduler.config)
    theirs.set_timesteps(5)
    written = outline_bundle(folder).scheduler_config
    ours = sampler_of(written, make_request(steps=5, scheduler=Scheduler.DDIM), (1,), shape=(4, 8, 8))
    assert torch.equal(ours.timesteps, theirs.timesteps)
    sample, output = 3 * ours.init_latents(), torch.ones(1, 4, 8, 8)
    assert torch.equal(ours.step(output, 0, sample), theirs.step(output, theirs.timesteps[0], sample).prev_sample)


def test_a_scheduler_that_diffusers_does_not_know_is_named(folder):
    """Which configuration the pipeline would make of it is unknown."""
    edit_json(folder / "model_index.json", scheduler=["diffusers", "NightScheduler"])
    with pytest.raises(ModelError, match=r"model_index.json: scheduler names no class of diffusers: .*NightScheduler"):
        load_bundle(folder)


# ---- ControlNets ----------------------------------------------------------------------------------------------------


def test_a_controlnet_for_another_base_is_refused(tiny_sd_folder, tiny_sdxl_controlnets):
    """The error says what does not fit."""
    with pytest.raises(ModelError, match="another base model"):
        check_controlnet(tiny_sdxl_controlnets[0], base=load_bundle(tiny_sd_folder).config)


def test_a_controlnet_in_one_file_is_called_that(tmp_path, tiny_sd_controlnets):
    """Where its folder belongs, and as a base model, in the original layout and in that of diffusers."""
    path = tmp_path / "canny.safetensors"
    shutil.copy(tiny_sd_controlnets[0] / "diffusion_pytorch_model.safetensors", path)
    with pytest.raises(ModelError, match=r"canny\.safetensors: a single file; .*from_single_file"):
        check_controlnet(path)
    with pytest.raises(ModelError, match=r"a ControlNet, no base model"):
        resolve_source(path)
    save_file({"control_model.input_hint_block.0.weight": torch.zeros(1)}, path)
    with pytest.raises(ModelError, match=r"a ControlNet, no base model"):
        resolve_source(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_class_name": "ControlNetUnionModel"}, "ControlNetUnionModel"),
        ({"global_pool_conditions": True}, "global_pool_conditions"),
        ({"conditioning_embedding_out_channels": [16, 32, 96]}, "shrinks control images by 4"),
        ({"conditioning_channels": 1}, "reads 1"),
    ],
)
def test_controlnets_that_can_not_run_are_refused(tiny_sd_controlnets, changes, reason, tmp_path):
    """Union models, guess mode and a wrong image factor."""
    config = {**json.loads((tiny_sd_controlnets[0] / "config.json").read_text()), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        check_controlnet(tmp_path, vae_factor=2)
