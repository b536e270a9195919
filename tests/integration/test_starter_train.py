"""The training program of the starter models: every stage runs, resumes, and what it writes loads."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, StableDiffusionControlNetPipeline
from safetensors.torch import load_file
from torch import nn

from plait_serving.starter.manifest import manifest_problems
from plait_serving.starter.references import load_references
from starter_training import __main__ as command
from starter_training.__main__ import train_all
from starter_training.data import NpmUnavailableError, TrainingImages, load_images
from starter_training.loop import FULL, STAGES, StageRecipe, Trainer, override, smoke_plan
from starter_training.text import LENGTH, build_tokenizer
from starter_training.vae import scaled_latents

NAMES = ("red apple", "rocket", "blue ball", "green box", "yellow sun", "pink pig")


@pytest.fixture(autouse=True)
def one_thread():
    """Two cores are shared with other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(seed: int) -> np.ndarray:
    """Six images of one coloured box each, ``uint8[6, 64, 64, 3]``."""
    rng = np.random.default_rng(seed)
    made = np.full((len(NAMES), 64, 64, 3), 255, dtype=np.uint8)
    for image in made:
        y, x = rng.integers(4, 28, 2)
        image[y : y + 30, x : x + 30] = rng.integers(0, 200, 3)
    return made


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Every stage for two steps on six drawn images: (folder of the bundle, of the checkpoints, outcomes)."""
    work, out = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("out")
    images = TrainingImages(names=NAMES, twemoji=drawn(1), noto=drawn(2))
    outcomes = train_all(images, smoke_plan(steps=2), work, out, STAGES)
    return out, work, outcomes, images


def test_every_stage_runs_and_the_bundle_is_complete(bundle):
    """All stages end with a finite loss; the manifest fits the files; references name all concepts."""
    out, _, outcomes, _ = bundle
    assert set(outcomes) == set(FULL)
    assert all(math.isfinite(outcome.loss) for outcome in outcomes.values())
    assert manifest_problems(out) == []
    assert load_references(out).names == NAMES


def test_diffusers_loads_the_bundle_and_all_lora_keys(bundle):
    """The stock pipeline loads base, ControlNet and each LoRA with every tensor placed, and makes an image."""
    out = bundle[0]
    net = ControlNetModel.from_pretrained(out / "controlnets" / "edges")
    pipe = StableDiffusionControlNetPipeline.from_pretrained(out / "emoji", controlnet=net)
    pipe.set_progress_bar_config(disable=True)
    for name in ("noto", "sketch", "pixel"):
        pipe.load_lora_weights(out / "loras", weight_name=f"{name}.safetensors", adapter_name=name)
        stored = load_file(out / "loras" / f"{name}.safetensors")
        placed = [key for part in (pipe.unet, pipe.text_encoder) for key, _ in part.named_parameters()]
        factors = [key for key in stored if not key.endswith(".alpha")]
        assert sum(f".{name}." in key for key in placed) == len(factors) > 0
    control = torch.rand(1, 3, 64, 64)
    made = pipe("red apple", image=control, num_inference_steps=2, height=64, width=64, output_type="np").images
    assert made.shape == (1, 64, 64, 3)
    assert np.isfinite(made).all()


def test_the_autoencoder_that_is_written_scales_latents_to_deviation_one(bundle):
    """Its scaling factor is the one that was measured, and not the default of its class."""
    out, _, _, images = bundle
    vae = AutoencoderKL.from_pretrained(out / "emoji" / "vae")
    with torch.no_grad():
        assert float(scaled_latents(vae, images.twemoji).std()) == pytest.approx(1.0, abs=0.02)


def test_a_second_run_trains_nothing_and_writes_the_same(bundle, tmp_path):
    """With all checkpoints there, the program goes straight to the export, and weights are equal bit for bit."""
    out, work, outcomes, images = bundle
    again = train_all(images, smoke_plan(steps=2), work, tmp_path, STAGES)
    assert {name: done.seconds_s for name, done in again.items()} == {n: o.seconds_s for n, o in outcomes.items()}
    for part in ("emoji/unet/diffusion_pytorch_model", "loras/noto", "controlnets/edges/diffusion_pytorch_model"):
        first, second = (load_file(folder / f"{part}.safetensors") for folder in (out, tmp_path))
        assert all(torch.equal(first[key], second[key]) for key in first)


def fit(path: Path, steps: int, stop_at: int | None = None) -> dict[str, torch.Tensor]:
    """Train a small layer; ``stop_at`` interrupts it as Ctrl-C would."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def loss(step: int, generator: torch.Generator) -> torch.Tensor:
        if step == stop_at:
            raise KeyboardInterrupt
        x = torch.randn(8, 4, generator=generator)
        return ((layer(x) - x.flip(1)) ** 2).mean()

    trainer = Trainer(layer, StageRecipe(steps=steps, batch=8, rate=0.1), path, save_every_s=0.0)
    trainer.run(loss)
    return layer.state_dict()


def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    """Stopped at step 5 of 12 and started again, training gives bit-identical weights."""
    whole = fit(tmp_path / "whole.pt", 12)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "cut.pt", 12, stop_at=5)
    assert torch.load(tmp_path / "cut.pt", weights_only=True)["step"] == 5
    resumed = fit(tmp_path / "cut.pt", 12)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_the_tokenizer_knows_every_byte_and_pads_to_77():
    """Names become few tokens, foreign letters are no unknowns, and the end token has the highest id."""
    tokenizer = build_tokenizer(NAMES)
    ids = tokenizer("red apple", padding="max_length", max_length=LENGTH).input_ids
    assert len(ids) == LENGTH
    assert ids.index(tokenizer.eos_token_id) <= 4
    assert tokenizer.eos_token_id == len(tokenizer) - 1
    assert tokenizer.unk_token_id not in tokenizer("Zürich é 7 q", add_special_tokens=False).input_ids


def test_overrides_change_one_number_and_refuse_nonsense():
    """``--set base.steps=7`` changes that alone; unknown stages and fields raise."""
    plan = override(FULL, ["base.steps=7"])
    assert plan["base"].steps == 7
    assert plan["edges"] == FULL["edges"]
    for wrong in ("bass.steps=7", "base.stops=7", "base.steps=", "base.steps=0"):
        with pytest.raises(ValueError, match=r"expected|impossible"):
            override(FULL, [wrong])


def test_what_was_written_is_measured_if_asked_for(tmp_path, monkeypatch, capsys):
    """By `plait models verify` of the folder, whose exit code is the command's: here it finds no bundle."""
    monkeypatch.setattr(command, "load_images", lambda *_: None)
    monkeypatch.setattr(command, "train_all", lambda *_: None)
    given = ["--smoke", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    assert command.main(given) == 0
    assert command.main([*given, "--verify"]) == 1
    assert str(tmp_path / "out") in capsys.readouterr().err


@pytest.mark.slow  # what npm takes
def test_the_artwork_comes_from_npm():
    """Names that differ, with an image of each style."""
    cache = Path(os.environ.get("PLAIT_STARTER_CACHE", "~/.cache/plait/starter")).expanduser()
    try:
        images = load_images(cache, command.SMOKE_COUNT)
    except (NpmUnavailableError, OSError) as error:
        pytest.skip(f"the emoji packages cannot be had: {error}")
    assert len(set(images.names)) == command.SMOKE_COUNT
    for style in (images.twemoji, images.noto):
        assert (style.shape, style.dtype) == ((command.SMOKE_COUNT, 64, 64, 3), np.uint8)
        assert (style.reshape(len(style), -1).std(axis=1) > 1).all()
