"""Merged weights against diffusers' own: `load_lora_weights` + `fuse_lora` on tiny SD and SDXL models."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file
from torch import nn

from plait_serving.diffusion.lora.key_formats import LoraFormat
from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.values import LoraRef
from support.loras import shapes_of, snapshot, write
from support.tiny import tiny_lora

torch.set_num_threads(1)

PARTS = ("unet", "text_encoder", "text_encoder_2")
# Both sum in fp32, in another order; weights are about 0.1.
CLOSE = 2e-6


@functools.cache
def _loaded(folder: Path):
    kind = StableDiffusionXLPipeline if (folder / "text_encoder_2").is_dir() else StableDiffusionPipeline
    return kind.from_pretrained(folder, local_files_only=True)


def pipeline(folder: Path):
    """The folder as diffusers loads it; every call has weights of its own."""
    pipe = _loaded(folder)
    parts = {name: copy.deepcopy(part) if name in PARTS else part for name, part in pipe.components.items()}
    options = {} if isinstance(pipe, StableDiffusionXLPipeline) else {"requires_safety_checker": False}
    return type(pipe)(**parts, **options)


def components(pipe) -> dict[str, nn.Module]:
    """The parts that LoRAs act on."""
    return {name: getattr(pipe, name) for name in PARTS if getattr(pipe, name, None) is not None}


def fused(folder: Path, files: dict[str, Path], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """What diffusers makes of a set of files."""
    pipe = pipeline(folder)
    for name, path in files.items():
        pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=name)
    pipe.set_adapters(list(scales), list(scales.values()))
    pipe.fuse_lora(components=list(components(pipe)), adapter_names=list(scales))
    pipe.unload_lora_weights()
    return snapshot(components(pipe))


def merged(folder: Path, files: dict[str, Path], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """What we make of it; checks that a restore leaves no trace."""
    parts = components(pipeline(folder))
    before = snapshot(parts)
    targets, merger = LoraTargets.of(parts), Merger(parts)
    weights = {name: parse(name, path, targets) for name, path in files.items()}
    merger.switch(tuple(LoraRef(name=name, scale=scale) for name, scale in scales.items()), weights)
    after = snapshot(parts)
    merger.switch((), {})
    assert all(torch.equal(value, before[key]) for key, value in snapshot(parts).items())
    return after


def check(folder: Path, files: dict[str, Path], scales: dict[str, float]) -> None:
    """Same parameters, same values; and as many weights as the first file names really moved, so that equality means
    something."""
    theirs, ours = fused(folder, files, scales), merged(folder, files, scales)
    assert ours.keys() == theirs.keys()
    worst = max((float((ours[key] - theirs[key]).abs().max()), key) for key in ours)
    assert worst[0] <= CLOSE, worst
    base = snapshot(components(pipeline(folder)))
    moved = [key for key in ours if float((ours[key] - base[key]).abs().max()) > 100 * CLOSE]
    named = load_file(next(iter(files.values())))
    downs = (".lora_A.weight", ".lora_down.weight", ".down.weight")
    assert len(moved) == sum(key.endswith(downs) for key in named)


@pytest.fixture(params=["sd", "sdxl"])
def folder(request) -> Path:
    """Both families."""
    return request.getfixturevalue(f"tiny_{request.param}_folder")


def test_a_file_that_diffusers_saved_with_its_config(tmp_path, tiny_sd_folder):
    """lora_alpha, rank_pattern and alpha_pattern of the saved LoraConfig act as in diffusers."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = pipeline(tiny_sd_folder)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        rank_pattern={"to_k": 2},
        alpha_pattern={"to_v": 3.0, "mid_block.attentions.0.transformer_blocks.0.attn1.to_q": 1.0},
        target_modules=["to_q", "to_k", "to_v", "conv1"],
        init_lora_weights=False,
    )
    pipe.unet.add_adapter(config)
    layers = get_peft_model_state_dict(pipe.unet)
    adapter = pipe.unet.peft_config["default"].to_dict()
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers, unet_lora_adapter_metadata=adapter)
    check(tiny_sd_folder, {"a": tmp_path / "pytorch_lora_weights.safetensors"}, {"a": 0.7})


def test_old_attention_processor_files(tmp_path, tiny_sd_folder):
    """`unet....processor.to_q_lora.down.weight`, what diffusers wrote before PEFT."""
    new = load_file(tiny_lora(tmp_path / "new.safetensors", tiny_sd_folder, seed=6))
    old = {}
    for key, value in new.items():
        if ".attn" in key:
            module, way = key.rsplit(".lora_", 1)
            parent, leaf = module.replace(".to_out.0", ".to_out").rsplit(".", 1)
            old[f"{parent}.processor.{leaf}_lora.{'down' if way[0] == 'A' else 'up'}.weight"] = value
    check(tiny_sd_folder, {"a": write(tmp_path / "old.safetensors", old)}, {"a": 1.0})


def sgm_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """A kohya SDXL file as kohya's trainer names it: SGM block numbers, written out by hand for the tiny UNet.

    layers_per_block is 2, so blocks begin at every third number; the second block has attention.
    """
    generator = torch.Generator().manual_seed(8)
    named = {
        "input_blocks_1_0_in_layers_2": "down_blocks.0.resnets.0.conv1",
        "input_blocks_3_0_op": "down_blocks.0.downsamplers.0.conv",
        "input_blocks_4_1_proj_in": "down_blocks.1.attentions.0.proj_in",
        "input_blocks_5_1_transformer_blocks_1_attn2_to_k":
            "down_blocks.1.attentions.1.transformer_blocks.1.attn2.to_k",
        "middle_block_1_transformer_blocks_0_attn1_to_out_0":
            "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0",
        "output_blocks_2_2_conv": "up_blocks.0.upsamplers.0.conv",
        "time_embed_0": "time_embedding.linear_1",
        "label_emb_0_2": "add_embedding.linear_2",
        "out_2": "conv_out",
    }  # fmt: skip
    shapes = shapes_of(pipeline(folder).unet)
    tensors = {}
    for sgm, module in named.items():
        rows, columns, *kernel = shapes[module]
        name = f"lora_unet_{sgm}"
        tensors[f"{name}.lora_down.weight"] = torch.randn(2, columns, *kernel, generator=generator)
        tensors[f"{name}.lora_up.weight"] = torch.randn(rows, 2, *(1 for _ in kernel), generator=generator) * 0.1
        tensors[f"{name}.alpha"] = torch.tensor(1.0)
    return tensors


def test_sgm_block_numbers(tmp_path, tiny_sdxl_folder):
    """kohya's SDXL files count blocks as the original UNet does; the same weights move as in diffusers."""
    path = write(tmp_path / "a.safetensors", sgm_tensors(tiny_sdxl_folder))
    check(tiny_sdxl_folder, {"a": path}, {"a": 1.0})
    targets = LoraTargets.of(components(pipeline(tiny_sdxl_folder)))
    assert parse("a", path, targets).format is LoraFormat.KOHYA


def test_every_module_has_one_meaning_per_name(folder):
    """No two modules share a spelling in any layout, in either family, and every UNet block has an original name."""
    targets = LoraTargets.of(components(pipeline(folder)))
    modules = {(ref.component, ref.module) for ref in targets.parameters}
    count = sum(1 for component, _ in modules if component == "unet")
    kohya = [name for name in targets.names[LoraFormat.KOHYA] if name.startswith("lora_unet_")]
    comfyui = [name for name in targets.names[LoraFormat.COMFYUI] if name.startswith("diffusion_model.")]
    assert (len(kohya), len(comfyui)) == (2 * count, count)
    spelled = [name for names in targets.names.values() for name in names]
    assert len(set(spelled)) == len(spelled)
