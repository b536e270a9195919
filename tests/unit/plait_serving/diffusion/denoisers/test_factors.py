"""LoRA sets as row-wise factors: which files are taken, what a batch's rows get, and what is remembered."""

from __future__ import annotations

import pytest
import torch

from plait_kernels.executors import AdaptedLayer
from plait_serving.diffusion.denoisers.batch import BatchLayout
from plait_serving.diffusion.denoisers.factors import FactorStore
from plait_serving.diffusion.lora.formats import Factor, LoadedLora
from plait_serving.diffusion.lora.targets import ModuleRef
from plait_serving.diffusion.protocols import Conditioning

FIRST = [AdaptedLayer(path="unet.down", width_in=6, width_out=4)]
SECOND = [AdaptedLayer(path="unet.up", width_in=3, width_out=5), AdaptedLayer(path="unet.out", width_in=2, width_out=2)]


def factor(inputs: int, outputs: int, rank: int, *, alpha: float, seed: int) -> Factor:
    """A random one."""
    rng = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, inputs, generator=rng), torch.randn(outputs, rank, generator=rng)
    return Factor(down=down, up=up, alpha=alpha)


def lora(name: str, **factors: Factor) -> LoadedLora:
    """A file of UNet layers; `text_encoder_x` is one of the text encoder."""
    refs = {
        ModuleRef("text_encoder", path) if path == "text" else ModuleRef("unet", path): one
        for path, one in factors.items()
    }
    return make(name, refs)


def layout(*counts: int, cfg: bool = True) -> BatchLayout:
    """Of requests for that many images each."""
    text = torch.zeros(2 if cfg else 1, 77, 4)
    return BatchLayout.of([Conditioning(text=text, added={}, n=n, uses_cfg=cfg) for n in counts])


A = factor(6, 4, 2, alpha=1.0, seed=1)
B = factor(6, 4, 9, alpha=9.0, seed=2)
U = factor(3, 5, 1, alpha=2.0, seed=3)
