"""What Stable Diffusion 3 and FLUX.1 say of requests and folders before any weights are in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from plait_serving.diffusion.admission import ImageLimits, check_numbers, check_takes
from plait_serving.diffusion.errors import ModelError, RequestError
from plait_serving.diffusion.families.family import Family
from plait_serving.diffusion.knobs import ExecutorName
from plait_serving.diffusion.values import Edit, Scheduler, Sigmas
from support.denoise import make_request
from support.families import edit_json, opened
from support.flow_rig import MAKE
from support.tiny_flow import tiny_flux, tiny_sd3


@pytest.fixture(scope="module")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """``family_of(name)``: what is known of a tiny model."""
    found: dict[str, Family] = {}

    def get(name: str) -> Family:
        if name not in found:
            found[name] = opened(MAKE[name](tmp_path_factory.mktemp("models") / name))
        return found[name]

    return get


def asked(family: Family, **more: Any):
    """A request that the model takes, but for ``more``."""
    defaults = {"guidance_scale": family.terms.guidance_scale, "scheduler": Scheduler.EULER}
    return make_request(**{**defaults, **more})


def refused(family: Family, **more: Any) -> str:
    """The field by which a request is refused, by its terms or when it is measured."""
    request = asked(family, **more)
    with pytest.raises(RequestError) as caught:
        check_numbers(request, ImageLimits(), family.terms)
        family.measure(request)
    return str(caught.value.param)


IMAGE = np.zeros((32, 32, 3), np.uint8)


@pytest.mark.parametrize(("model", "more", "field"), [
    ("schnell", {"guidance_scale": 3.5}, "guidance_scale"),
    ("schnell", {"max_sequence_length": 257}, "max_sequence_length"),
    ("schnell", {"scheduler": Scheduler.DPMPP_2M}, "scheduler"),
    ("de-distilled", {"guidance_scale": 3.5}, "guidance_scale"),
    ("de-distilled", {"negative_prompt": "blue"}, "negative_prompt"),
    ("dev", {"negative_prompt": "blue"}, "negative_prompt"),
    ("dev", {"true_cfg_scale": 2.0}, "true_cfg_scale"),
    ("dev", {"scheduler": Scheduler.DDIM}, "scheduler"),
    ("dev", {"scheduler": Scheduler.UNIPC, "sigmas": Sigmas.KARRAS}, "sigmas"),
    ("dev", {"reference": IMAGE}, "image"),
    ("kontext", {"edit": Edit(image=IMAGE)}, "mask"),
    ("kontext", {"reference": IMAGE[:3]}, "image"),
    ("sd3", {"clip_skip": 3}, "clip_skip"),
    ("sd3", {"width": 132}, "size"),
    ("sd3", {"edit": Edit(image=IMAGE), "scheduler": Scheduler.UNIPC}, "scheduler"),
    ("sd3", {"prompt": "red " * 300}, "prompt"),
    ("sd3", {"negative_prompt": "red " * 300}, "negative_prompt"),
    ("dev", {"prompt_2": "red " * 600}, "prompt_2"),
    ("dev", {"negative_prompt": "blue", "negative_prompt_2": "red " * 600, "true_cfg_scale": 2.0}, "negative_prompt_2"),
    ("dev", {"prompt": "red " * 80, "prompt_2": "red"}, "prompt"),
    ("sd3", {"prompt_2": "red " * 80}, "prompt_2"),
])  # fmt: skip
def test_what_means_nothing_to_a_model_is_refused_by_field(family_of, model, more, field):
    """Fields, samplers and sizes of other models, and values that mean nothing together."""
    assert refused(family_of(model), **more) == field


def test_what_a_request_comes_to(family_of):
    """Rows, tokens, and what it must agree in with others to share a call: not in guidance."""
    sd3, dev = family_of("sd3"), family_of("dev")
    guided, plain = (sd3.measure(asked(sd3, guidance_scale=scale, max_sequence_length=20)) for scale in (5.0, 1.0))
    assert (guided.rows, plain.rows) == (2, 1)
    assert (guided.shape, guided.row) == (plain.shape, plain.row)
    assert guided.row.size == 64 + 77 + 20
    true_cfg = dev.measure(asked(dev, true_cfg_scale=2.0, negative_prompt="blue", max_sequence_length=20))
    distilled = dev.measure(asked(dev, prompt="a red cat", max_sequence_length=20))
    assert (true_cfg.rows, distilled.rows) == (2, 1)
    assert (true_cfg.shape, true_cfg.row) == (distilled.shape, distilled.row)
    assert distilled.words["prompt"] == len(["▁", "a", "▁red", "▁cat"])
    longer = dev.measure(asked(dev, max_sequence_length=21))
    assert longer.shape != distilled.shape


def test_the_terms_are_those_of_the_models_pipelines(family_of):
    """Steps, guidance, the fields that mean something, images, and what LoRAs and ControlNets are made for."""
    names = ("sd3", "dev", "schnell", "kontext", "de-distilled")
    terms = {name: family_of(name).terms for name in names}
    assert {name: (each.steps, each.guidance_scale) for name, each in terms.items()} == {
        "sd3": (28, 7.0), "dev": (28, 3.5), "schnell": (4, 0.0), "kontext": (28, 3.5), "de-distilled": (28, 0.0)
    }  # fmt: skip
    schnell = {"prompt_2", "max_sequence_length"}
    guided = schnell | {"negative_prompt", "negative_prompt_2"}
    assert {name: each.takes for name, each in terms.items()} == {
        "sd3": guided | {"guidance_scale", "clip_skip"}, "dev": guided | {"guidance_scale", "true_cfg_scale"},
        "schnell": schnell, "kontext": guided | {"guidance_scale", "true_cfg_scale"},
        "de-distilled": guided | {"true_cfg_scale"},
    }  # fmt: skip
    assert [name for name, each in terms.items() if each.reads_images] == ["kontext"]
    assert [family_of(name).kind for name in names] == ["sd3"] + ["flux1"] * 4
    assert {(family_of(name).width, family_of(name).size_multiple) for name in names} == {(32, 4), (256, 4)}
    with pytest.raises(ModelError, match="flux1 models take no ControlNets"):
        family_of("dev").controlnet("edges", Path("folder"))


@pytest.mark.parametrize(
    ("model", "more", "rows", "size"),
    [
        ("sd3", {"width": 128, "height": 128, "max_sequence_length": 512}, 2, 32**2 + 77 + 512),  # all that it takes
        ("sd3", {"max_sequence_length": 1, "prompt": ""}, 2, 8**2 + 77 + 1),
        # Clients that always send a scale send one that changes nothing where there is none.
        *[(model, {"guidance_scale": scale, "max_sequence_length": 16}, 1, 8**2 + 16)
          for model in ("schnell", "de-distilled") for scale in (0.0, 1.0)],
        # Dev without its input is guided by a negative prompt, and reads texts as long as dev does.
        ("de-distilled", {"true_cfg_scale": 2.0, "negative_prompt": "blue", "max_sequence_length": 512}, 2, 64 + 512),
    ],
)  # fmt: skip
def test_bounds_are_taken(family_of, model, more, rows, size):
    """The largest, the longest, the least; and guidance by a model's own means."""
    family = family_of(model)
    request = asked(family, **more)
    check_takes(request, family.terms)
    measured = family.measure(request)
    assert (measured.rows, measured.row.size) == (rows, size)


@pytest.mark.parametrize("make", [tiny_sd3, tiny_flux])
def test_openvino_by_name_is_an_error(make, tmp_path):
    """It was asked for, and does not run these."""
    folder = make(tmp_path / "model")
    with pytest.raises(ModelError, match="executor: openvino cannot be used"):
        opened(folder, executor=ExecutorName.OPENVINO)


@pytest.mark.parametrize(("changes", "why"), [
    ({"transformer": {"in_channels": 384}}, "FLUX.1 Fill"),
    ({"transformer": {"in_channels": 128}}, "FLUX.1 Canny or Depth"),
    ({"transformer": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "quantized by bitsandbytes"),
    ({"text_encoder_2": {"quantization_config": {"quant_method": "gguf"}}}, "quantized by gguf"),
    ({"transformer": {"joint_attention_dim": 48}}, "joint_attention_dim is 48; .* make 32"),
    ({"scheduler": {"_class_name": "EulerDiscreteScheduler"}}, "FlowMatchEulerDiscreteScheduler is"),
    ({"scheduler": {"shift_terminal": 0.02}}, "shift_terminal = 0.02"),
])  # fmt: skip
def test_what_only_looks_alike_is_refused_by_name(tmp_path, changes, why):
    """Inputs of other kinds, quantized weights, parts of another model: each with its file."""
    folder = tiny_flux(tmp_path / "model")
    for part, values in changes.items():
        edit_json(folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json"), **values)
    with pytest.raises(ModelError, match=why) as caught:
        opened(folder)
    assert next(iter(changes)) in caught.value.message


def test_an_fp8_checkpoint_is_refused_by_name(tmp_path):
    """Weights that torch would widen are not what their model computes with."""
    folder = tiny_flux(tmp_path / "model")
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=r"proj_out\.weight is F8_E4M3: an fp8 checkpoint"):
        opened(folder)


@pytest.mark.parametrize("part", ["text_encoder_2", "tokenizer_2", "vae"])
def test_a_missing_part_is_named(tmp_path, part):
    """A folder that was copied in part."""
    folder = tiny_flux(tmp_path / "model")
    (folder / part).rename(tmp_path / "aside")
    with pytest.raises(ModelError, match=rf"{part}: missing"):
        opened(folder)


@pytest.mark.parametrize(
    ("make", "part"), [(tiny_flux, "text_encoder_2"), (tiny_flux, "text_encoder"), (tiny_sd3, "text_encoder_2")]
)
def test_a_part_that_was_saved_as_none_is_named(make, part, tmp_path):
    """By pipelines whose text encoder was left out: only Stable Diffusion 3 can do without one, its T5."""
    folder = make(tmp_path / "model")
    (folder / part).rename(tmp_path / "aside")
    edit_json(folder / "model_index.json", **{part: [None, None]})
    with pytest.raises(ModelError, match=rf"{part}: missing"):
        opened(folder)
