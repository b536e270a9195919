"""Merged weights against diffusers' own: `load_lora_weights` + `fuse_lora` on tiny SD and SDXL models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file
from torch import nn

from plait_serving.diffusion.lora.key_formats import Blocks, LoraFormat, format_of, spellings
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.targets import LoraTargets
from support.ldm import original_names
from support.loras import factors, kohya_tensors, merged, shapes_of, snapshot, write

torch.set_num_threads(1)

PARTS = ("unet", "text_encoder", "text_encoder_2")
# Both sum in fp32, in another order; weights are about 0.1.
CLOSE = 2e-6


def pipeline(folder: Path):
    """The folder as diffusers loads it."""
    kind = StableDiffusionXLPipeline if (folder / "text_encoder_2").is_dir() else StableDiffusionPipeline
    return kind.from_pretrained(folder, local_files_only=True)


def components(pipe) -> dict[str, nn.Module]:
    """The parts that LoRAs act on."""
    return {name: getattr(pipe, name) for name in PARTS if getattr(pipe, name, None) is not None}


def check(folder: Path, path: Path, scale: float) -> LoadedLora:
    """Same parameters, same values; and as many weights as the file names really moved, so that equality means
    something."""
    pipe = pipeline(folder)
    parts = components(pipe)
    base, lora = snapshot(parts), parse("a", path, LoraTargets.of(parts))
    ours = merged(parts, lora, scale)
    pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name="a")
    pipe.set_adapters(["a"], [scale])
    pipe.fuse_lora(components=list(parts), adapter_names=["a"])
    pipe.unload_lora_weights()
    theirs = snapshot(components(pipe))
    assert ours.keys() == theirs.keys()
    worst = max((float((ours[key] - theirs[key]).abs().max()), key) for key in ours)
    assert worst[0] <= CLOSE, worst
    moved = [key for key in ours if float((ours[key] - base[key]).abs().max()) > 100 * CLOSE]
    assert len(moved) == sum(key.endswith((".lora_A.weight", ".lora_down.weight")) for key in load_file(path))
    return lora


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
    check(tiny_sd_folder, tmp_path / "pytorch_lora_weights.safetensors", 0.7)


def test_sgm_block_numbers(tmp_path, tiny_sdxl_folder):
    """kohya's SDXL files count blocks as the original UNet does; the same weights move as in diffusers."""
    unet = pipeline(tiny_sdxl_folder).unet
    names = original_names(unet.state_dict(), unet.config["layers_per_block"])
    made = factors(shapes_of(unet), alpha=1.0)
    renamed = {names[f"{module}.weight"].removesuffix(".weight"): factor for module, factor in made.items()}
    path = write(tmp_path / "a.safetensors", kohya_tensors(renamed))
    check(tiny_sdxl_folder, path, 1.0)


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_every_module_has_one_meaning_per_name(model, request):
    """No two modules share a spelling in any layout, in either family, and every UNet block has an original name."""
    targets = LoraTargets.of(components(pipeline(request.getfixturevalue(f"tiny_{model}_folder"))))
    modules = {(ref.component, ref.module) for ref in targets.parameters}
    count = sum(1 for component, _ in modules if component == "unet")
    kohya = [name for name in targets.names if name.startswith("lora_unet_")]
    comfyui = [name for name in targets.names if name.startswith("diffusion_model.")]
    assert (len(kohya), len(comfyui)) == (2 * count, count)
    assert {format_of(name) for name in targets.names} == {*LoraFormat} - {LoraFormat.XLABS}
    blocks = Blocks.of([path for component, path in modules if component == "unet"])
    spelled = [name for component, path in modules for name in spellings(component, path, blocks)]
    assert len(spelled) == len(targets.names)
