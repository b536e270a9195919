"""What runs on a GPU, on a device that is not there (`fakes.gpu`): whatever mixes places raises, as it would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fakes.gpu import MEMORY, NAME, FakeGpu, fake_gpu
from fakes.graphs import FakeCapture
from plait_kernels.executors import cuda_capture, graphs
from plait_serving.deployments.images.counted import gpu_families
from plait_serving.diffusion.families import open_family
from plait_serving.diffusion.families.encoders import SharedEncoders
from plait_serving.diffusion.knobs import EngineKnobs, ExecutorName
from plait_serving.diffusion.lora.parse import parse
from plait_serving.diffusion.memory import available_bytes, memory_of
from plait_serving.diffusion.settings import EngineSettings, Host
from plait_serving.diffusion.stepper import Stepper
from plait_serving.diffusion.units import ImageJob, SpentSeconds, Unit, cut_into_units
from plait_serving.diffusion.values import ControlRef, Edit, ImageRequest, LoraRef, Scheduler
from support.denoise import control_image, make_request
from support.rank_rows import packaged
from support.rank_rows import request as rank_request
from support.tiny import tiny_lora

HOST = Host(
    knobs=EngineKnobs, room_bytes=lambda: 0, is_idle=lambda: True, between_steps=lambda function: function(),
    encoders=SharedEncoders(),
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """The device, whose captures are calls made again."""
    monkeypatch.setattr(cuda_capture, "CudaCapture", lambda _: FakeCapture())
    monkeypatch.setattr(graphs, "_ON", {})
    MEMORY.reserved = MEMORY.allocated = 0
    with fake_gpu() as mode:
        yield mode


class Run:
    """A model on the device, without the engine's threads: fake tensors belong to one."""

    def __init__(self, folder: Path, controlnets: Mapping[str, Path], executor: ExecutorName) -> None:
        settings = EngineSettings(model=folder, device=NAME, executor=executor)
        self.family = open_family(folder, settings, HOST)
        clients = {name: self.family.controlnet(name, path) for name, path in controlnets.items()}
        self.stepper = Stepper(denoiser=self.family.load(), controlnets=clients, clock=lambda: 0.0)

    def images(self, requests: Sequence[ImageRequest], loras: Mapping[str, Path]) -> list[np.ndarray]:
        """Step all together and decode."""
        units = [self._unit(request, loras) for request in requests]
        with torch.inference_mode():
            while any(unit.step < unit.steps for unit in units):
                self.stepper.make_live(self.stepper.sets_of(units[0])[0], units)
                assert all(self.stepper.prepare(unit, until_s=1.0) for unit in units)
                assert self.stepper.step(units, lambda unit: unit.step == 1)[0] is None or units[0].step == 2
                while graphs.capture_waiting():
                    pass
            return [image for unit in units for image in self.stepper.decode(unit.latents)[0]]

    def _unit(self, request: ImageRequest, loras: Mapping[str, Path]) -> Unit:
        weights = {it.name: parse(it.name, loras[it.name], self.family.lora_targets) for it in request.loras}
        lease: Future[Any] = Future()
        lease.set_result(SimpleNamespace(weights=weights, is_asked_back=False))
        job = ImageJob(
            request=request, size=self.family.measure(request), sink=lambda _: None,
            spent=SpentSeconds(accepted_at_s=0.0), loras=lease if request.loras else None, deadline_at_s=None,
        )  # fmt: skip
        (unit,) = job.units = cut_into_units(job, 16, count())
        return unit


@pytest.mark.parametrize(("kind", "executor"), [("sd", ExecutorName.TORCH), ("sdxl", ExecutorName.AUTO)])
def test_a_request_with_everything_runs_on_a_gpu(
    gpu: FakeGpu, request: pytest.FixtureRequest, tmp_path: Path, kind: str, executor: ExecutorName
) -> None:
    """Two requests with a LoRA, of which one has two ControlNets and an edit with a mask: encoded, stepped, decoded."""
    folder = request.getfixturevalue(f"tiny_{kind}_folder")
    nets = dict(zip("ab", request.getfixturevalue(f"tiny_{kind}_controlnets"), strict=True))
    loras = {"one": tiny_lora(tmp_path / "one.safetensors", folder, with_text_encoder=True, conv=True)}
    run = Run(folder, nets, executor)
    assert {it.device.type for it in run.stepper.denoiser.bundle.unet.parameters()} == {NAME}
    lora = LoraRef(name="one", scale=0.7)
    plain = make_request(loras=(lora,), scheduler=Scheduler.EULER_A, partial_images=1)
    refs = tuple(ControlRef(name=name, image=control_image(i), scale=0.5) for i, name in enumerate(nets))
    edit = Edit(image=control_image(5), mask=np.zeros((32, 32), np.uint8))
    edited = make_request(loras=(lora,), controlnets=refs, n=2, seed=3, edit=edit, scheduler=Scheduler.DPMPP_2M)
    found = run.images([plain, edited], loras)
    assert [image.shape for image in found] == [(32, 32, 3)] * 3
    assert run.stepper.denoiser.merger.current
    if executor is ExecutorName.AUTO:
        assert graphs.graph_memory(torch.device(NAME)).graphs == 4  # both halves, both ControlNets


def test_an_out_of_memory_gives_up_graphs_and_what_torch_keeps(
    gpu: FakeGpu, tiny_sd_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then half the batch is tried, and graphs come back; metrics say all of it."""
    run = Run(tiny_sd_folder, {}, ExecutorName.AUTO)
    run.images([make_request(), make_request(seed=1)], {})
    memory, kept, short = graphs.graph_memory(torch.device(NAME)), [], []
    assert memory.graphs == 2
    predict = run.stepper.denoiser.predict

    def full(calls: Sequence[Any]) -> Any:
        if len(calls) > 1:
            short.append(len(calls))
            raise torch.OutOfMemoryError("no memory")
        kept.append((memory.graphs, memory.nbytes, MEMORY.reserved))
        return predict(calls)

    monkeypatch.setattr(run.stepper.denoiser, "predict", full)
    MEMORY.reserved, MEMORY.allocated = 9 << 30, 1 << 30
    assert len(run.images([make_request(), make_request(seed=1)], {})) == 2
    assert kept[0] == (0, 0, 1 << 30)
    assert memory.graphs
    assert {sample.name: sample.value for each in gpu_families() for sample in each.samples} == {
        "plait_gpu_free_bytes": MEMORY.total - (1 << 30),
        "plait_gpu_graph_bytes": memory.nbytes,
        "plait_gpu_graphs": memory.graphs,
        "plait_gpu_short_of_memory_total": len(short),
    }


def test_what_is_free_is_what_torch_keeps_too(gpu: FakeGpu) -> None:
    """But not what graphs have; and what a model has left goes back to the device."""
    there = torch.device(NAME, 0)
    MEMORY.reserved, MEMORY.allocated = 50 << 30, 10 << 30
    assert available_bytes(there) == MEMORY.total - (10 << 30)
    graphs.graph_memory(there).capture.pool_bytes = 3 << 30
    assert available_bytes(there) == MEMORY.total - (13 << 30)
    reader = memory_of(there, excluded=lambda: 0)
    assert (reader.held_bytes(), reader.left_bytes()) == (10 << 30, available_bytes(there))
    reader.give_back()
    assert MEMORY.reserved == MEMORY.allocated


@pytest.mark.parametrize("prepares", [False, True])
def test_a_dense_half_runs_on_a_gpu(gpu: FakeGpu, tmp_path: Path, prepares: bool) -> None:
    """Its answers are on the CPU; with graphs, and without."""
    package = packaged(tmp_path / "match")
    requests = [rank_request(package, seed) for seed in (1, 2)]
    given = package.sparse().run(requests)
    dense = package.dense(NAME, prepares=prepares)
    for _ in range(3):
        made = dense.run(given, [7, 7])
        assert [(value.device.type, len(value)) for value in made.values()] == [("cpu", 14)]
