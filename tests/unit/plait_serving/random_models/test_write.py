"""Random models as files: loaded by diffusers and by plait, finite, the same for the same seed, never half-written."""

from __future__ import annotations

import hashlib
import json
import math
import os
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from diffusers import ControlNetModel, DDIMScheduler, DiffusionPipeline, UNet2DConditionModel
from safetensors.torch import load_file
from transformers import CLIPTokenizer, T5TokenizerFast

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.families.unet.config import check_controlnet, kind_of_config
from plait_serving.diffusion.families.unet.controlnet import load_controlnet
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.configs import END, START, write_t5_tokenizer, write_tokenizer
from plait_serving.diffusion.published.scaled import IMAGE_SIZE, scaled_down
from plait_serving.diffusion.sources import staging
from plait_serving.random_models import DtypeName
from plait_serving.random_models import write as writing
from plait_serving.random_models.write import DrawnTensor, write_model, write_tensors
from support.bundles import load_bundle

BASES = {FamilyName.SD15: "sd1", FamilyName.SD21: "sd2", FamilyName.SDXL: "sdxl"}
UNET = "unet/diffusion_pytorch_model.safetensors"


def silent(name, written, total):
    """No progress."""


def write(family, folder, *, seed=0, dtype=DtypeName.FLOAT16):
    write_model(scaled_down(family), folder, seed=seed, dtype=dtype, report=silent)
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Models that tests only read, by family."""
    return cache(lambda family: write(family, tmp_path_factory.mktemp("random") / "model"))


def hashes(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("family", BASES)
def test_a_base_model_makes_finite_images(family, folder_of):
    """diffusers' own pipeline loads the folder, and a step on it gives a finite image that is no flat colour; plait's
    loader takes it as the family that it is. No scheduler clips: the published files say so, and it holds for those of
    other classes that are made of them."""
    folder = folder_of(family)
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    assert DDIMScheduler.from_config(pipe.scheduler.config).config.clip_sample is False
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {torch.float32}
    image = pipe(
        "a red apple", num_inference_steps=1, height=IMAGE_SIZE, width=IMAGE_SIZE, output_type="pt",
        generator=torch.Generator().manual_seed(1),
    ).images  # fmt: skip
    assert image.shape == (1, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert torch.isfinite(image).all()
    assert image.std() > 0.01
    bundle = load_bundle(folder)
    assert (bundle.width, bundle.height, bundle.vae_factor) == (IMAGE_SIZE, IMAGE_SIZE, 8)
    unet = next(part.config for part in ARCHITECTURES[family].parts if part.folder == "unet")
    assert kind_of_config(unet) == BASES[family]  # of the real width, by which SD 2 is known


@pytest.mark.parametrize("family", [FamilyName.SD35_LARGE, FamilyName.FLUX_DEV])
def test_a_transformer_makes_images_of_its_prompt(family, folder_of):
    """diffusers' own pipeline loads the folder with all encoders; the image is finite, no flat colour, and another
    prompt gives another."""
    one, other = flow_images(DiffusionPipeline.from_pretrained(folder_of(family), local_files_only=True))
    assert one.shape == (1, 3, IMAGE_SIZE, IMAGE_SIZE)
    assert torch.isfinite(one).all()
    assert one.std() > 0.01
    assert (one - other).abs().max() > 0.01


def test_t5_may_be_left_out_of_stable_diffusion_3_only(tmp_path):
    """Its folder says that there is none, and diffusers makes images with it; every other model needs what it has."""
    small = scaled_down(FamilyName.SD35_MEDIUM).without_t5()
    write_model(small, tmp_path / "model", seed=0, dtype=DtypeName.FLOAT16, report=silent)
    index = json.loads((tmp_path / "model/model_index.json").read_text())
    assert index["text_encoder_3"] == index["tokenizer_3"] == [None, None]
    absent = {"text_encoder_3": None, "tokenizer_3": None}
    one, other = flow_images(DiffusionPipeline.from_pretrained(tmp_path / "model", local_files_only=True, **absent))
    assert (one - other).abs().max() > 0.01
    with pytest.raises(ModelError, match="has no T5"):
        ARCHITECTURES[FamilyName.SDXL].without_t5()


def flow_images(pipe):
    """Images of two prompts, with the same noise."""
    pipe.set_progress_bar_config(disable=True)
    asked = {"num_inference_steps": 1, "height": IMAGE_SIZE, "width": IMAGE_SIZE, "max_sequence_length": 32}
    prompts = ("a red apple", "a blue house at night")
    seed = torch.Generator().manual_seed
    return [pipe(text, output_type="pt", generator=seed(1), **asked).images for text in prompts]


@pytest.mark.parametrize("family", [FamilyName.SD15_CONTROLNET, FamilyName.SDXL_CONTROLNET])
def test_a_controlnet_has_residuals_that_depend_on_the_image(family, folder_of):
    """Its zero convolutions are not zero: another control image changes what it adds, and all of it is finite."""
    folder = folder_of(family)
    base = folder_of(FamilyName.SD15 if family is FamilyName.SD15_CONTROLNET else FamilyName.SDXL)
    config = json.loads((base / "unet/config.json").read_text())
    check_controlnet(folder, base=config, vae_factor=8)
    assert isinstance(load_controlnet(folder, dtype=torch.float32).model, ControlNetModel)
    net = ControlNetModel.from_pretrained(folder, local_files_only=True)
    rng = torch.Generator().manual_seed(1)
    width = net.config.cross_attention_dim
    inputs = {
        "sample": torch.randn(1, 4, 8, 8, generator=rng),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": torch.randn(1, 77, width, generator=rng),
        "added_cond_kwargs": {"text_embeds": torch.randn(1, 24, generator=rng), "time_ids": torch.ones(1, 6)},
    }
    maps = [torch.rand(1, 3, IMAGE_SIZE, IMAGE_SIZE, generator=rng) for _ in range(2)]
    with torch.inference_mode():
        one, two = ([*out[0], out[1]] for out in (net(**inputs, controlnet_cond=m, return_dict=False) for m in maps))
    assert all(torch.isfinite(residual).all() and residual.std() > 0.01 for residual in one)
    assert all((a - b).abs().max() > 1e-4 for a, b in zip(one, two, strict=True))


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    """Every file is the same for the same seed; another seed changes all weights and nothing else."""
    first, again, other = (
        hashes(write(FamilyName.SD15, tmp_path / str(i), seed=seed)) for i, seed in enumerate((3, 3, 4))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {
        name for name in first if name.endswith(".safetensors")
    }


@pytest.mark.parametrize("dtype", DtypeName)
def test_weights_are_scaled_by_their_fan_in(dtype, tmp_path):
    """A matrix has a standard deviation of 1/sqrt(fan-in), norms are the identity and biases 0, in every dtype."""
    weights = load_file(write(FamilyName.SD15, tmp_path / "model", dtype=dtype) / UNET)
    assert {str(value.dtype) for value in weights.values()} == {f"torch.{dtype}"}
    for key, value in weights.items():
        if value.ndim < 2:
            assert (value == float(key.endswith("weight"))).all(), key
        elif value.numel() >= 4096:
            spread = value.float().std().item() * math.sqrt(math.prod(value.shape[1:]))
            assert spread == pytest.approx(1, abs=0.1), key  # 9 standard errors of 4096 values


def test_half_precision_is_enough(folder_of):
    """The UNet's activations stay far below float16's maximum, so that nothing overflows at any dtype."""
    unet = UNet2DConditionModel.from_pretrained(folder_of(FamilyName.SD15) / "unet")
    largest = []
    for module in unet.modules():
        module.register_forward_hook(
            lambda _m, _i, out: largest.append(out.abs().max().item()) if isinstance(out, torch.Tensor) else None
        )
    with torch.inference_mode():
        rng = torch.Generator().manual_seed(1)
        unet(torch.randn(2, 4, 8, 8, generator=rng), 999, torch.randn(2, 77, 32, generator=rng))
    assert max(largest) < 1000


def test_the_tokenizer_reads_everything(tmp_path):
    """49,408 tokens as CLIP's; no text has unknown tokens, the text comes back, and prompts are cut at 77."""
    write_tokenizer(tmp_path / "tokenizer", pad_token="!")
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    assert (len(tokenizer), tokenizer.model_max_length, tokenizer.pad_token_id) == (49_408, 77, 0)
    text = "an astronaut riding a horse, größe 日本 🍎 x1"
    ids = tokenizer(text).input_ids
    assert (ids[0], ids[-1]) == (tokenizer.convert_tokens_to_ids(START), tokenizer.convert_tokens_to_ids(END))
    assert (ids[0], ids[-1]) == (49_406, 49_407)
    assert 49_407 not in ids[1:-1]
    assert tokenizer.decode(ids[1:-1]).replace(" ", "") == text.replace(" ", "")
    padded = tokenizer(text, padding="max_length", truncation=True).input_ids
    assert len(padded) == 77
    assert padded[-1] == 0
    assert len(tokenizer("horse " * 200, truncation=True).input_ids) == 77


def test_the_tokenizer_of_t5_reads_what_the_model_knows(tmp_path):
    """As many tokens as T5's own, whole words among them; text comes back, and what is in no piece is unknown."""
    write_t5_tokenizer(tmp_path / "tokenizer")
    tokenizer = T5TokenizerFast.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    assert (len(tokenizer), tokenizer.model_max_length) == (32_100, 512)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
    text = "An astronaut riding a horse, 8k!"
    ids = tokenizer(text, padding="max_length", max_length=64).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert "▁horse" in tokenizer.convert_ids_to_tokens(ids)
    assert tokenizer("日").input_ids[-2:] == [2, 1]


def test_large_tensors_are_drawn_in_pieces(tmp_path, monkeypatch):
    """A tensor longer than a piece is one stream of values, whatever stands before it in the file."""
    monkeypatch.setattr(writing, "CHUNK", 1000)
    first, second = (
        DrawnTensor(key="a", label="a", shape=(3,), mean=1.0),
        DrawnTensor(key="b", label="b", shape=(50, 70), std=2.0),
    )
    pieces = []
    for name, tensors in (("both", [first, second]), ("one", [second])):
        pieces += write_tensors(tmp_path / name, tensors, seed=1, dtype=DtypeName.FLOAT32, metadata={"format": "pt"})
    both, one = load_file(tmp_path / "both"), load_file(tmp_path / "one")
    assert torch.equal(both["b"], one["b"])
    assert torch.equal(both["a"], torch.ones(3))
    assert pieces == [12, 4000, 4000, 4000, 2000, 4000, 4000, 4000, 2000]
    assert both["b"].std().item() == pytest.approx(2, abs=0.2)
    assert both["b"].flatten().unique().numel() > 3400


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    """What is needed and what is free, in one sentence."""
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: SimpleNamespace(total=100, used=99, free=1))
    with pytest.raises(ModelError, match=r"needs 0\.0 GiB, and 0\.0 GiB are free there"):
        write(FamilyName.SD15, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_run_leaves_nothing(tmp_path):
    """Ctrl-C in the middle: neither the folder nor what was written so far is there."""

    def interrupt(name, written, total):
        if written > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(scaled_down(FamilyName.SD15), tmp_path / "model", seed=0, dtype=DtypeName.FLOAT16, report=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_no_hindrance(tmp_path):
    """In a container the next one has its process id."""
    (tmp_path / f".model.{os.getpid()}.partial" / "unet").mkdir(parents=True)
    write(FamilyName.SD15, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
