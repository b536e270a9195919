"""Modules from files: the fast path gives what the library's own loader gives."""

from __future__ import annotations

import json

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


def equal(ours, theirs):
    """Assert equal tensors in equal modules with equal settings."""
    stored = theirs.state_dict()
    assert list(ours.state_dict()) == list(stored)
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor, stored[name])
    assert {**ours.config} == {**theirs.config}
    assert not any(module.training for module in ours.modules())
    assert not list(ours.buffers())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fast_path_is_the_librarys_loader(part, tmp_path, monkeypatch, stored, dtype):
    """From files of the same and of another dtype, and the library is not asked."""
    kind, folder = part
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / FILE).items()}
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    theirs = kind.from_pretrained(str(tmp_path), dtype=dtype)
    monkeypatch.setattr(kind, "from_pretrained", None)
    ours = load_module(kind, find_weights(tmp_path), dtype, CPU)
    equal(ours, theirs)
    assert not any(parameter.requires_grad or parameter.is_inference() for parameter in ours.parameters())


def test_shards_are_read_alike(part, tmp_path, monkeypatch):
    """As many files as the library writes."""
    kind, folder = part
    theirs = kind.from_pretrained(folder)
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    monkeypatch.setattr(kind, "from_pretrained", None)
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


def test_other_threads_keep_their_number_of_threads(tiny_sd_folder):
    """Readers compute alone; what a thread starts with afterwards is what it was before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        load_module(UNet2DConditionModel, find_weights(tiny_sd_folder / "unet"), torch.bfloat16, CPU)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
