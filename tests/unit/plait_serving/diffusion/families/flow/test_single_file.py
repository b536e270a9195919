"""Stable Diffusion 3 and FLUX.1 in one file: the folder that it was written from, or a sentence of what is missing."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families import row_of_file
from plait_serving.diffusion.families.flow import single_file
from plait_serving.diffusion.lora.container import TensorInfo
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.diffusion.sources.resolve import resolve_source
from plait_serving.random_models import DtypeName
from plait_serving.random_models.write import write_model
from support.families import check_same_model
from support.original_flow import original_transformer, write_flow_file

FAMILIES = (FamilyName.SD35_MEDIUM, FamilyName.FLUX_DEV, FamilyName.FLUX_SCHNELL)


@pytest.fixture(autouse=True)
def scaled(monkeypatch):
    """The published architectures in small."""
    monkeypatch.setattr(single_file, "ARCHITECTURES", {family: scaled_down(family) for family in FAMILIES})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model of each family as a folder."""
    root = tmp_path_factory.mktemp("flow")
    for family in FAMILIES:
        write_model(scaled_down(family), root / family, seed=1, dtype=DtypeName.BFLOAT16, report=lambda *_: None)
    return root


@pytest.mark.parametrize(
    ("family", "vae"), [(FAMILIES[0], "first_stage_model."), (FAMILIES[1], "vae."), (FAMILIES[2], "vae.")]
)
def test_a_whole_file_is_the_folder_that_it_was_written_from(family, vae, folders, tmp_path):
    """With VAE and text encoders in it, of the folder that is named beside it no weights are read."""
    path = write_flow_file(folders / family, tmp_path / "model.safetensors", vae=vae, texts=True)
    config = without(folders / family, tmp_path / "config", "*/*.safetensors")
    check_same_model(resolve_source(path, config=config, cache=tmp_path / "cache"), folders / family)


def without(folder, copy, pattern):
    """A copy of a folder without some files."""
    shutil.copytree(folder, copy)
    for path in copy.glob(pattern):
        path.unlink()
    return copy


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformer_alone_takes_what_it_lacks_from_a_folder(family, folders, tmp_path):
    """What its authors publish, and a folder that is named as its configuration: that one's files are linked, not
    copied, and its pipeline is the model's (a Kontext has FLUX.1's names and shapes)."""
    config = without(folders / family, tmp_path / "config", "transformer/*.safetensors")
    path = write_flow_file(folders / family, tmp_path / "model.safetensors")
    found = resolve_source(path, config=config, cache=tmp_path / "cache")
    check_same_model(found, folders / family)
    assert all(file.is_symlink() for file in found.glob("text_encoder*/*.safetensors"))


@pytest.mark.parametrize(
    ("family", "vae", "texts", "says"),
    [
        (
            FamilyName.FLUX_DEV,
            None,
            False,
            "no text_encoder and no text_encoder_2 and no vae and no tokenizer_2; name a",
        ),
        (FamilyName.FLUX_DEV, "vae.", True, "no tokenizer_2; name a diffusers folder that has what the file lacks"),
        (FamilyName.SD35_MEDIUM, "first_stage_model.", True, "no tokenizer_3; name a"),
    ],
)
def test_what_is_missing_is_said(family, vae, texts, says, folders, tmp_path):
    """A file without text encoders, or with a T5, whose vocabulary no file holds, names the key of the folder that has
    them."""
    path = write_flow_file(folders / family, tmp_path / "model.safetensors", vae=vae, texts=texts)
    with pytest.raises(ModelError, match=rf"model\.safetensors: holds {says}.*images\.models\.X\.config"):
        resolve_source(path, cache=tmp_path / "cache")


def test_a_folder_that_lacks_it_too_is_no_help(folders, tmp_path):
    """What neither has is named, in the folder."""
    family = FamilyName.FLUX_DEV
    config = without(folders / family, tmp_path / "config", "text_encoder_2/*.safetensors")
    path = write_flow_file(folders / family, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"text_encoder_2: no weights found"):
        resolve_source(path, config=config, cache=tmp_path / "cache")


def test_with_clips_only_stable_diffusion_3_needs_nothing_else(folders, tmp_path):
    """As published "with CLIPs": the configurations and the one vocabulary are known, the shapes tell the depth and the
    blocks with two attentions, and the folder says that there is no T5."""
    whole = write_flow_file(folders / FAMILIES[0], tmp_path / "whole.safetensors", vae="first_stage_model.", texts=True)
    tensors = {key: value for key, value in load_file(whole).items() if ".t5xxl." not in key}
    save_file(tensors, tmp_path / "clips.safetensors")
    found = resolve_source(tmp_path / "clips.safetensors", cache=tmp_path / "cache")
    expected = tmp_path / "expected"
    small = scaled_down(FAMILIES[0]).without_t5()
    write_model(small, expected, seed=1, dtype=DtypeName.BFLOAT16, report=lambda *_: None)
    check_same_model(found, expected)


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: {"img_in.weight": own["img_in.weight"].repeat(1, 6)}, "FLUX.1 Fill, which takes a mask"),
        (lambda own: {"img_in.weight": own["img_in.weight"].repeat(1, 2)}, "FLUX.1 Canny or Depth, which take"),
        (lambda own: {"img_in.weight": own["img_in.weight"].to(FP8)}, "img_in.weight is F8_E4M3: fp8 checkpoints"),
        (lambda own: {"img_in.weight.absmax": torch.ones(1)}, "absmax is F32: quantized .NF4 or alike. checkpoints"),
        (lambda own: {"img_in.weight": torch.ones(2, 3, dtype=torch.uint8)}, "img_in.weight is U8: quantized"),
        (lambda own: {"redux_up.weight": torch.ones(1)}, "FLUX.1 Redux, which turns images into prompts"),
        (lambda own: {"double_stream_modulation_img.lin.weight": torch.ones(1)}, "a FLUX.2 model"),
        (lambda own: {"distilled_guidance_layer.in_proj.weight": torch.ones(1)}, "a Chroma model"),
        (lambda own: {"mid_convs.0.0.weight": torch.ones(1)}, "a ControlNeXt"),
        (lambda own: {"controlnet_blocks.0.weight": torch.ones(1)}, "a ControlNet, no base model"),
        (
            lambda own: {"transformer_blocks.0.attn.to_q.weight": torch.ones(1)},
            "a transformer in the layout of diffusers",
        ),
        (lambda own: {"double_blocks.0.more.weight": torch.ones(1)}, "1 weights of the transformer have no place"),
    ],
    ids=lambda value: None if callable(value) else value[:20],
)
def test_what_only_looks_like_flux_is_refused_by_its_name(change, says, folders, tmp_path):
    """By the names, shapes and dtypes of its tensors, even with a folder that has all else."""
    folder = folders / FamilyName.FLUX_DEV
    own = original_transformer(folder)
    path = tmp_path / "model.safetensors"
    save_file({key: value.contiguous() for key, value in {**own, **change(own)}.items()}, path)
    with pytest.raises(ModelError, match=rf"model\.safetensors: .*{says}"):
        resolve_source(path, config=folder, cache=tmp_path / "cache")


def test_a_gguf_file_is_refused_by_its_name(tmp_path):
    """Quantized files of llama.cpp's format, by their suffix or by what is in them."""
    for name in ("model.gguf", "model.safetensors"):
        (tmp_path / name).write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(ModelError, match=rf"{name}: .*GGUF"):
            resolve_source(str(tmp_path / name), cache=tmp_path / "cache")


def test_the_family_of_a_file_is_known_by_names(folders):
    """Without reading a tensor, with what stands before the names in whole checkpoints and without."""
    for family, kind in zip(FAMILIES, ("sd3", "flux1", "flux1"), strict=True):
        names, info = original_transformer(folders / family), TensorInfo(dtype="BF16", shape=(1, 1), begin=0, end=0)
        for start in ("", "model.diffusion_model."):
            assert row_of_file({f"{start}{name}": info for name in names})[0] == kind
