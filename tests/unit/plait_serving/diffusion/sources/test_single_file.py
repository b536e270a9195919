"""Checkpoints in one file: the weights and configurations of the folder that they were written from."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import EDMDPMSolverMultistepScheduler, EDMEulerScheduler
from safetensors.torch import load_file, save_file

from plait_serving.diffusion import sources
from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet import single_file
from plait_serving.diffusion.families.unet.bundle import outline_bundle
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.diffusion.sources.resolve import resolve_source
from plait_serving.random_models import DtypeName
from plait_serving.random_models.write import write_model
from support.families import check_same_model, configurations, edit_json
from support.ldm import config_of, original_names, original_vae
from support.tiny import tiny_lora, tiny_sd

_OPEN_CLIP = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "final_layer_norm.weight": "ln_final.weight",
    "final_layer_norm.bias": "ln_final.bias",
}
_OPEN_CLIP_LAYER = {
    "layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}  # fmt: skip


def write_ldm(folder: Path, path: Path, **extra: torch.Tensor) -> Path:
    """Writes one file; `extra` are more tensors of its top level."""
    save_file({**ldm_tensors(folder), **extra}, path)
    return path


@functools.cache
def ldm_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """What a folder's one file holds."""
    is_xl = (folder / "text_encoder_2").is_dir()
    tensors = {f"model.diffusion_model.{key}": value for key, value in _unet(folder / "unet").items()}
    tensors |= {f"first_stage_model.{key}": value for key, value in original_vae(folder / "vae").items()}
    clip, text = _text(folder / "text_encoder"), config_of(folder / "text_encoder")
    if is_xl:
        tensors |= {f"conditioner.embedders.0.transformer.text_model.{key}": value for key, value in clip.items()}
        second = _open_clip(_text(folder / "text_encoder_2"))
        tensors |= {f"conditioner.embedders.1.model.{key}": value for key, value in second.items()}
    elif text["hidden_act"] == "gelu":
        tensors |= {f"cond_stage_model.model.{key}": value for key, value in _open_clip(clip).items()}
    else:
        prefix = "cond_stage_model.transformer.text_model."
        tensors |= {f"{prefix}{key}": value for key, value in clip.items()}
        tensors[f"{prefix}embeddings.position_ids"] = torch.arange(77)[None]
    return {key: value.contiguous() for key, value in tensors.items()}


def _unet(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "diffusion_pytorch_model.safetensors")
    names = original_names(tensors, config_of(folder)["layers_per_block"])
    return {names[key]: value for key, value in tensors.items()}


def _text(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {key.removeprefix("text_model."): value for key, value in tensors.items()}


def _open_clip(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {}
    for key, value in tensors.items():
        if key in _OPEN_CLIP:
            made[_OPEN_CLIP[key]] = value
        elif key == "text_projection.weight":
            made["text_projection"] = value.T
        elif "q_proj" in key:
            parts = [tensors[key.replace("q_proj", name)] for name in ("q_proj", "k_proj", "v_proj")]
            number, kind = key.split(".")[2], key.rpartition(".")[2]
            made[f"transformer.resblocks.{number}.attn.in_proj_{kind}"] = torch.cat(parts)
        elif not key.endswith(("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")):
            _, _, number, inner = key.split(".", 3)
            name, _, kind = inner.rpartition(".")
            made[f"transformer.resblocks.{number}.{_OPEN_CLIP_LAYER[name]}.{kind}"] = value
    return made


FAMILIES = (FamilyName.SD15, FamilyName.SD21, FamilyName.SDXL)


@pytest.fixture(autouse=True)
def scaled(monkeypatch):
    """The published architectures in small."""
    monkeypatch.setattr(single_file, "ARCHITECTURES", {family: scaled_down(family) for family in FAMILIES})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each family as a folder, and as a file beside it."""
    root = tmp_path_factory.mktemp("single")
    for family in FAMILIES:
        dtype = DtypeName.FLOAT16 if family is FamilyName.SD15 else DtypeName.FLOAT32
        write_model(scaled_down(family), root / family, seed=1, dtype=dtype, report=lambda *_: None)
        write_ldm(root / family, root / f"{family}.safetensors")
    return root


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_the_folder_that_it_was_written_from(family, folders, tmp_path):
    """Weights, configurations, vocabulary."""
    check_same_model(resolve_source(folders / f"{family}.safetensors", cache=tmp_path), folders / family)


def test_it_is_converted_once_and_again_when_it_changed(folders, tmp_path, monkeypatch):
    """Two starts share a folder; a file of that name with other content has another."""
    path = tmp_path / "model.safetensors"
    path.write_bytes((folders / "sd15.safetensors").read_bytes())
    first = resolve_source(path, cache=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(sources.resolve, "new_folder", None)
        assert resolve_source(str(path), cache=tmp_path) == first
    path.write_bytes((folders / "sd21.safetensors").read_bytes())
    second = resolve_source(path, cache=tmp_path)
    assert second != first
    assert sorted(entry.name for entry in (tmp_path / "converted").iterdir() if entry.is_dir()) == sorted(
        [first.name, second.name]
    )


def test_another_architecture_needs_a_folder_with_its_configuration(tmp_path):
    """With it, the model is the folder's, with the folder's own vocabulary; without it, the refusal says so."""
    base = tiny_sd(tmp_path / "base")
    path = write_ldm(base, tmp_path / "own.safetensors")
    with pytest.raises(ModelError, match=r"own.safetensors: .*name a folder with its"):
        resolve_source(path, cache=tmp_path)
    assert not [entry for entry in (tmp_path / "converted").iterdir() if entry.is_dir()]
    config = shutil.copytree(base, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    check_same_model(resolve_source(path, config=config, cache=tmp_path), base)
    with pytest.raises(ModelError, match=r"model_index.json: missing: a checkpoint's config is a diffusers folder"):
        resolve_source(path, config=tmp_path, cache=tmp_path / "other")


def test_an_inpainting_file_is_known_by_its_channels(tmp_path):
    """Nine of them, without a configuration."""
    small = scaled_down(FamilyName.SD15)
    parts = [
        replace(part, config={**part.config, "in_channels": 9}) if part.folder == "unet" else part
        for part in small.parts
    ]
    write_model(
        replace(small, parts=tuple(parts)), tmp_path / "base", seed=1, dtype=DtypeName.FLOAT32, report=lambda *_: None
    )
    path = write_ldm(tmp_path / "base", tmp_path / "inpainting.safetensors")
    assert outline_bundle(resolve_source(path, cache=tmp_path)).inpaints


@pytest.mark.parametrize(
    ("family", "yaml", "marks", "expected"),
    [
        ("sd15", "v", (), "v_prediction"),
        ("sd21", "eps", (), "epsilon"),
        ("sdxl", None, ("v_pred", "ztsnr"), "v_prediction"),
    ],
)
def test_what_the_unet_predicts_is_told_by_a_mark_or_a_yaml(family, yaml, marks, expected, folders, tmp_path):
    """A1111's .yaml beside the file, or the tensors that files of SDXL carry for it."""
    path = write_ldm(folders / family, tmp_path / "model.safetensors", **{mark: torch.zeros(1) for mark in marks})
    if yaml is not None:
        path.with_suffix(".yaml").write_text(f"model: {{params: {{parameterization: {yaml}}}}}")
    found = resolve_source(path, cache=tmp_path)
    scheduler = json.loads((found / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler.get("prediction_type", "epsilon") == expected
    assert scheduler.get("rescale_betas_zero_snr", False) == ("ztsnr" in marks)


PLAYGROUND = {
    "edm_mean": torch.tensor([-1.6574, 1.886, -1.383, 2.5155]).view(1, 4, 1, 1),
    "edm_std": torch.tensor([8.4927, 5.9022, 6.5498, 5.2299]).view(1, 4, 1, 1),
}
COSXL = {"edm_vpred.sigma_max": torch.tensor(120.0), "edm_vpred.sigma_min": torch.tensor(0.004)}


@pytest.mark.parametrize("name", ["playground", "cosxl"])
def test_the_marks_of_edm_models_are_read(name, folders, tmp_path):
    """The model is a folder with their scheduler, mean and deviation; `integration/test_edm_equality` has the images of
    such folders."""
    if name == "playground":
        moments = {f"latents_{key[4:]}": tensor.flatten().tolist() for key, tensor in PLAYGROUND.items()}
        scheduler, vae, marks = EDMDPMSolverMultistepScheduler(), {**moments, "scaling_factor": 0.5}, PLAYGROUND
    else:
        levels = {"sigma_max": 120.0, "sigma_min": 0.004, "sigma_data": 1.0, "sigma_schedule": "exponential"}
        scheduler, vae, marks = EDMEulerScheduler(prediction_type="v_prediction", **levels), {}, COSXL
    found = resolve_source(write_ldm(folders / "sdxl", tmp_path / "model.safetensors", **marks), cache=tmp_path)
    read = type(scheduler).from_pretrained(found / "scheduler").config
    assert {key: read[key] for key in scheduler.config if not key.startswith("_")} == pytest.approx(
        {key: value for key, value in scheduler.config.items() if not key.startswith("_")}, abs=1e-6
    )
    stored = configurations(found)["vae/config.json"]
    assert all(stored[key] == pytest.approx(value) for key, value in vae.items())


@pytest.mark.parametrize(
    ("family", "marks"),
    [
        ("sdxl", ("edm_mean",)),
        ("sdxl", ("edm_vpred.sigma_min",)),
        ("sdxl", ("edm_vpred.sigma_max", "edm_vpred.sigma_data")),
        ("sdxl", ("edm_mean", "edm_std", "edm_vpred.sigma_max")),
        ("sd15", ("edm_mean", "edm_std")),
    ],
)
def test_marks_of_other_edm_models_are_refused(family, marks, folders, tmp_path):
    """By name: nothing here would make their images."""
    path = write_ldm(folders / family, tmp_path / "model.safetensors", **{mark: torch.ones(4) for mark in marks})
    with pytest.raises(ModelError, match=f"{', '.join(sorted(marks))}: such an EDM model of {family} is not"):
        resolve_source(path, cache=tmp_path)


def test_a_configuration_of_another_noise_is_refused_for_an_edm_model(folders, tmp_path):
    """One with an EDM scheduler is taken."""
    path = write_ldm(folders / "sdxl", tmp_path / "model.safetensors", **COSXL)
    with pytest.raises(ModelError, match=r"edm_vpred\.sigma_min: an EDM model, but its config names EulerDiscrete"):
        resolve_source(path, config=folders / "sdxl", cache=tmp_path)
    config = shutil.copytree(folders / "sdxl", tmp_path / "config")
    EDMEulerScheduler().save_pretrained(config / "scheduler")
    edit_json(config / "model_index.json", scheduler=["diffusers", "EDMEulerScheduler"])
    found = outline_bundle(resolve_source(path, config=config, cache=tmp_path))
    assert found.scheduler_config.own_class == "EDMEulerScheduler"


def _without(folders, tmp_path, prefix):
    tensors = load_file(folders / "sd15.safetensors")
    path = tmp_path / "model.safetensors"
    save_file({key: value for key, value in tensors.items() if not key.startswith(prefix)}, path)
    return path


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        ("first_stage_model.", "holds no VAE; only whole checkpoints are read"),
        ("cond_stage_model.", "holds no text encoder; only"),
        ("first_stage_model.decoder.conv_in.", "vae lacks 2 weights, for example decoder.conv_in.bias"),
        ("model.diffusion_model.out.2", "unet lacks 2 weights, for example conv_out.bias"),
    ],
)
def test_a_file_that_lacks_something_is_refused(prefix, says, folders, tmp_path):
    """By the name of what is missing, and nothing is left in the cache."""
    with pytest.raises(ModelError, match=says):
        resolve_source(_without(folders, tmp_path, prefix), cache=tmp_path)
    assert not list(tmp_path.glob("converted/*/*"))


def test_what_is_no_checkpoint_is_refused(folders, tmp_path):
    """Pickles under any name, LoRAs, refiners, files that are not there, more weights than the architecture has."""
    (tmp_path / "old.ckpt").write_bytes(b"\x80\x02}")
    (tmp_path / "disguised.safetensors").write_bytes(b"PK\x03\x04" + bytes(64))
    tiny_lora(tmp_path / "lora.safetensors", folders / "sd15")
    refiner = {f"{key}.x": torch.zeros(1) for key in ("model.diffusion_model", "first_stage_model")}
    save_file({**refiner, "conditioner.embedders.0.model.x": torch.zeros(1)}, tmp_path / "refiner.safetensors")
    write_ldm(folders / "sd15", tmp_path / "more.safetensors", **{"model.diffusion_model.extra.x": torch.zeros(1)})
    for name, says in {
        "old.ckpt": "a pickle, which can run code",
        "disguised.safetensors": "a pickle, which can run code",
        "lora.safetensors": "no whole checkpoint in the original layout",
        "refiner.safetensors": "an SDXL refiner is not supported",
        "absent.safetensors": "No such file",
        "more.safetensors": "of the UNet's .* weights, 1 have no place",
    }.items():
        with pytest.raises(ModelError, match=says):
            resolve_source(tmp_path / name, cache=tmp_path)
