"""Stable Diffusion 1.5's size once: prepared by the default executor, with a LoRA and a ControlNet, equal to torch.

Speed and memory at this size are recorded by `plait bench images --size sd15`.
"""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest
import torch

from plait_serving.diffusion.assemble import Assembled, EngineSettings, build_engine
from plait_serving.diffusion.knobs import EngineKnobs, Exact, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.published.architectures import ARCHITECTURES, FamilyName
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraRef, Scheduler
from plait_serving.random_models.loras import write_lora
from plait_serving.random_models.names import DtypeName, LoraSpelling
from plait_serving.random_models.write import write_model

pytestmark = pytest.mark.slow  # two minutes and 9 GB: most of them are writing 3 GB of weights and converting them
FREE_BYTES = 12 << 30
EDGE = 256


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real-size")
    if shutil.disk_usage(folder).free < FREE_BYTES:
        pytest.skip("needs 12 GB of disk")
    for family, name in ((FamilyName.SD15, "base"), (FamilyName.SD15_CONTROLNET, "controlnet")):
        write_model(ARCHITECTURES[family], folder / name, seed=0, dtype=DtypeName.FLOAT16, report=lambda *_: None)
    (folder / "loras").mkdir()
    write_lora(
        ARCHITECTURES[FamilyName.SD15], folder / "loras" / "style.safetensors", spelling=LoraSpelling.PEFT, rank=16,
        seed=1, dtype=DtypeName.FLOAT16, report=lambda *_: None,
    )  # fmt: skip
    yield folder
    shutil.rmtree(folder)


def engine(models, exact: Exact, *, converts: bool) -> Assembled:
    knobs = EngineKnobs(exact=exact, controlnet_placement=Placement.LOCAL)
    return build_engine(
        EngineSettings(
            model=models / "base", dtype="float32", lora_source=FolderSource(models / "loras"), knobs=knobs,
            controlnets={"edges": models / "controlnet"}, prepared_folder=models / "prepared", converts=converts,
        )
    )  # fmt: skip


def asked(name: str, *, loras=(), controlnets=()) -> ImageRequest:
    return ImageRequest(
        request_id=name, prompt="a red house", width=EDGE, height=EDGE, steps=1, guidance_scale=5.0, seed=7,
        scheduler=Scheduler.DDIM, loras=loras, controlnets=controlnets,
    )  # fmt: skip


def requests() -> list[ImageRequest]:
    image = np.zeros((EDGE, EDGE, 3), np.uint8)
    image[64:192, 64:192] = 255
    return [
        asked("plain"),
        asked(
            "dressed", loras=(LoraRef(name="style", scale=0.8),), controlnets=(ControlRef(name="edges", image=image),)
        ),
    ]


def test_the_default_executor_equals_torch_at_real_size(models):
    """A first start serves by torch and converts behind; then the programs make the same images, LoRA as an input."""
    started = engine(models, Exact.NEVER, converts=True)
    try:
        first = [started.engine.generate(one).images[0] for one in requests()]
        until_s = time.monotonic() + 300
        while time.monotonic() < until_s and started.prepared_parts() != {"unet", "vae", "edges"}:
            time.sleep(0.5)
        assert started.prepared_parts() == {"unet", "vae", "edges"}
        merges = started.engine.statistics().lora_switches
        compiled = [started.engine.generate(one).images[0] for one in requests()]
        assert started.engine.statistics().lora_switches == merges
    finally:
        started.engine.stop(drain_s=0)
    assert not np.array_equal(compiled[0], compiled[1])
    for ours, torchs in zip(compiled, first, strict=True):
        assert int(np.abs(ours.astype(int) - torchs).max()) <= 1
    again = engine(models, Exact.NEVER, converts=False)
    try:
        assert {"unet", "vae"} <= again.prepared_parts()
        assert all(not parameter.is_floating_point() or parameter.dtype is torch.float16 for parameter in
                   again.bundle.unet.down_blocks.parameters())  # fmt: skip
        assert np.array_equal(again.engine.generate(requests()[1]).images[0], compiled[1])
    finally:
        again.engine.stop(drain_s=0)
