"""Base models that appear in a folder and leave it while the engine runs."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from functools import cache

import numpy as np
import pytest

from plait_serving.diffusion.assemble import EngineSettings, build_engine, build_engine_of
from plait_serving.diffusion.errors import EngineError, NotFound
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.models.folder import FolderOfModels
from plait_serving.diffusion.models.model import Model
from plait_serving.diffusion.values import Finished, ImageRequest, Progress
from support.denoise import make_request
from support.tiny import tiny_sd, tiny_sdxl
from support.waiting import wait_for

WAIT_S = 60.0


def asked(model: str, **more) -> ImageRequest:
    return make_request(request_id=model, model=model, **more)


def settings(folder) -> EngineSettings:
    return EngineSettings(model=folder, knobs=EngineKnobs(threads=1), converts=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Three models outside of the folder."""
    root = tmp_path_factory.mktemp("models")
    return {
        "first": tiny_sd(root / "first", seed=1),
        "b": tiny_sd(root / "b", seed=2),
        "xl": tiny_sdxl(root / "xl", seed=3),
    }


@pytest.fixture
def serving(models, tmp_path):
    """An engine of the first model with an empty folder of more."""
    folder = tmp_path / "more"
    engine = build_engine_of({"first": settings(models["first"])}, folder=FolderOfModels(folder))
    folder.mkdir()
    yield engine, folder
    engine.stop(drain_s=0)


def drawn(engine, model: str):
    return engine.generate(asked(model), timeout_s=WAIT_S).images[0]


@cache
def alone(folder):
    """The image of an engine that has this model only."""
    engine = build_engine(settings(folder))
    try:
        return drawn(engine, "")
    finally:
        engine.stop(drain_s=0)


def test_models_that_appear_are_served_and_those_that_leave_are_not(serving, models):
    """A request finds a new one at once, of any family, with the image that it makes alone; the others stay."""
    engine, folder = serving
    with pytest.raises(NotFound):
        drawn(engine, "b")
    for name in ("b", "xl"):
        shutil.copytree(models[name], folder / name)
        np.testing.assert_array_equal(drawn(engine, name), alone(models[name]))
    assert list(engine.pool.models) == ["first", "b", "xl"]
    shutil.rmtree(folder / "b")
    engine.pool.look()
    assert list(engine.pool.models) == ["first", "xl"]
    with pytest.raises(NotFound):
        drawn(engine, "b")
    wait_for(lambda: engine.pool.statistics().resident == ("first", "xl"))
    np.testing.assert_array_equal(drawn(engine, "first"), alone(models["first"]))


def test_what_was_accepted_is_finished(serving, models):
    """A model that leaves in the middle of a request makes its image first; its weights leave after that."""
    engine, folder = serving
    shutil.copytree(models["b"], folder / "b")
    begun, ended, last = threading.Event(), threading.Event(), []

    def sink(event) -> None:
        last[:] = [event]
        begun.set() if isinstance(event, Progress) else ended.set()

    engine.submit(asked("b", steps=100), sink)
    assert begun.wait(WAIT_S)
    (folder / "b").rename(folder.parent / "away")
    engine.pool.look()
    with pytest.raises(NotFound):
        drawn(engine, "b")
    assert ended.wait(WAIT_S)
    assert isinstance(last[0], Finished), last
    wait_for(lambda: engine.pool.statistics().resident == ("first",))
    (folder.parent / "away").rename(folder / "b")
    np.testing.assert_array_equal(drawn(engine, "b"), alone(models["b"]))


def test_a_model_that_is_replaced_makes_the_new_images(serving, models):
    """Another folder under the same name is another model, once the old one has gone."""
    engine, folder = serving
    shutil.copytree(models["b"], folder / "one")
    drawn(engine, "one")
    shutil.rmtree(folder / "one")
    shutil.copytree(models["xl"], folder / "one")
    engine.pool.look()
    wait_for(lambda: engine.pool.may_add("one") or "one" in engine.pool.models)
    np.testing.assert_array_equal(drawn(engine, "one"), alone(models["xl"]))


def test_of_models_that_came_and_went_nothing_is_left(serving, models):
    """Neither weights nor what is known of a model without them: configuration, tokenizers, LoRAs' caches with their
    threads, statistics. Of one that is replaced before it was ever loaded neither."""
    engine, folder = serving
    drawn(engine, "first")
    before, alive = loader_threads(), []
    for number in range(2):
        name = f"m{number}"
        shutil.copytree(models["b" if number % 2 else "xl"], folder / name)
        drawn(engine, name)
        alive += parts_of(engine.pool.models[name])
        (folder / name).rename(folder.parent / name)
        engine.pool.look()
        wait_for(lambda: engine.pool.statistics().resident == ("first",))
    for kind in ("b", "xl"):
        shutil.copytree(models[kind], folder / "never")
        engine.pool.look()
        alive += parts_of(engine.pool.models["never"], loaded=False)
        shutil.rmtree(folder / "never")
        engine.pool.look()
    wait_for(lambda: not [what for what, one in alive if one() is not None])
    gc.collect()
    assert [each.name for each in gc.get_objects() if type(each) is Model and each.name != "first"] == []
    assert list(engine.request_s()) == ["first"]
    wait_for(lambda: loader_threads() == before)


def parts_of(model, *, loaded: bool = True) -> list[tuple[str, weakref.ref]]:
    """What is made for one base model."""
    family = model.family
    parts = {
        "model": model, "family": family, "outline": family._outline.unet, "preparer": family.preparer,
        "loras": model.loras if family.kind == "sdxl" else model, "auditor": family.auditor,
        "costs": model.costs, "forecast": model.forecast,
    }  # fmt: skip
    if loaded:
        denoiser = model.stepper.denoiser
        bundle = denoiser.bundle
        parts |= {"weights": bundle.unet, "denoiser": denoiser, "tokenizer": bundle.tokenizers["text_encoder"]}
    return [(f"{model.name}: {what}", weakref.ref(part)) for what, part in parts.items() if part is not None]


def loader_threads() -> int:
    return sum(thread.name.startswith("plait-lora") for thread in threading.enumerate())


def test_a_model_that_leaves_while_a_request_comes_in_refuses_it(serving, models):
    """The request was checked, and is not accepted yet when the model is gone: it is refused, the others go on."""
    engine, folder = serving
    shutil.copytree(models["b"], folder / "b")
    engine.pool.look()
    family = engine.pool.models["b"].family
    measure = family.measure

    def and_leave(request):
        (folder / "b").rename(folder.parent / "away")
        engine.pool.look()
        wait_for(lambda: "b" not in engine.pool._models)
        return measure(request)

    family.measure = and_leave
    with pytest.raises(NotFound):
        drawn(engine, "b")
    np.testing.assert_array_equal(drawn(engine, "first"), alone(models["first"]))


def test_a_model_that_comes_later_makes_images_as_large_as_the_first(serving, models, monkeypatch):
    """What models in memory hold is part of what they were given: it is not taken off once more."""
    engine, folder = serving
    drawn(engine, "first")
    monkeypatch.setattr("plait_serving.diffusion.assemble.available_bytes", lambda _: 0)  # all the rest is in use
    shutil.copytree(models["b"], folder / "b")
    engine.pool.look()
    assert engine.pool.models["b"].limits == engine.pool.first.limits


def test_what_cannot_be_served_is_left_out_with_its_reason(serving, models, caplog):
    """A folder or a configuration that lacks something, and a name of the configuration, are in the log once, and the
    engine knows why; a repaired one is served beside them."""
    engine, folder = serving
    first, broken, damaged = (shutil.copytree(models["b"], folder / name) for name in ("first", "broken", "damaged"))
    kept = (broken / "unet" / "config.json").rename(folder.parent / "config.json")
    config = json.loads(kept.read_text(encoding="utf-8"))
    del config["down_block_types"]
    (damaged / "unet" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for _ in range(2):
        engine.pool.look()
    assert list(engine.pool.models) == ["first"]
    for what in ("broken is not served", "damaged is not served", "the configuration has another model of that name"):
        assert caplog.text.count(what) == 1
    refused = engine.pool.refused
    assert refused["broken"] == f"{broken / 'unet' / 'config.json'}: missing"
    assert "down_block_types" in refused["damaged"]
    assert refused["another first"] == f"{first}: the configuration has another model of that name"
    np.testing.assert_array_equal(drawn(engine, "first"), alone(models["first"]))
    kept.rename(broken / "unet" / "config.json")
    np.testing.assert_array_equal(drawn(engine, "broken"), alone(models["b"]))
    assert set(engine.pool.refused) == {"damaged", "another first"}


def test_weights_that_vanish_in_use_fail_with_a_sentence(serving, models):
    """A folder that lost its weights after it was looked at fails its own requests; it is served again when whole."""
    engine, folder = serving
    shutil.copytree(models["b"], folder / "b")
    engine.pool.look()
    kept = (folder / "b" / "unet").rename(folder.parent / "unet")
    with pytest.raises(EngineError, match="b"):
        drawn(engine, "b")
    kept.rename(folder / "b" / "unet")
    np.testing.assert_array_equal(drawn(engine, "b"), alone(models["b"]))


def test_a_link_inside_is_another_name_of_its_folder(tmp_path, models):
    """And a stamp tells one state of it from another."""
    folder = shutil.copytree(models["b"], tmp_path / "b")
    (tmp_path / "twin").symlink_to(folder)
    found = FolderOfModels(tmp_path).list()
    assert {name: each.folder for name, each in found.items()} == {"b": folder, "twin": folder}
    assert FolderOfModels(tmp_path).list()["b"] == found["b"]
    (folder / "unet" / "config.json").write_text("{}")
    assert FolderOfModels(tmp_path).list()["b"].stamp != found["b"].stamp


# ---- sleep and wake ------------------------------------------------------------------------------------------------


def test_a_model_that_sleeps_holds_no_memory_and_wakes_for_a_request(models):
    """The weights of a server's only model are gone, too; the next request gets the image that it had."""
    engine = build_engine_of({"first": settings(models["first"])})
    try:
        before = drawn(engine, "first")
        bundle = engine.pool.first.stepper.denoiser.bundle
        weights = [weakref.ref(part) for part in (bundle.unet, bundle.vae)]
        del bundle
        engine.rest("first", asleep=True)
        wait_for(lambda: not engine.pool.statistics().resident)
        gc.collect()
        assert [part() for part in weights] == [None, None]
        np.testing.assert_array_equal(drawn(engine, "first"), before)
        assert engine.pool.statistics().resident == ("first",)
    finally:
        engine.stop(drain_s=0)


def test_waking_loads_a_model_without_a_request(models):
    """It is resident again, and a model that was never asked for becomes so."""
    engine = build_engine_of({"first": settings(models["first"]), "xl": settings(models["xl"])})
    try:
        engine.rest("first", asleep=True)
        wait_for(lambda: not engine.pool.statistics().resident)
        for name in ("first", "xl"):
            engine.rest(name, asleep=False)
        wait_for(lambda: engine.pool.statistics().resident == ("first", "xl"))
        engine.rest("first", asleep=False)
        np.testing.assert_array_equal(drawn(engine, "first"), alone(models["first"]))
        with pytest.raises(NotFound, match="other"):
            engine.rest("other", asleep=True)
    finally:
        engine.stop(drain_s=0)


def test_requests_end_before_a_model_sleeps(serving):
    """What was accepted is finished; what arrives meanwhile, too."""
    engine, _ = serving
    ended = []
    begun, both = threading.Event(), threading.Semaphore(0)

    def sink(event) -> None:
        begun.set()
        if not isinstance(event, Progress):
            ended.append(event)
            both.release()

    engine.submit(asked("first", steps=60), sink)
    assert begun.wait(WAIT_S)
    engine.rest("first", asleep=True)
    engine.submit(asked("first", steps=3), sink)
    assert both.acquire(timeout=WAIT_S)
    assert both.acquire(timeout=WAIT_S)
    assert [type(event) for event in ended] == [Finished, Finished]
    wait_for(lambda: not engine.pool.statistics().resident)
