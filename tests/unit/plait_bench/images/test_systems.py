"""How the systems of the image benchmark are set up: ours as it comes, the peers in what suits them."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from fakes.bench import FakeFleet
from plait.config import ServedConfig
from plait_bench.images import SYSTEMS
from plait_bench.images.measured import StartWorkload
from plait_bench.images.orders import SIZES, ImageSpec, ModelFolder, control_map, workload
from plait_bench.images.ours import body_of, configuration, prepared_parts
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.http.images.schemas import GenerationBody


@pytest.fixture
def models(tmp_path):
    """Folders that exist; nothing is in them."""
    for name in ("base", "edges", "loras"):
        (tmp_path / name).mkdir()
    return ModelFolder(
        root=tmp_path,
        base=tmp_path / "base",
        controlnets={"edges": tmp_path / "edges"},
        loras={"noto": tmp_path / "loras" / "noto.safetensors"},
    )


def served(models, **more):
    """The configuration of a server, as it reads it."""
    given = configuration({"models": models, "dtype": "float32", **more})
    return ServedConfig.model_validate({**given, "server": {}})


def test_ours_sets_no_knob(models):
    """What is measured as `plait` is what a user gets."""
    section = served(models).images
    assert section.knobs == EngineKnobs()
    assert (section.replicas, section.dtype) == (1, "float32")
    assert section.controlnets["edges"].threads == 1
    assert section.resolved_lora_folder() == models.root / "loras"
    ours = SYSTEMS["plait"]
    assert ours.settings == {}
    assert ours.is_own_layout


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name.startswith("plait_") and name != "plait_engine"])
def test_a_variant_differs_in_what_its_name_says(models, name):
    """One setting, valid for the server."""
    section, plain = (served(models, **SYSTEMS[each].settings).images for each in (name, "plait"))
    assert section != plain
    same = {"knobs": EngineKnobs(), "executor": "auto"}
    assert section.model_copy(update=same) == plain.model_copy(update=same)


def test_orders_become_requests_that_the_server_takes():
    """Every field of every workload; the control map survives."""
    for kind in (SIZES["starter"], SIZES["sd15"]):
        for name in kind.workloads[1:]:
            for order in workload(name, kind).items:
                body = GenerationBody.model_validate(body_of(order))
                assert (body.prompt, body.seed, body.num_inference_steps) == (order.prompt, order.seed, order.steps)
                assert [(lora.name, lora.scale) for lora in body.loras or ()] == list(order.loras)
    order = ImageSpec(prompt="owl", seed=1, steps=2, control=("edges", 3), edge=48)
    (control,) = body_of(order)["controlnets"]
    with Image.open(io.BytesIO(base64.b64decode(control["image"]))) as opened:
        assert (np.asarray(opened.convert("RGB")) == control_map(3, 48)).all()


def test_a_start_is_cold_once_and_warm_once():
    """Both in one cache folder, which is empty before and gone after; the processes end."""
    caches: list[str] = []
    fleets: list[FakeFleet] = []

    def open_fleet(known, layout):
        assert layout.processes == 1
        caches.append(known.settings["cache"])
        fleets.append(FakeFleet(known.name, layout, lambda *_: 1.0, []))
        return fleets[-1]

    known = [SYSTEMS["plait"], SYSTEMS["diffusers"]]
    work = StartWorkload("start", known, ImageSpec(prompt="owl", seed=1, steps=1), open_fleet=open_fleet)
    assert (work.name, work.pairs) == ("start", (("plait", "diffusers"),))
    with work.open("diffusers", "") as subject:
        subject.warm_up()
        read = {reading.metric: reading.value for reading in subject.measure(1)}
    assert set(read) == set(work.metrics)
    assert read["peak_memory_gib"] == 3.0
    assert len(caches) == 2
    assert len(set(caches)) == 1
    assert all(fleet.closed for fleet in fleets)


def test_what_a_server_has_converted_is_in_its_metrics():
    """A server that converts nothing has no such metric."""
    head = "# TYPE plait_engine_prepared gauge\n"
    assert prepared_parts("# TYPE plait_images_total counter\n") is None
    assert prepared_parts(head) == frozenset()
    assert prepared_parts(head + 'plait_engine_prepared{part="unet"} 1\nplait_engine_prepared{part="vae"} 1\n') == {
        "unet",
        "vae",
    }
