"""LoRAs and models with names of any script, through everything: files, lists, requests, metrics, log."""

from __future__ import annotations

import logging
import shutil
import urllib.parse

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from plait.offline.inventory import inventory
from plait_serving.deployments.images.hosted import load_images
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.images.config import ImagesSection, LorasSection
from support.http_app import pixels
from support.names import ODD_NAMES
from support.prometheus import lint
from support.tiny import tiny_lora, tiny_sd

MODELS = ("花", 'a"b#c?d%e+f', "_x")
SAVED = "saved/by diffusers"
LORAS = sorted([*ODD_NAMES, "by diffusers", "plain"])


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> ImagesSection:
    """One LoRA under many names, and one model under three; some of each are not served."""
    root = tmp_path_factory.mktemp("odd")
    base = tiny_sd(root / "first")
    lora = tiny_lora(root / "loras" / "plain.safetensors", base)
    for name in ODD_NAMES:
        shutil.copy(lora, root / "loras" / f"{name}.safetensors")
    saved = root / "loras" / SAVED
    saved.mkdir(parents=True)
    shutil.copy(lora, saved / "pytorch_lora_weights.safetensors")
    shutil.copy(lora, saved / "my lora.safetensors")
    for name in MODELS:
        shutil.copytree(base, root / "more" / name)
    shutil.copy(lora, root / "more" / "single.safetensors")
    return ImagesSection(
        model=str(base), models_folder=root / "more", loras=LorasSection(folder=root / "loras"), dtype="float32",
        executor="torch", knobs=EngineKnobs(threads=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def said():
    """What is logged."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("plait_serving")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(scope="module")
def client(images, said):
    hosted = load_images(images, converts=False)
    with TestClient(create_app(hosted, HttpSettings())) as opened:
        yield opened
    hosted.stop(drain_s=0)


def drawn(client: TestClient, **body) -> np.ndarray:
    """The image of one seed."""
    fields = {"prompt": "red apple", "size": "32x32", "num_inference_steps": 2, "seed": 3}
    answer = client.post("/v1/images/generations", json={**fields, **body})
    assert answer.status_code == 200, answer.text
    return pixels(answer.json()["data"][0]["b64_json"])


def test_every_name_is_listed(client):
    """Over HTTP."""
    assert [item["id"] for item in client.get("/v1/loras").json()["data"]] == LORAS
    assert [item["id"] for item in client.get("/v1/models").json()["data"]] == ["first", *sorted(MODELS)]


def test_every_lora_acts(client):
    """Each gives the image of the same file under a plain name."""
    bare, wanted = drawn(client), drawn(client, loras=[{"name": "plain"}])
    assert not np.array_equal(bare, wanted)
    for name in (*ODD_NAMES, "by diffusers"):
        np.testing.assert_array_equal(drawn(client, loras=[{"name": name}]), wanted)


def test_every_model_draws_and_is_a_label(client):
    """By its name in the body; its page, and its line among the metrics, have it too."""
    wanted = drawn(client)
    for name in MODELS:
        np.testing.assert_array_equal(drawn(client, model=name), wanted)
        assert client.get(f"/v1/models/{urllib.parse.quote(name, safe='')}").json()["id"] == name
    text = client.get("/metrics").text
    assert list(lint(text)) == []
    families = text_string_to_metric_families(text)
    labels = {sample.labels["model"]: sample.value for family in families for sample in family.samples
              if sample.name == "plait_model_resident"}  # fmt: skip
    assert labels == dict.fromkeys(("first", *MODELS), 1)
    assert client.get("/v1/status").json()["resident"]["models"] == sorted(("first", *MODELS))


def test_the_log_tells_what_is_served_and_what_is_not_once(client, said, images):
    """However often somebody asks."""
    for _ in range(3):
        drawn(client, loras=[{"name": "my lora"}], model="花")
    for name in MODELS:
        assert said.count(f"{name} is served from now on: {images.models_folder / name}") == 1
    assert sorted(line for line in said if " is ignored: " in line) == [
        f"{images.loras.folder}/{SAVED}/my lora.safetensors is ignored: my lora.safetensors has its name",
        f"{images.models_folder}/single.safetensors is ignored: a single file; images.models names those",
    ]


def test_the_command_lists_them_too(images, said):
    """`plait models list`; it logs what it leaves out for itself, which is not the server's."""
    before = len(said)
    found = inventory(images)
    del said[before:]
    assert sorted(entry.name for entry in found if entry.kind == "lora") == LORAS
    assert {entry.name for entry in found if entry.kind == "base"} == {"first", *MODELS}
