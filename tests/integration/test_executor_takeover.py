"""When steps run on prepared programs, when on torch, and how one takes over from the other; on tiny models.

What programs cannot take, or must not because bits matter, torch computes as ever.
"""

from __future__ import annotations

import logging
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait_kernels.executors import openvino_executor
from plait_serving.diffusion.families.preparation import Preparer
from plait_serving.diffusion.knobs import Exact
from plait_serving.diffusion.values import Edit, Event, Progress
from support.closeness import EQUAL, ulps
from support.denoise import control_image, max_difference
from support.prepared import (
    CLOSE,
    CONTROLLED,
    PLAIN,
    SETS,
    Models,
    asked,
    convert,
    dressed,
    unet_is_mapped,
    wait_prepared,
    write_models,
)
from support.tiny import tiny_sd, tiny_sdxl
from support.waiting import wait_for

pytest.importorskip("openvino", reason="needs openvino")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models in float16 files, after a first start."""
    folder = tmp_path_factory.mktemp("tiny")
    return convert(write_models(folder, partial(tiny_sd, dtype=torch.float16)))


@pytest.fixture
def fresh(converted: Models, tmp_path: Path) -> Models:
    """The same before the first start."""
    shutil.copytree(converted.folder / "loras", tmp_path / "loras")
    return replace(converted, folder=tmp_path)


def test_exact_always_gives_the_pipelines_bits(converted):
    """While programs are adopted too: plain, with a LoRA (merged then) and with a ControlNet. Then programs again."""
    with converted.started(exact=Exact.ALWAYS) as probe:
        assert probe.engine.pool.prepared == {"unet", "vae"}
        for one in (PLAIN, dressed("peft"), CONTROLLED):
            assert ulps(probe.latents(one)[0], converted.reference(one)) <= EQUAL
        assert torch.equal(probe.latents(PLAIN)[0], converted.reference(PLAIN))
        assert not unet_is_mapped(probe)
        probe.engine.reconfigure(probe.engine.knobs.model_copy(update={"exact": Exact.NEVER}))
        for one in (PLAIN, dressed("peft"), CONTROLLED):
            assert 0 < max_difference(probe.latents(one)[0], converted.reference(one)) < CLOSE


def test_a_lora_on_the_time_embedding_is_merged_and_runs_on_torch(converted):
    """Programs begin after it: the weights come into memory, merged as ever; others stay on programs."""
    with converted.started() as probe:
        probe.latents(dressed("peft"))
        assert unet_is_mapped(probe)
        assert probe.engine.statistics().lora_switches == 0
        (ours,) = probe.latents(dressed("time"))
        assert ulps(ours, converted.reference(dressed("time"))) <= EQUAL
        assert not unet_is_mapped(probe)
        assert probe.engine.statistics().lora_switches == 1
        company = (dressed("time"), dressed("peft"), PLAIN)
        found = probe.latents(*company)
        assert sorted(probe.batches) == [1, 1, 2, 2]
        for ours, one in zip(found, company, strict=True):
            assert max_difference(ours, converted.reference(one)) < CLOSE
        assert ulps(found[0], converted.reference(dressed("time"))) <= EQUAL
        assert max_difference(found[2], converted.reference(PLAIN)) > 0


def without_unet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No UNet was prepared before."""
    opens = Preparer.open
    monkeypatch.setattr(
        Preparer, "open", lambda self, part, *of: None if part.files.folder.name == "unet" else opens(self, part, *of)
    )


def test_a_request_that_torch_began_is_finished_by_programs(converted, monkeypatch):
    """Programs arrive between two steps: a set that was merged becomes an input, and the latents are diffusers'."""
    go, make = threading.Event(), Preparer.make

    def late(self: Preparer, *of: Any) -> Any:
        assert go.wait(60)
        return make(self, *of)

    without_unet(monkeypatch)
    monkeypatch.setattr(Preparer, "make", late)
    one = asked("taken over", steps=4, loras=SETS["text"])
    with converted.started(converts=True) as probe:

        def on_event(event: Event) -> None:
            if isinstance(event, Progress) and event.step == 2:
                assert "unet" not in probe.engine.pool.prepared
                go.set()
                wait_for(lambda: probe.engine._loop._between_steps)

        (ours,) = probe.latents(one, on_event=on_event)
        assert "unet" in probe.engine.pool.prepared
        assert 0 < max_difference(ours, converted.reference(one)) < CLOSE
        assert unet_is_mapped(probe)
        assert probe.engine.statistics().lora_switches == 1
        wait_prepared(probe, "vae")


def test_a_tiny_sdxl_runs_on_programs(tmp_path):
    """SDXL: pooled text and sizes, two text encoders with LoRAs, a ControlNet; in company."""
    models = write_models(tmp_path, partial(tiny_sdxl, layers_per_block=1, transformer_layers_per_block=(1, 1)))
    company = (dressed("text"), dressed("both"), PLAIN, CONTROLLED)
    with models.started(converts=True) as first:
        first.latents(CONTROLLED)
        wait_prepared(first, "unet", "vae", "edges")
        together = first.latents(*company)
        assert first.batches == [4, 4]
        for ours, one in zip(together, company, strict=True):
            assert 0 < max_difference(ours, models.reference(one)) < CLOSE


LEFT = np.repeat([[255] * 16 + [0] * 16], 32, axis=0).astype(np.uint8)
IMAGE = control_image(4)


def test_edits_run_on_programs(converted):
    """torch encodes the image with weights that come from the file; the steps are shared with a generation."""
    one = asked("edit", steps=4, edit=Edit(image=IMAGE, mask=LEFT, strength=0.7), loras=SETS["peft"])
    with converted.started() as probe:
        ours, _ = probe.latents(one, PLAIN)
        assert probe.batches == [2, 2, *[1] * (one.run_steps - 2)]
        assert 0 < max_difference(ours, converted.reference(one)) < CLOSE
        assert unet_is_mapped(probe)


def test_an_inpainting_unet_runs_on_programs(tmp_path):
    """Its halves take nine channels."""
    models = Models(tmp_path, tiny_sd(tmp_path / "base", seed=4, in_channels=9), {})
    (tmp_path / "loras").mkdir()
    with models.started(converts=True) as probe:
        wait_prepared(probe, "unet", "vae")
        company = [asked(f"nine {s}", steps=4, edit=Edit(image=IMAGE, mask=LEFT, strength=s)) for s in (0.5, 1.0)]
        found = probe.latents(*company)
        for ours, one in zip(found, company, strict=True):
            assert 0 < max_difference(ours, models.reference(one)) < CLOSE


def test_a_conversion_that_is_not_equal_is_not_used(fresh, caplog, monkeypatch):
    """A warning for each part says that torch runs it and why; torch serves its bits, nothing stays in the store."""
    monkeypatch.setattr(openvino_executor, "TOLERANCE", {"float32": 0.0})
    with caplog.at_level(logging.WARNING):
        with fresh.started(converts=True) as probe:
            wait_threads("plait-prepare")
            assert torch.equal(probe.latents(PLAIN)[0], fresh.reference(PLAIN))
            probe.latents(CONTROLLED)
            wait_threads("plait-prepare")
            assert ulps(probe.latents(CONTROLLED)[0], fresh.reference(CONTROLLED)) <= EQUAL
    said = [record.getMessage() for record in caplog.records if "runs on torch" in record.getMessage()]
    assert len(said) == 3  # of the UNet, the VAE and the ControlNet
    assert all("it differs from torch by" in line for line in said)
    assert not [path for path in (fresh.folder / "prepared").iterdir() if path.is_dir()]


@pytest.mark.parametrize(("lost", "left"), [("vae-decoder", {"unet"}), ("decoder", {"vae"})])
def test_what_an_interrupted_start_converted_serves_the_next(tmp_path, converted, lost, left):
    """The rest runs on torch and is converted behind."""
    models = replace(converted, folder=Path(shutil.copytree(converted.folder, tmp_path / "tiny")))
    (entry,) = (path for path in (models.folder / "prepared").iterdir() if path.name[32:] == f"-{lost}")
    shutil.rmtree(entry)
    with models.started() as probe:
        assert probe.engine.pool.prepared == left
        assert unet_is_mapped(probe) == ("unet" in left)
        assert max_difference(probe.latents(PLAIN)[0], converted.reference(PLAIN)) < CLOSE
    with models.started(converts=True) as probe:
        wait_prepared(probe, "unet", "vae")
        assert 0 < max_difference(probe.latents(PLAIN)[0], converted.reference(PLAIN)) < CLOSE


def wait_threads(name: str) -> None:
    """Block until no thread of that name runs."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(100)
            assert not thread.is_alive()


def test_a_store_that_cannot_be_written_costs_no_image(fresh, caplog):
    """A file lies where the folder should be: torch serves, and the log says so."""
    (fresh.folder / "prepared").touch()
    with caplog.at_level(logging.WARNING):
        with fresh.started(converts=True) as probe:
            wait_threads("plait-prepare")
            assert torch.equal(probe.latents(PLAIN)[0], fresh.reference(PLAIN))
    assert "runs on torch" in caplog.text
