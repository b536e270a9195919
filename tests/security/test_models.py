"""Folders and files that operators download: what other servers ran when they loaded them."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.trap import Payload
from plait_serving.diffusion.errors import LoraError, ModelError
from plait_serving.diffusion.families.unet.controlnet import load_controlnet
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.lora.targets import LoraTargets
from support.bundles import load_bundle, texts_of
from support.loras import TwoLayers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that is there if anything of a model ran."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tiny_sd_folder: Path, tmp_path: Path) -> Path:
    """A model that a test may spoil."""
    return Path(shutil.copytree(tiny_sd_folder, tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    """Changes entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def plant(folder: Path, mark: Path) -> None:
    """Puts modules that leave the mark wherever a loader could look for one."""
    code = f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
    classes = "class {0}:\n    pass\n"
    names = ("pipeline", "my_pipeline", "modeling_clip", "configuration_clip", "tokenization_clip", "my_unet")
    for part in (folder, *(path for path in folder.iterdir() if path.is_dir())):
        for name in names:
            (part / f"{name}.py").write_text(code + classes.format("Evil"))


AUTO_MAP = {
    "AutoConfig": "configuration_clip.Evil",
    "AutoModel": "modeling_clip.Evil",
    "AutoTokenizer": ["tokenization_clip.Evil", None],
    "CLIPTextModel": "modeling_clip.Evil",
}


@pytest.mark.parametrize(
    "changes",
    [
        {"_class_name": ["my_pipeline", "Evil"]},
        {"unet": ["my_unet", "Evil"]},
        {"text_encoder": ["modeling_clip", "Evil"], "custom_pipeline": "pipeline"},
        {"scheduler": ["my_unet", "Evil"]},
        {"trust_remote_code": True, "auto_map": AUTO_MAP},
    ],
)
def test_cve_2026_44513_and_ghsa_4prv_5hj7_c2xr_code_of_a_pipeline(
    folder: Path, mark: Path, changes: dict[str, Any]
) -> None:
    """diffusers ran modules of a model's folder without being asked to: the folder is refused, or loaded as if they
    were not there."""
    plant(folder, mark)
    edit(folder / "model_index.json", **changes)
    before = set(sys.modules)
    with suppress(ModelError):
        assert type(load_bundle(folder).unet).__module__.startswith("diffusers.")
    assert not mark.exists()
    assert not {name for name in set(sys.modules) - before if "Evil" in name or name.startswith("diffusers_modules")}


@pytest.mark.parametrize("part", ["text_encoder", "tokenizer", "unet", "vae", "scheduler"])
def test_cve_2026_4372_and_cve_2026_5241_code_of_a_configuration(folder: Path, mark: Path, part: str) -> None:
    """transformers ran what a configuration named: the classes of a model's parts are fixed here, and nothing is
    trusted."""
    plant(folder, mark)
    for path in (folder / part).glob("*.json"):
        if isinstance(json.loads(path.read_text()), dict) and "vocab" not in path.name:
            edit(path, auto_map=AUTO_MAP, trust_remote_code=True, _attn_implementation="someone/kernels")
    try:
        bundle = load_bundle(folder)
    except ModelError:
        assert not mark.exists()
        return
    for module in (bundle.unet, bundle.vae, *texts_of(bundle), *bundle.tokenizers.values()):
        assert type(module).__module__.startswith(("diffusers.", "transformers."))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("unet", "diffusion_pytorch_model.bin"),
        ("vae", "diffusion_pytorch_model.bin"),
        ("text_encoder", "pytorch_model.bin"),
        ("unet", "diffusion_pytorch_model.safetensors"),
    ],
)
def test_cve_2025_32434_and_cve_2026_1839_pickled_weights(folder: Path, mark: Path, part: str, name: str) -> None:
    """torch.load ran code even with weights_only: nothing here calls it, and pickles are refused under any name."""
    for path in (folder / part).glob("*.safetensors"):
        path.unlink()
    (folder / part / name).write_bytes(pickle.dumps(Payload(mark)))
    with pytest.raises(ModelError, match=part):
        load_bundle(folder)
    assert not mark.exists()


def test_cve_2025_32434_what_torch_saves_is_refused_too(folder: Path, mark: Path) -> None:
    """A real checkpoint with a payload, beside the safetensors file and in its place."""
    checkpoint = {"conv_in.weight": torch.zeros(1), "payload": Payload(mark)}
    torch.save(checkpoint, folder / "unet" / "diffusion_pytorch_model.bin")
    load_bundle(folder)
    assert not mark.exists()
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickled"):
        load_bundle(folder)
    assert not mark.exists()


def test_cve_2025_32434_pickled_controlnets_and_loras(
    tiny_sd_controlnets: tuple[Path, Path], tmp_path: Path, mark: Path
) -> None:
    """A1111's ControlNet loaded `ip-adapter.bin` that way: ControlNets and LoRAs are safetensors here, or nothing."""
    controlnet = shutil.copytree(tiny_sd_controlnets[0], tmp_path / "controlnet")
    for path in controlnet.glob("*.safetensors"):
        path.unlink()
    torch.save({"payload": Payload(mark)}, controlnet / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled"):
        load_controlnet(controlnet, dtype=torch.float32)
    loras = tmp_path / "loras"
    loras.mkdir()
    for suffix in ("pt", "bin", "ckpt", "pth"):
        torch.save({"payload": Payload(mark)}, loras / f"evil.{suffix}")
    assert FolderSource(loras).find("evil") is None
    torch.save({"payload": Payload(mark)}, loras / "evil.safetensors")
    with pytest.raises(LoraError, match="can run code"):
        parse("evil", loras / "evil.safetensors", LoraTargets.of({"unet": TwoLayers()}))
    assert not mark.exists()


def test_cve_2026_44513_nothing_here_trusts_code_or_unpickles() -> None:
    """The words with which a library is told to: in no file of the product, but for the checkpoints that a training run
    writes for itself."""
    words = ("trust_remote_code=True", "torch.load(", "allow_pickle=True", "weights_only=False", "custom_pipeline=")
    for package in ("serving", "disagg", "kernels", "deploy", "autoconfig"):
        for path in (ROOT / package).rglob("*.py"):
            if "starter_training" in path.parts:
                continue
            text = path.read_text(encoding="utf-8")
            assert [word for word in words if word in text] == [], path
