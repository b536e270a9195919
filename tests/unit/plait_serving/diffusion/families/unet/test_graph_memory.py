"""What graphs of a model at its real size hold, by tensors that have shapes and no memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from fakes.graphs import FakeCapture
from plait_kernels.executors.graphs import GraphMemory
from plait_serving.diffusion.families.unet.compiled import graphed_halves
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.published.configs import build_on_meta


def test_sdxl_holds_6_gb_at_most() -> None:
    """Batches of up to 16 with guidance, at two sizes: 57.9 GB where each graph had inputs and outputs of its own. How
    deep the transformers are changes none of them."""
    (part,) = (it for it in ARCHITECTURES[FamilyName.SDXL].parts if it.folder == "unet")
    shallow = {**part.config, "transformer_layers_per_block": 1}
    unet = build_on_meta(replace(part, config=shallow)).to(torch.float16).eval()
    memory = GraphMemory(FakeCapture(), budget_bytes=1 << 40)
    halves = graphed_halves(unet, memory)
    for height, width in ((128, 128), (144, 112)):
        for images in (1, 16):
            rows = 2 * images
            text = torch.empty(rows, 77, 2048, dtype=torch.float16, device="meta")
            sample = torch.empty(rows, 4, height, width, dtype=torch.float16, device="meta")
            embedding = torch.empty(rows, 1280, dtype=torch.float16, device="meta")
            for _ in range(2):
                half = halves.encode(sample, embedding, text, None)
                assert tuple(halves.decode(half, None).shape) == (rows, 4, height, width)
    while memory.capture_waiting():
        pass
    assert memory.graphs == 2 * 2 * 2
    skips = 32 * 2 * 320 * (3 * 128**2 + 64**2) + 32 * 2 * 640 * (2 * 64**2 + 32**2) + 32 * 2 * 1280 * 3 * 32**2
    assert skips <= memory.nbytes <= 1.05 * skips < 6e9
