"""An engine whose UNet and ControlNets run as graphs, against diffusers; captured without a GPU (`fakes.graphs`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from fakes.graphs import FakeCapture
from plait_kernels.executors import graphs
from plait_kernels.executors.graphs import GraphMemory
from plait_serving.diffusion.families.unet.compiled import graphed_halves
from plait_serving.diffusion.knobs import EngineKnobs, Exact, ExecutorName, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.values import ControlRef, ImageRequest, LoraRef, Scheduler
from support.closeness import EQUAL, IN_COMPANY, ulps
from support.denoise import control_image, make_request
from support.engine_probe import fused_reference, probed
from support.tiny import tiny_lora
from support.waiting import wait_for

LORAS = (LoraRef(name="one", scale=0.9), LoraRef(name="two", scale=-0.6))
CONTROLS = (ControlRef(name="a", image=control_image(1), scale=0.8), ControlRef(name="b", image=control_image(2)))


class Graphed:
    """The engine on a tiny SDXL, its captures, and diffusers on the same request."""

    def __init__(self, probe, reference) -> None:
        self.probe, self.reference, engine = probe, reference, probe.engine
        self.unet, self.capture = engine.pool.first.stepper.denoiser.bundle.unet, FakeCapture()
        self.memory = GraphMemory(self.capture, budget_bytes=1 << 30)
        engine.pool.first.stepper.denoiser.adopt(graphed_halves(self.unet, self.memory))

    def captured(self, asked: ImageRequest) -> int:
        """How many captures there were, once all steps of such a request are replayed: an engine without work captures
        what has recurred."""
        for _ in range(20):
            before = self.replays()
            self.probe.latents(asked)
            if self.replays() == before + asked.steps * 2:  # a half each
                return self.capture.tried
        raise AssertionError("it is not captured")

    def replays(self) -> int:
        """How often any graph was replayed."""
        return sum(recording.replays for recording in self.capture.recordings)

    def difference(self, asked: ImageRequest, ours: torch.Tensor) -> float:
        """To diffusers'."""
        return ulps(ours, self.reference(asked))


@pytest.fixture(scope="module")
def graphed(tiny_sdxl_folder, tiny_sdxl_controlnets, tmp_path_factory):
    """One, stopped at the end."""
    folder = tmp_path_factory.mktemp("loras")
    tiny_lora(folder / "one.safetensors", tiny_sdxl_folder, fmt="peft", rank=3)
    tiny_lora(folder / "two.safetensors", tiny_sdxl_folder, fmt="kohya", rank=2, conv=True, seed=5)
    nets = dict(zip("ab", tiny_sdxl_controlnets, strict=True))
    reference = partial(fused_reference, tiny_sdxl_folder, loras=folder, controlnets=nets, kept={})
    engine = probed(
        model=tiny_sdxl_folder, lora_source=FolderSource(folder), controlnets=nets, converts=False,
        executor=ExecutorName.TORCH,
        knobs=EngineKnobs(threads=1, controlnet_placement=Placement.LOCAL, exact=Exact.NEVER),
    )  # fmt: skip
    with engine as probe:
        yield Graphed(probe, reference)


def test_lora_sets_are_merged_under_the_same_graphs(graphed):
    """Plain, with two LoRAs, with another, plain again: diffusers' latents, nothing captured anew, no weight moved."""
    plain = make_request(request_id="plain", scheduler=Scheduler.DPMPP_2M, guidance_scale=2.0)
    addresses = [parameter.data_ptr() for parameter in graphed.unet.parameters()]
    captured, replayed = graphed.captured(plain), graphed.replays()
    for asked in (plain, replace(plain, loras=LORAS), replace(plain, loras=LORAS[1:]), replace(plain, seed=9)):
        (ours,) = graphed.probe.latents(asked)
        assert graphed.difference(asked, ours) <= EQUAL
    assert graphed.capture.tried == captured
    assert graphed.replays() == replayed + 4 * plain.steps * 2  # a half each
    assert [parameter.data_ptr() for parameter in graphed.unet.parameters()] == addresses


def test_residuals_are_added_between_the_graphs(graphed, monkeypatch):
    """Two ControlNets, whose residuals are added into the first graph's own memory, also as graphs themselves."""
    asked = make_request(request_id="controlled", guidance_scale=2.0, controlnets=CONTROLS, loras=LORAS)
    (ours,) = graphed.probe.latents(asked)
    assert graphed.difference(asked, ours) <= EQUAL
    for client in graphed.probe.engine.pool.first.controlnets.values():
        runner = client._clients[Placement.LOCAL]
        capture = FakeCapture()
        memory = GraphMemory(capture, budget_bytes=1 << 30)
        monkeypatch.setitem(graphs._ON, torch.device("cpu"), memory)
        runner.adopt(runner.graphed(memory), live=True)
        for _ in range(2):
            (ours,) = graphed.probe.latents(asked)
            assert graphed.difference(asked, ours) <= EQUAL
            wait_for(lambda memory=memory: memory.graphs == 1)
        assert capture.recordings[0].replays == asked.steps


def test_a_batch_has_a_graph_of_its_own(graphed):
    """Requests at other steps, with other seeds and ControlNets: equal in company."""
    first = make_request(request_id="a", steps=5, seed=1, controlnets=CONTROLS[1:])
    others = [make_request(request_id="b", steps=3, seed=2), make_request(request_id="c", steps=4, seed=3)]
    found = graphed.probe.latents(first, *others)
    for asked, ours in zip((first, *others), found, strict=True):
        assert graphed.difference(asked, ours) <= IN_COMPANY


def test_exact_always_leaves_the_graphs(graphed):
    """The modules themselves run: diffusers' bits."""
    engine, before = graphed.probe.engine, graphed.replays()
    engine.reconfigure(engine.knobs.model_copy(update={"exact": Exact.ALWAYS}))
    try:
        asked = make_request(request_id="exact", steps=3)
        assert graphed.difference(asked, graphed.probe.latents(asked)[0]) == 0.0
    finally:
        engine.reconfigure(engine.knobs.model_copy(update={"exact": Exact.NEVER}))
    assert graphed.replays() == before
