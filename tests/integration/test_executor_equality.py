"""The engine on prepared programs against diffusers' pipelines: a model of real widths (160, 320, 640), float16 files.

LoRA sets are inputs here, so requests of different sets share calls; what programs cannot take is computed by torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.knobs import EngineKnobs, Exact, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.preparation import Preparer
from plait_serving.diffusion.testing import EveryBatchPays
from plait_serving.diffusion.values import ControlRef, Event, ImageRequest, LoraRef, Progress
from support.denoise import control_image, make_request, max_difference
from support.engine_probe import Probe, fused_reference
from support.tiny import mid_sd, tiny_controlnet, tiny_lora

pytest.importorskip("openvino", reason="needs openvino")

CLOSE = 1e-4
"""Largest difference of fp32 latents: what README says of the default."""
CONTROL = (ControlRef(name="edges", image=control_image(1), scale=0.8),)
SETS = {
    "peft": (LoraRef(name="peft", scale=0.9),),
    "kohya": (LoraRef(name="kohya", scale=-0.7),),
    "both": (LoraRef(name="peft", scale=0.5), LoraRef(name="wide", scale=0.6)),
    "text": (LoraRef(name="text", scale=1.1),),
    "conv": (LoraRef(name="conv", scale=0.8),),
}


@dataclass
class Models:
    """A base model, its ControlNet and LoRA files, and where converted models are kept."""

    folder: Path
    base: Path
    controlnets: dict[str, Path]
    references: dict[str, torch.Tensor] = field(default_factory=dict)

    def build(self, *, converts: bool = False, dtype: str = "float32", **knobs: Any) -> Probe:
        """A started engine."""
        settings = EngineSettings(
            model=self.base, device="cpu", dtype=dtype, lora_source=FolderSource(self.folder / "loras"),
            controlnets=self.controlnets, prepared_folder=self.folder / "prepared", converts=converts,
            knobs=EngineKnobs(**{"threads": 1, "controlnet_placement": Placement.LOCAL, **knobs}),
        )  # fmt: skip
        return Probe(build_engine(settings, costs=EveryBatchPays()))

    def reference(self, asked: ImageRequest) -> torch.Tensor:
        """diffusers' latents; asked once for each request."""
        if asked.request_id not in self.references:
            self.references[asked.request_id] = fused_reference(
                self.base, asked, loras=self.folder / "loras", controlnets=self.controlnets
            )
        return self.references[asked.request_id]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The models, nothing converted yet."""
    folder = tmp_path_factory.mktemp("mid")
    base = mid_sd(folder / "base")
    files: dict[str, dict[str, Any]] = {
        "peft": {"fmt": "peft", "rank": 4},
        "kohya": {"fmt": "kohya", "rank": 3},
        "wide": {"fmt": "peft", "rank": 11, "seed": 6},
        "text": {"fmt": "kohya", "rank": 5, "with_text_encoder": True, "seed": 7},
        "conv": {"fmt": "kohya", "rank": 2, "conv": True, "seed": 8},
    }
    for name, options in files.items():
        tiny_lora(folder / "loras" / f"{name}.safetensors", base, **options)
    return Models(folder, base, {"edges": tiny_controlnet(folder / "edges", base)})


def asked(name: str, **changes: Any) -> ImageRequest:
    """A request of two steps; its name is its seed's and its reference's."""
    return make_request(request_id=name, **{"steps": 2, "seed": sum(name.encode()), "guidance_scale": 3.0, **changes})


def dressed(name: str, **changes: Any) -> ImageRequest:
    """A request with that LoRA set."""
    return asked(f"dressed {name}", loras=SETS[name], **changes)


PLAIN = asked("plain", n=2)
CONTROLLED = asked("controlled", controlnets=CONTROL, loras=SETS["peft"])


def unet_is_mapped(probe: Probe) -> bool:
    """Whether torch's copy of the UNet is the file's float16 bytes."""
    return next(probe.assembled.bundle.unet.down_blocks.parameters()).dtype is torch.float16


def wait_prepared(probe: Probe, *parts: str) -> None:
    """Block until these run on programs."""
    until_s = time.monotonic() + 200
    while not probe.assembled.prepared_parts() >= set(parts):
        assert time.monotonic() < until_s, probe.assembled.prepared_parts()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def converted(models: Models) -> Models:
    """The models after a first start: torch serves with the pipeline's bits, programs take over, weights go."""
    first = models.build(converts=True)
    try:
        if not first.assembled.prepared_parts():
            (served,) = first.latents(PLAIN)
            assert first.assembled.prepared_parts() or torch.equal(served, models.reference(PLAIN))
        first.latents(CONTROLLED)
        wait_prepared(first, "unet", "vae", "edges")
        (served,) = first.latents(PLAIN)
        assert 0 < max_difference(served, models.reference(PLAIN)) < CLOSE
        assert unet_is_mapped(first)
    finally:
        first.engine.stop(drain_s=0)
    return models


@pytest.fixture(scope="module")
def probe(converted: Models) -> Iterator[Probe]:
    """A second start: the engine runs on what the first one converted."""
    probe = converted.build()
    assert probe.assembled.prepared_parts() == {"unet", "vae"}
    yield probe
    probe.engine.stop(drain_s=0)


@contextmanager
def exactly(probe: Probe) -> Iterator[None]:
    """The knob exact=always, for a while."""
    knobs = probe.engine.knobs
    probe.engine.reconfigure(knobs.model_copy(update={"exact": Exact.ALWAYS}))
    yield
    probe.engine.reconfigure(knobs)


def test_alone_and_without_guidance(converted, probe):
    """Two images with CFG, one without: diffusers' latents within the tolerance, and torch's weights stay in the
    file."""
    unguided = asked("unguided", guidance_scale=1.0, width=48)
    for one in (PLAIN, unguided):
        assert max_difference(probe.latents(one)[0], converted.reference(one)) < CLOSE
    assert unet_is_mapped(probe)


def test_four_lora_sets_share_each_call(converted, probe):
    """PEFT, kohya, two files of different ranks, one with text encoders: four calls' rows in one, nothing merged."""
    requests = [dressed(name) for name in ("peft", "kohya", "both", "text")]
    before = probe.engine.statistics().lora_switches
    found = probe.latents(*requests)
    assert probe.batches == [4, 4]
    assert probe.engine.statistics().lora_switches == before
    assert unet_is_mapped(probe)
    for ours, one in zip(found, requests, strict=True):
        assert max_difference(ours, converted.reference(one)) < CLOSE
        assert max_difference(ours, probe.latents(replace(one, loras=()))[0]) > 1e-2


def test_each_set_alone_and_beside_none(converted, probe):
    """A set alone; a set, none, and an image of n=2 in one call. The same seed gives the same latents within it."""
    alone = probe.latents(dressed("both"))[0]
    together = probe.latents(dressed("both"), PLAIN, dressed("text"))
    assert probe.batches == [3, 3]
    assert max_difference(alone, converted.reference(dressed("both"))) < CLOSE
    for ours, one in zip(together, (dressed("both"), PLAIN, dressed("text")), strict=True):
        assert max_difference(ours, converted.reference(one)) < CLOSE


def test_a_controlnet_and_a_lora(converted, probe):
    """The ControlNet runs on its own program beside the UNet's; alone, and beside a request without it."""
    assert "edges" in probe.assembled.prepared_parts() or probe.latents(CONTROLLED)
    assert "edges" in probe.assembled.prepared_parts()
    (alone,) = probe.latents(CONTROLLED)
    together = probe.latents(CONTROLLED, dressed("kohya"))
    assert probe.batches == [2, 2]
    for ours in (alone, together[0]):
        assert max_difference(ours, converted.reference(CONTROLLED)) < CLOSE
    assert max_difference(together[1], converted.reference(dressed("kohya"))) < CLOSE


def test_a_long_prompt_beside_a_short_one(converted, probe):
    """Two chunks of text and one: calls of their own, within the tolerance of torch."""
    long = asked("long", prompt="a red apple and the cat " * 20, loras=SETS["peft"])
    found = probe.latents(long, dressed("peft"))
    assert probe.batches == [1, 1] * 2
    assert max_difference(found[1], converted.reference(dressed("peft"))) < CLOSE
    (short,) = probe.latents(asked("long", prompt="a red apple and the cat " * 4, loras=SETS["peft"]))
    assert max_difference(found[0], short) > 1e-3
    with exactly(probe):
        (wanted,) = probe.latents(long)
    assert 0 < max_difference(found[0], wanted) < CLOSE


def test_exact_always_gives_the_pipelines_bits(converted):
    """While programs are adopted too: plain, with a LoRA (merged then) and with a ControlNet. Then programs again."""
    probe = converted.build(exact=Exact.ALWAYS)
    try:
        assert probe.assembled.prepared_parts() == {"unet", "vae"}
        for one in (PLAIN, dressed("peft"), CONTROLLED):
            assert max_difference(probe.latents(one)[0], converted.reference(one)) < 1e-5
        assert torch.equal(probe.latents(PLAIN)[0], converted.reference(PLAIN))
        assert not unet_is_mapped(probe)
        probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"exact": Exact.NEVER}))
        for one in (PLAIN, dressed("peft"), CONTROLLED):
            assert 0 < max_difference(probe.latents(one)[0], converted.reference(one)) < CLOSE
    finally:
        probe.engine.stop(drain_s=0)


def test_a_lora_on_convolutions_is_merged_and_runs_on_torch(converted):
    """Programs do not take 3x3 convolutions: the weights come into memory, merged as ever; others stay on programs."""
    probe = converted.build()
    try:
        probe.latents(dressed("peft"))
        assert unet_is_mapped(probe)
        assert probe.engine.statistics().lora_switches == 0
        (ours,) = probe.latents(dressed("conv"))
        assert max_difference(ours, converted.reference(dressed("conv"))) < 1e-5
        assert not unet_is_mapped(probe)
        assert probe.engine.statistics().lora_switches == 1
        company = (dressed("conv"), dressed("peft"), PLAIN)
        found = probe.latents(*company)
        assert sorted(probe.batches) == [1, 1, 2, 2]
        for ours, one in zip(found, company, strict=True):
            assert max_difference(ours, converted.reference(one)) < CLOSE
        assert max_difference(found[0], converted.reference(dressed("conv"))) < 1e-5
        assert max_difference(found[2], converted.reference(PLAIN)) > 0
    finally:
        probe.engine.stop(drain_s=0)


@pytest.mark.parametrize("name", ["plain", "both", "text"])
def test_a_request_that_torch_began_is_finished_by_programs(converted, monkeypatch, name):
    """Programs arrive between two steps: a set that was merged becomes an input, and the latents are diffusers'."""
    go, make_unet = threading.Event(), Preparer.make_unet

    def late(self: Preparer, folder: Path) -> Any:
        assert go.wait(60)
        return make_unet(self, folder)

    monkeypatch.setattr(Preparer, "open_unet", lambda *_: None)
    monkeypatch.setattr(Preparer, "make_unet", late)
    probe = converted.build(converts=True)
    loop: Any = probe.engine._loop

    def on_event(event: Event) -> None:
        if isinstance(event, Progress) and event.step == 2:
            assert not probe.assembled.prepared_parts()
            go.set()
            until_s = time.monotonic() + 60
            while not loop._between_steps and time.monotonic() < until_s:
                time.sleep(0.01)

    one = asked(f"taken over {name}", steps=4, loras=SETS.get(name, ()))
    try:
        (ours,) = probe.latents(one, on_event=on_event)
        assert "unet" in probe.assembled.prepared_parts()
        assert 0 < max_difference(ours, converted.reference(one)) < CLOSE
        assert unet_is_mapped(probe)
        assert probe.engine.statistics().lora_switches == (name != "plain")
        wait_prepared(probe, "vae")
    finally:
        probe.engine.stop(drain_s=0)
