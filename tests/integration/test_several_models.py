"""Several base models in one engine that has memory for few of them: the images of engines with one model alone."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from plait_serving.deployments.images.hosted import load_images
from plait_serving.diffusion import assemble
from plait_serving.diffusion.assemble import EngineSettings, build_engine, build_engine_of
from plait_serving.diffusion.errors import ModelError, NotFound
from plait_serving.diffusion.families.unet import family
from plait_serving.diffusion.knobs import EngineKnobs, Placement
from plait_serving.diffusion.lora.source import FolderSource
from plait_serving.diffusion.memory import MemoryReader
from plait_serving.diffusion.models import switching
from plait_serving.diffusion.values import ControlRef, Failed, Finished, ImageRequest, LoraRef, Scheduler
from plait_serving.images.config import ControlNetSection, ImagesSection
from support.denoise import make_request
from support.tiny import tiny_lora, tiny_sd, tiny_sdxl

WAIT_S = 60.0
KNOBS = EngineKnobs(threads=1, controlnet_placement=Placement.LOCAL)


def asked(model: str = "", prompt: str = "red apple", **more) -> ImageRequest:
    return make_request(request_id=f"{model} {prompt}", prompt=prompt, model=model, **more)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_sd_controlnets):
    """Three models of two families, the settings of each with the same LoRAs and ControlNets."""
    root = tmp_path_factory.mktemp("several")
    models = {
        "a": tiny_sd(root / "a", seed=1),
        "b": tiny_sd(root / "b", seed=2),
        "xl": tiny_sdxl(root / "xl", seed=3),
    }
    tiny_lora(root / "loras" / "one.safetensors", models["a"], fmt="peft", rank=3, with_text_encoder=True)
    return {
        name: EngineSettings(
            model=folder,
            lora_source=FolderSource(root / "loras"),
            controlnets={"edges": tiny_sd_controlnets[0]},
            knobs=KNOBS,
            converts=False,
        )
        for name, folder in models.items()
    }


@pytest.fixture(scope="module", autouse=True)
def _only_weights_count() -> Iterator[None]:
    """What else a process of tests holds is more than these models do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "memory_of", lambda *_, **__: MemoryReader())
        yield


@pytest.fixture
def engine_of():
    """`engine_of(settings, **options)` builds and starts an engine, which is stopped at the end."""
    built = []

    def build(settings, **options):
        built.append(build_engine_of(settings, **options))
        return built[-1]

    yield build
    for engine in built:
        engine.stop(drain_s=0)


@pytest.fixture(scope="module")
def alone(folders):
    """`alone(request)`: its images by an engine that has this model only."""
    built = {}

    def images(request):
        if request.model not in built:
            built[request.model] = build_engine(folders[request.model])
        return built[request.model].generate(request, timeout_s=WAIT_S).images

    yield images
    for engine in built.values():
        engine.stop(drain_s=0)


@pytest.fixture(scope="module")
def sizes(folders) -> dict[str, int]:
    """The bytes of each model."""
    engine = build_engine_of(folders)
    engine.stop(drain_s=0)
    return {name: model.nbytes for name, model in engine.pool.models.items()}


def test_models_take_turns_in_memory_and_make_the_images_that_each_makes_alone(folders, engine_of, alone, sizes):
    """With memory for one of three, requests for all in turn get the images of three servers, bit for bit."""
    several = engine_of(folders, memory_bytes=max(sizes.values()))
    lora, edges = (LoraRef(name="one", scale=0.7),), np.full((32, 32, 3), 90, np.uint8)
    for request in (
        asked("a", "red apple"),
        asked("b", "red apple", loras=lora),
        asked("xl", "green tree", scheduler=Scheduler.DPMPP_2M),
        asked("a", "blue cat", loras=lora, n=2),
        asked("b", "the dog", controlnets=(ControlRef(name="edges", image=edges),)),
    ):
        images = several.generate(request, timeout_s=WAIT_S).images
        for ours, theirs in zip(images, alone(request), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    statistics = several.pool.statistics()
    assert statistics.loads == 4
    assert statistics.nbytes <= statistics.budget_bytes


def test_a_request_in_work_is_paused_for_another_model_and_goes_on_where_it_was(
    folders, engine_of, alone, sizes, monkeypatch
):
    """A model leaves between two steps of a request; its image is the same as if it had stayed."""
    monkeypatch.setattr(switching, "PATIENCE", 0.001)
    two = {name: folders[name] for name in ("a", "b")}
    several = engine_of(two, memory_bytes=max(sizes[name] for name in two))
    several.generate(asked("a"), timeout_s=WAIT_S)  # so that it knows how long steps take
    image = np.full((32, 32, 3), 200, np.uint8)
    first = asked("b", "asked for first")
    long = asked("a", "the long one", steps=80, controlnets=(ControlRef(name="edges", image=image),))
    ended, both_are_there = queue.Queue(), threading.Event()
    several.between_steps(lambda: both_are_there.wait(WAIT_S))
    for request in (first, long):
        several.submit(request, lambda event: ended.put(event) if isinstance(event, Finished | Failed) else None)
    both_are_there.set()
    results = [ended.get(timeout=WAIT_S).result for _ in range(2)]
    assert [result.request_id for result in results] == [first.request_id, long.request_id]
    assert several.pool.statistics().loads == 2
    np.testing.assert_array_equal(results[1].images[0], alone(long)[0])


def test_the_memory_of_a_model_that_leaves_is_free_at_once(folders, engine_of):
    """Nothing refers to its parts in a circle: a garbage collection would hold up the other models' steps."""
    several = engine_of({name: folders[name] for name in ("a", "b")}, memory_bytes=1 << 21)
    several.generate(asked("a", loras=(LoraRef(name="one"),)), timeout_s=WAIT_S)
    bundle = several.pool.models["a"].stepper.denoiser.bundle
    parts = [weakref.ref(part) for part in (bundle.unet, bundle.vae, *bundle.encoders._modules.values())]
    del bundle
    gc.collect()
    gc.disable()
    try:
        several.generate(asked("b"), timeout_s=WAIT_S)
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_models_of_a_family_share_a_controlnet_and_others_do_not_have_it(folders, engine_of, monkeypatch):
    """One copy in this process serves both; a model of another family says that there is none."""
    load, loaded = family.load_controlnet, []
    monkeypatch.setattr(family, "load_controlnet", lambda *args, **how: loaded.append(args) or load(*args, **how))
    several = engine_of(folders)
    control = (ControlRef(name="edges", image=np.zeros((32, 32, 3), np.uint8)),)
    for name in ("a", "b"):
        several.generate(asked(name, controlnets=control), timeout_s=WAIT_S)
    assert len(loaded) == 1
    with pytest.raises(NotFound, match="edges"):
        several.generate(asked("xl", controlnets=control), timeout_s=WAIT_S)


def test_a_model_larger_than_the_budget_is_refused_by_name(folders, engine_of, sizes):
    """Nothing else is affected, and the sentence names the setting."""
    several = engine_of(folders, memory_bytes=sizes["a"])
    with pytest.raises(ModelError, match=r"xl needs .*images\.memory_bytes"):
        several.generate(asked("xl"), timeout_s=WAIT_S)
    several.generate(asked("b"), timeout_s=WAIT_S)


def test_a_second_name_for_a_folder_is_left_out(folders, engine_of, caplog):
    """The log says which, the engine knows why, and the others are served."""
    several = engine_of({"a": folders["a"], "again": folders["a"], "b": folders["b"]})
    assert list(several.pool.models) == ["a", "b"]
    assert "again is not served" in caplog.text
    assert several.pool.refused == {
        "again": f"{folders['a'].model} is a's folder; another name for it belongs into images.aliases"
    }
    with pytest.raises(NotFound, match="again"):
        several.generate(asked("again"), timeout_s=WAIT_S)


def test_the_catalog_says_what_is_not_served(folders, tiny_sd_controlnets, tiny_sdxl_controlnets, tmp_path):
    """Models that cannot be read, and ControlNets that no model takes, each with the reason; the rest is served."""
    section = ImagesSection(
        models={"a": str(folders["a"].model), "gone": str(tmp_path / "gone")},
        controlnets={
            "edges": ControlNetSection(folder=tiny_sd_controlnets[0]),
            "wide": ControlNetSection(folder=tiny_sdxl_controlnets[0]),
        },
        loras={"folder": tmp_path},
        knobs=KNOBS,
    )
    hosted = load_images(section, converts=False)
    try:
        catalog = asyncio.run(hosted.catalog())
    finally:
        hosted.stop(drain_s=0)
    assert [card.name for card in catalog.models] == ["a"]
    assert list(catalog.refused) == ["gone", "ControlNet wide"]
    assert catalog.refused["gone"] == f"{tmp_path / 'gone'}: no such folder"
    assert "is for another base model" in catalog.refused["ControlNet wide"]
