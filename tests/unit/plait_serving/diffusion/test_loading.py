"""Modules from files: every weight, in the dtype that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from safetensors.torch import load_file, save_file

from plait_serving.diffusion.errors import ModelError
from plait_serving.diffusion.loading import load_module
from plait_serving.diffusion.weight_files import find_weights

CPU = torch.device("cpu")
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(params=[UNet2DConditionModel, AutoencoderKL, ControlNetModel])
def part(request, tiny_sd_folder, tiny_sd_controlnets):
    """A class of diffusers with a folder of its weights."""
    folders = {UNet2DConditionModel: tiny_sd_folder / "unet", AutoencoderKL: tiny_sd_folder / "vae"}
    return request.param, folders.get(request.param, tiny_sd_controlnets[0])


def is_mapped(tensor, path):
    """Whether a tensor's memory is the file's."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    places = [range(*(int(end, 16) for end in line[0].split("-"))) for line in lines]
    return any(tensor.data_ptr() in place for place in places)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_the_files(part, tmp_path, stored, dtype):
    """From files of the same and of another dtype; what has the dtype takes no memory of its own."""
    kind, folder = part
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / FILE).items()}
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    ours = load_module(kind, find_weights(tmp_path), dtype, CPU)
    found = ours.state_dict()
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())
    assert not any(module.training for module in ours.modules())
    assert not any(parameter.requires_grad or parameter.is_inference() for parameter in ours.parameters())
    assert all(is_mapped(tensor, tmp_path / FILE) for tensor in found.values()) is (stored is dtype)


def test_shards_are_read_alike(part, tmp_path):
    """As many files as the library writes."""
    kind, folder = part
    theirs = kind.from_pretrained(folder)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_module(kind, find_weights(tmp_path), torch.float32, CPU)
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


def test_old_names_are_left_to_the_library(tiny_sd_folder, tmp_path):
    """Attention of early VAEs has other names, which its loader knows."""
    folder = tiny_sd_folder / "vae"
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = {}
    for name, tensor in load_file(folder / FILE).items():
        old = [name.replace(f".{new}.", f".{early}.") for new, early in names.items() if f".{new}." in name]
        tensors[(old or [name])[0]] = tensor
    assert any(".query." in name for name in tensors)
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    ours = load_module(AutoencoderKL, find_weights(tmp_path), torch.float32, CPU)
    theirs = AutoencoderKL.from_pretrained(folder).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def test_weights_of_another_shape_are_refused(tiny_sd_folder, tmp_path):
    """The folder is named, and the weight."""
    config = json.loads((tiny_sd_folder / "vae" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "latent_channels": 3}))
    (tmp_path / FILE).write_bytes((tiny_sd_folder / "vae" / FILE).read_bytes())
    with pytest.raises(ModelError, match="conv") as caught:
        load_module(AutoencoderKL, find_weights(tmp_path), torch.float32, CPU)
    assert str(tmp_path) in caught.value.message
