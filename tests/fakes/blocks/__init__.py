"""A family that nobody made: images of coloured blocks, one to each latent. One folder, like those of plait.

Its component, its kind and its pipeline have names that nothing else has, guidance is made of two rows, texts are
bytes that are filled up to a length, and LoRAs are merged. So whatever works with it was not asked which family it is.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fakes.blocks.family import KINDS, MIXER, TEXT, BlocksFamily
from plait_serving.diffusion.families import FamilyRow
from support.tiny import seeded

PIPELINE = "BlocksPipeline"
ROW = FamilyRow(load=lambda: BlocksFamily, denoiser=MIXER, kind=lambda _: BlocksFamily.kind)
"""Its line in the table: `FAMILIES[PIPELINE] = ROW`."""


def blocks_folder(folder: Path, *, seed: int = 0) -> Path:
    """Write a model with random weights."""
    with seeded(seed):
        for part, kind in KINDS.items():
            kind().save_pretrained(folder / part)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": PIPELINE}))
    return folder


def blocks_lora(path: Path, *, seed: int = 1) -> Path:
    """Write a LoRA of the layers that mix, and of the text's, by PEFT's rules."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for component, layer in ((MIXER, "inner"), (TEXT, "out")):
        rows, columns = KINDS[component]().get_submodule(layer).weight.shape
        tensors[f"{component}.{layer}.lora_A.weight"] = torch.randn(2, columns, generator=generator)
        tensors[f"{component}.{layer}.lora_B.weight"] = torch.randn(rows, 2, generator=generator)
    save_file(tensors, path)
    return path
