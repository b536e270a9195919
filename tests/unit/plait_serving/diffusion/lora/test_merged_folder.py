"""A base model with LoRAs in its weights: the files' own names and dtype, sums rounded once, all else as it was."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from diffusers import StableDiffusionPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.lora.merged_folder import LoraFile, write_merged
from plait_serving.diffusion.published.architectures import FamilyName
from plait_serving.diffusion.published.scaled import scaled_down
from plait_serving.random_models import DtypeName
from plait_serving.random_models.write import write_model
from support.bundles import load_bundle
from support.loras import delta, factors, kohya_tensors, write
from support.original_flow import original_transformer
from support.tiny import tiny_lora, tiny_sd

UNET = "unet/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """float16 files; the text encoder's names are those of published files."""
    folder = tiny_sd(tmp_path_factory.mktemp("merged") / "base", dtype=torch.float16)
    published = {
        name if name.startswith("text_model.") else f"text_model.{name}": tensor
        for name, tensor in load_file(folder / TEXT).items()
    }
    save_file(published, folder / TEXT, metadata={"format": "pt"})
    return folder


def lora(base, folder, **options) -> LoraFile:
    return LoraFile(name="one", path=tiny_lora(folder / "one.safetensors", base, **options), scale=0.7)


def products(path) -> dict[str, torch.Tensor]:
    """B @ A of every module of a PEFT file, in float64."""
    tensors = load_file(path)
    found = {}
    for key, down in tensors.items():
        if "lora_A" in key:
            up = tensors[key.replace("lora_A", "lora_B")]
            module = key.removesuffix(".lora_A.weight").replace("text_model.", "")
            found[module] = up.double().flatten(1) @ down.double().flatten(1)
    return found


def test_weights_are_the_exact_sums_rounded_once(base, tmp_path):
    """Every weight that the file touches is within the tolerance that is reported; every other has its bits."""
    file = lora(base, tmp_path, conv=True, with_text_encoder=True)
    parts = write_merged(base, [file], tmp_path / "out")
    deltas, seen = products(file.path), 0
    assert [(part.component, part.dtype) for part in parts] == [("unet", "float16"), ("text_encoder", "float16")]
    for name, part in zip((UNET, TEXT), parts, strict=True):
        before, after = load_file(base / name), load_file(tmp_path / "out" / name)
        assert before.keys() == after.keys()
        for key, was in before.items():
            delta = deltas.get(f"{part.component}.{key.removesuffix('.weight').removeprefix('text_model.')}")
            if delta is None:
                assert torch.equal(after[key], was)
                continue
            seen += 1
            exact = was.double() + file.scale * delta.reshape(was.shape)
            off = (after[key].double() - exact).abs()
            assert bool((off <= exact.abs() * part.tolerance * 1.01 + 2e-7).all())  # sums are made in float32
            assert not torch.equal(after[key], was)
    assert seen == sum(part.changed for part in parts) == len(deltas)


def test_biases_and_norms_are_moved(base, tmp_path):
    """Differences are added to biases and norms under the names of the files, rounded once; all else has its bits."""
    tensors = {
        "lora_unet_conv_in.diff_b": torch.full((16,), 0.25),
        "lora_unet_conv_norm_out.w_norm": torch.full((16,), -0.5),
        "lora_te_text_model_final_layer_norm.b_norm": torch.full((32,), 0.125),
    }
    save_file(tensors, tmp_path / "one.safetensors")
    write_merged(base, [LoraFile(name="one", path=tmp_path / "one.safetensors", scale=2.0)], tmp_path / "out")
    moved = {
        (UNET, "conv_in.bias"): 0.5, (UNET, "conv_norm_out.weight"): -1.0,
        (TEXT, "text_model.final_layer_norm.bias"): 0.25,
    }  # fmt: skip
    for name in (UNET, TEXT):
        after = load_file(tmp_path / "out" / name)
        for key, was in load_file(base / name).items():
            assert torch.equal(after[key], (was.float() + moved.get((name, key), 0.0)).half()), key


def test_everything_else_is_copied_and_diffusers_loads_it(base, tmp_path):
    """Configurations, VAE, tokenizer and scheduler byte for byte, but no pickles and no second whole checkpoint."""
    source = tmp_path / "source"
    source.mkdir()
    for path in base.iterdir():
        (source / path.name).symlink_to(path)
    (source / "whole.safetensors").write_bytes(b"x" * 9)
    write_merged(source, [lora(base, tmp_path)], tmp_path / "out")
    before = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}
    after = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert after == before
    for name in after - {UNET}:
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()
    StableDiffusionPipeline.from_pretrained(tmp_path / "out", local_files_only=True)
    with safe_open(tmp_path / "out" / UNET, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_index_that_names_what_is_outside_takes_nothing_there(base, tmp_path):
    """The folder that was asked for is all that is written."""
    source = shutil.copytree(base, tmp_path / "given" / "source")
    (source.parent / "beside").mkdir()
    index = json.loads((source / "model_index.json").read_text(encoding="utf-8"))
    text = json.dumps({**index, "../beside": ["diffusers", "AutoencoderKL"]})
    (source / "model_index.json").write_text(text, encoding="utf-8")
    write_merged(source, [lora(base, tmp_path)], tmp_path / "made" / "out")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]


def test_of_sdxl_both_text_encoders(tiny_sdxl_folder, tmp_path):
    """Three parts are written, and the model loads."""
    file = lora(tiny_sdxl_folder, tmp_path, fmt="kohya", with_text_encoder=True)
    parts = write_merged(tiny_sdxl_folder, [file], tmp_path / "out")
    assert [part.component for part in parts] == ["unet", "text_encoder", "text_encoder_2"]
    load_bundle(tmp_path / "out")


def test_what_cannot_be_merged_leaves_nothing(base, tiny_sdxl_folder, tmp_path):
    """A LoRA of another model, a folder that is in use, and a model that is none."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(LoraError, match="'one'"):
        write_merged(tiny_sdxl_folder, [lora(base, tmp_path)], tmp_path / "out")
    with pytest.raises(ModelError, match="not an empty folder"):
        write_merged(base, [lora(base, tmp_path)], tmp_path / "used")
    with pytest.raises(ModelError, match="no such folder"):
        write_merged(tmp_path / "absent", [lora(base, tmp_path)], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "used"]


@pytest.mark.parametrize("name", [FamilyName.SD35_MEDIUM, FamilyName.FLUX_DEV])
def test_a_transformer_takes_layers_of_its_original(name, tmp_path):
    """A file with the original model's layers and CLIP's changes a folder's transformer and text encoder as it changes
    the original, and says how many of diffusers' weights that were."""
    folder = tmp_path / "base"
    write_model(scaled_down(name), folder, seed=1, dtype=DtypeName.FLOAT32, report=lambda *_: None)
    before = original_transformer(folder)
    layer = "joint_blocks.1.x_block.attn.qkv" if name is FamilyName.SD35_MEDIUM else "single_blocks.0.linear1"
    rows, columns = before[f"{layer}.weight"].shape
    clip = "text_model.encoder.layers.1.mlp.fc1"
    made = factors({layer: (rows, columns), clip: (64, 32)}, alpha=3.0)
    tensors = kohya_tensors({layer: made[layer]}) | kohya_tensors({clip: made[clip]}, "text_encoder_1")
    file = LoraFile(name="one", path=write(tmp_path / "one.safetensors", tensors), scale=0.7)
    parts = write_merged(folder, [file], tmp_path / "out")
    changed = {part.component: part.changed for part in parts}
    assert changed == {"transformer": 3 if name is FamilyName.SD35_MEDIUM else 4, "text_encoder": 1}
    after = original_transformer(tmp_path / "out")
    exact = before[f"{layer}.weight"].double() + delta(made[layer], (rows, columns), 0.7)
    assert torch.allclose(after[f"{layer}.weight"].double(), exact, atol=1e-6)
    assert [key for key in before if not torch.equal(after[key], before[key])] == [f"{layer}.weight"]
    texts = [load_file(each / TEXT)[f"{clip}.weight"].double() for each in (folder, tmp_path / "out")]
    assert torch.allclose(texts[1], texts[0] + delta(made[clip], (64, 32), 0.7), atol=1e-6)
