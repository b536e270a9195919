"""LoHa, LoKr and DoRA against PEFT: what its adapters make of a model is what we make of their files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, PeftMixedModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from plait_serving.diffusion.lora.merge import Merger
from plait_serving.diffusion.lora.parse import LoadedLora, parse
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.lora.targets import LoraTargets
from plait_serving.diffusion.values import LoraRef
from support.loras import snapshot, write

torch.set_num_threads(1)

# Both sum in fp32, in another order; weights are about 0.3.
CLOSE = 3e-6
LAYERS = ["lin", "point", "conv"]


class Layers(nn.Module):
    """A linear layer, a pointwise and a 3x3 convolution with sizes that have divisors."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.lin, self.point, self.conv = nn.Linear(12, 18), nn.Conv2d(8, 6, 1), nn.Conv2d(8, 12, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the linear layer: PEFT wants a model that runs."""
        return self.lin(rows)


CONFIGS: dict[str, PeftConfig] = {
    "loha": LoHaConfig(r=3, alpha=2, target_modules=LAYERS, init_weights=False),
    "loha tucker": LoHaConfig(r=3, alpha=2, target_modules=LAYERS, init_weights=False, use_effective_conv2d=True),
    "lokr": LoKrConfig(r=2, alpha=3, target_modules=LAYERS, init_weights=False, alpha_pattern={"point": 5}),
    "lokr both": LoKrConfig(r=1, alpha=3, target_modules=LAYERS, init_weights=False, decompose_both=True),
    "lokr tucker": LoKrConfig(r=1, alpha=3, target_modules=LAYERS, init_weights=False, use_effective_conv2d=True),
    "lokr whole": LoKrConfig(r=64, alpha=80, target_modules=LAYERS, init_weights=False),
    "dora": LoraConfig(r=3, lora_alpha=4, target_modules=LAYERS, init_lora_weights=False, use_dora=True),
    "lora": LoraConfig(r=3, lora_alpha=4, target_modules=LAYERS, init_lora_weights=False, use_rslora=True),
}
KOHYA_ALPHA = {"loha": 2.0, "loha tucker": 2.0, "lokr both": 3.0, "lokr tucker": 3.0, "dora": 4.0}


def adapter(kind: str, folder: Path, seed: int = 1) -> Path:
    """A folder as PEFT saves it; the magnitudes of a DoRA are moved, as training moves them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(Layers(), copy.deepcopy(CONFIGS[kind]))
        for name, value in model.named_parameters():
            if "magnitude" in name:
                value.data *= 0.5 + torch.rand_like(value)
            elif value.requires_grad:
                value.data *= 2.5  # PEFT draws them so small that nothing would be seen to move
    model.save_pretrained(folder)
    return folder


def theirs(folders: dict[str, Path], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """What PEFT makes of adapters of one kind, or of several that only add."""
    model = None
    for name, folder in folders.items():
        if model is None:
            model = PeftMixedModel.from_pretrained(Layers(), folder, adapter_name=name)
        else:
            model.load_adapter(folder, adapter_name=name)
    assert model is not None
    model.set_adapter(list(folders))
    for layer in model.modules():
        if hasattr(layer, "set_scale"):
            for name, scale in scales.items():
                if name in layer.scaling:
                    layer.set_scale(name, scale)
    return snapshot({"unet": model.merge_and_unload()})


def ours(files: dict[str, LoadedLora], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """What we make of it; checks that a restore leaves no trace."""
    parts = {"unet": Layers()}
    before, merger = snapshot(parts), Merger(parts)
    merger.switch(tuple(LoraRef(name=name, scale=scale) for name, scale in scales.items()), files)
    after = snapshot(parts)
    merger.switch((), {})
    assert all(torch.equal(value, before[key]) for key, value in snapshot(parts).items())
    return after


def read(folder: Path) -> LoadedLora:
    """The adapter in a folder of LoRAs."""
    source = FolderSource(folder.parent)
    assert folder.name in source.names()
    return parse(folder.name, source.fetch(folder.name), LoraTargets.of({"unet": Layers()}))


def check(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Equal weights, and every one was really moved."""
    bare = snapshot({"unet": Layers()})
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        assert float((value - other[key]).abs().max()) <= CLOSE, key
        assert key.endswith("bias") or float((value - bare[key]).abs().max()) > 1000 * CLOSE, key


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_an_adapter_of_pefts(tmp_path, kind):
    """A folder as PEFT saves it gives PEFT's weights, also to be subtracted."""
    folder = adapter(kind, tmp_path / "one")
    check(ours({"one": read(folder)}, {"one": -1.3}), theirs({"one": folder}, {"one": -1.3}))


@pytest.mark.parametrize("kind", list(KOHYA_ALPHA))
def test_a_file_in_kohyas_layout(tmp_path, kind):
    """The same tensors as LyCORIS and kohya's trainer name them give the same weights."""
    folder = adapter(kind, tmp_path / "one")
    names = {
        "lora_A.weight": "lora_down.weight",
        "lora_B.weight": "lora_up.weight",
        "lora_magnitude_vector": "dora_scale",
    }
    tensors = {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        module, rest = key.removeprefix("base_model.model.").split(".", 1)
        if rest == "lora_magnitude_vector":
            value = value.reshape(-1, *[1] * (getattr(Layers(), module).weight.ndim - 1))
        tensors[f"lora_unet_{module}.{names.get(rest, rest)}"] = value
        tensors[f"lora_unet_{module}.alpha"] = torch.tensor(KOHYA_ALPHA[kind])
    path = write(tmp_path / "kohya.safetensors", tensors)
    got = parse("one", path, LoraTargets.of({"unet": Layers()}))
    check(ours({"one": got}, {"one": 0.7}), theirs({"one": folder}, {"one": 0.7}))


def test_two_whole_matrices_need_no_alpha(tmp_path):
    """A LoKr without low-rank parts has the scale 1 in LyCORIS, whatever its alpha says."""
    folder = adapter("lokr whole", tmp_path / "one")
    tensors = {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        module, rest = key.removeprefix("base_model.model.").split(".", 1)
        tensors |= {f"lora_unet_{module}.{rest}": value, f"lora_unet_{module}.alpha": torch.tensor(64.0)}
    got = parse("one", write(tmp_path / "kohya.safetensors", tensors), LoraTargets.of({"unet": Layers()}))
    check(ours({"one": got}, {"one": 80 / 64}), theirs({"one": folder}, {"one": 1.0}))


def test_several_kinds_in_one_request(tmp_path):
    """A LoRA, a LoHa and a LoKr with scales of their own add up as in PEFT."""
    folders = {name: adapter(name, tmp_path / name, seed) for seed, name in enumerate(["lora", "loha", "lokr"])}
    scales = {"lora": 0.5, "loha": -0.8, "lokr": 1.2}
    check(ours({name: read(folder) for name, folder in folders.items()}, scales), theirs(folders, scales))


@pytest.mark.parametrize("order", [["lora", "dora"], ["dora", "lora"], ["dora", "other"]], ids=" ".join)
def test_a_dora_beside_others(tmp_path, order):
    """A DoRA rescales what stands before it in the set, by the norm of its own part alone, as in PEFT."""
    made = {"lora": ("lora", 1), "dora": ("dora", 2), "other": ("dora", 3)}
    folders = {name: adapter(made[name][0], tmp_path / name, made[name][1]) for name in order}
    scales = dict(zip(order, (0.7, 1.1), strict=True))
    check(ours({name: read(folder) for name, folder in folders.items()}, scales), theirs(folders, scales))
