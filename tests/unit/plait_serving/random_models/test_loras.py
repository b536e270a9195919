"""Random LoRAs: read by plait and by diffusers with PEFT, and both make the same weights of them."""

from __future__ import annotations

import pytest
import torch
from diffusers import DiffusionPipeline

from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.lora.container import inspect
from plait_serving.diffusion.lora.key_formats import format_of_keys
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.random_models import DtypeName, LoraSpelling
from plait_serving.random_models.loras import write_lora
from plait_serving.random_models.write import write_model


def silent(name, written, total):
    """No progress."""


def write(family, path, *, spelling, rank=3, seed=1):
    write_lora(
        scaled_down(family), path, spelling=spelling, rank=rank, seed=seed, dtype=DtypeName.FLOAT32, report=silent
    )
    return path


@pytest.fixture(scope="module", params=[FamilyName.SD15, FamilyName.SDXL])
def base(request, tmp_path_factory):
    """A scaled-down base, as diffusers loads it; SD 2 has linear layers around attention as SDXL, and one encoder."""
    folder = tmp_path_factory.mktemp("random") / "model"
    write_model(scaled_down(request.param), folder, seed=0, dtype=DtypeName.FLOAT32, report=silent)
    return request.param, DiffusionPipeline.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("spelling", LoraSpelling)
def test_plait_and_diffusers_read_the_same_lora(base, spelling, tmp_path):
    """Every key means a layer to both, and the weights after diffusers fused it are those that the factors say."""
    family, pipe = base
    path = write(family, tmp_path / "lora.safetensors", spelling=spelling)
    names = [name for name in ("unet", "text_encoder", "text_encoder_2") if hasattr(pipe, name)]
    modules = {name: getattr(pipe, name) for name in names}
    lora = parse("lora", path, LoraTargets.of(modules))
    assert format_of_keys(inspect(path, max_bytes=1 << 20).tensors) == spelling
    assert {ref.component for ref in lora.factors} == set(names)
    before = {ref: modules[ref.component].get_submodule(ref.module).weight.detach().clone() for ref in lora.factors}
    pipe.load_lora_weights(path.parent, weight_name=path.name)
    pipe.fuse_lora(components=names)
    pipe.unload_lora_weights()
    try:
        for ref, factor in lora.factors.items():
            after = modules[ref.component].get_submodule(ref.module).weight.detach()
            delta = factor.alpha / factor.rank * factor.product(after).reshape(after.shape)
            assert torch.allclose(after, before[ref] + delta, atol=1e-5), ref
            assert 0.01 < delta.std() / before[ref].std() < 0.3, ref
    finally:
        for ref, weight in before.items():
            modules[ref.component].get_submodule(ref.module).weight.data.copy_(weight)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    """A file is the same for the same seed, and differs for another."""
    one, again, other = (
        write(FamilyName.SD15, tmp_path / f"{i}.safetensors", spelling=LoraSpelling.KOHYA, seed=seed).read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert one == again
    assert len(one) == len(other)
    assert one != other


def test_mistakes_are_named(tmp_path):
    """A rank that cannot be, a ControlNet, and a file that is there."""
    path = tmp_path / "lora.safetensors"
    for rank in (0, 5000):
        with pytest.raises(LoraError, match=f"rank {rank} is not between 1 and 4096"):
            write(FamilyName.SD15, path, spelling=LoraSpelling.PEFT, rank=rank)
    with pytest.raises(LoraError, match="not for a ControlNet"):
        write(FamilyName.SD15_CONTROLNET, path, spelling=LoraSpelling.PEFT)
    path.write_bytes(b"mine")
    with pytest.raises(ModelError, match="exists already"):
        write(FamilyName.SD15, path, spelling=LoraSpelling.PEFT)
    assert path.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [path]
