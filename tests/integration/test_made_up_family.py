"""A family that nobody made is served like any other: a folder, and a line in the table, and no other change."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from fakes.blocks import PIPELINE, ROW, blocks_folder, blocks_lora
from plait.offline.inventory import inventory
from plait_serving.deployments.images.hosted import HostedImages, load_images
from plait_serving.diffusion.decoding import to_rgb
from plait_serving.diffusion.families import FAMILIES
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.lora.merged_folder import LoraFile, write_merged
from plait_serving.diffusion.protocols import StepCall
from plait_serving.diffusion.values import ImageRequest, Scheduler
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.images.config import ImagesSection, LorasSection
from support.families import opened
from support.http_app import pixels
from support.prometheus import total
from support.tiny import tiny_sd

ASKED = {"prompt": "red and blue", "size": "48x32", "num_inference_steps": 5, "guidance_scale": 3.0}


@pytest.fixture(scope="module", autouse=True)
def _in_the_table() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(FAMILIES, PIPELINE, ROW)
        yield


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> ImagesSection:
    """It, with a LoRA, beside a Stable Diffusion."""
    root = tmp_path_factory.mktemp("blocks")
    models = {"blocks": str(blocks_folder(root / "blocks")), "sd": str(tiny_sd(root / "sd"))}
    blocks_lora(root / "loras" / "pale.safetensors")
    return ImagesSection(
        models=models, loras=LorasSection(folder=root / "loras"), dtype="float32", executor="torch",
        knobs=EngineKnobs(threads=1, batch_wait_ms=500.0, largest_batch=8), controlnets={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def hosted(section: ImagesSection) -> Iterator[HostedImages]:
    found = load_images(section, converts=False)
    found.warm_up()
    yield found
    found.stop(drain_s=0)


@pytest.fixture(scope="module")
def client(hosted: HostedImages) -> Iterator[TestClient]:
    with TestClient(create_app(hosted, HttpSettings())) as at_hand:
        yield at_hand


def drawn(client: TestClient, **body: Any) -> np.ndarray:
    answer = client.post("/v1/images/generations", json={**ASKED, "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    return pixels(answer.json()["data"][0]["b64_json"])


def calls_of(client: TestClient) -> float:
    """How many denoiser calls were made."""
    return total(client.get("/metrics").text, "plait_engine_steps_total")


def by_hand(folder: Path, *, seed: int = 3, guidance_scale: float = 3.0, steps: int = 5) -> np.ndarray:
    """The image of `ASKED`, without an engine."""
    family = opened(folder)
    request = ImageRequest(
        request_id="r", prompt="red and blue", width=48, height=32, steps=steps, guidance_scale=guidance_scale,
        seed=seed, scheduler=Scheduler.EULER,
    )  # fmt: skip
    denoiser = family.load()
    encoding, conditioning = denoiser.begin(request), None
    while conditioning is None:
        conditioning = encoding.advance()
    sampler = denoiser.sampler(request, request.seeds)
    latents = sampler.init_latents()
    for step, time in enumerate(sampler.timesteps):
        call = StepCall(request=request, conditioning=conditioning, sample=latents, timestep=time, controls=())
        (output,) = denoiser.predict([call])
        assert isinstance(output, torch.Tensor)
        latents = sampler.step(output, step, latents)
    return to_rgb(denoiser.finish(latents))[0]


def test_it_is_listed(client: TestClient, section: ImagesSection) -> None:
    """Over HTTP with what requests may say, and by `plait models list`."""
    (found, _) = client.get("/v1/models").json()["data"]
    told = ("id", "family", "default_size", "default_num_inference_steps", "default_guidance_scale", "schedulers")
    assert [found[key] for key in told] == ["blocks", "blocks", "32x32", 6, 2.0, ["euler"]]
    assert found["fields"] == ["guidance_scale", "max_sequence_length"]
    assert [each["name"] for each in found["controls"]] == ["max_sequence_length"]
    listed = [(each.name, each.family) for each in inventory(section) if each.kind == "base"]
    assert listed == [("blocks", "blocks"), ("sd", "sd1")]


def test_it_is_served(client: TestClient, section: ImagesSection) -> None:
    """Requests with other steps, other seeds, with and without guidance share calls, and each gets its own image."""
    asked = [
        {"seed": seed, "guidance_scale": scale, "num_inference_steps": steps}
        for seed, scale, steps in ((1, 3.0, 5), (2, 1.0, 4), (3, 2.5, 6), (4, 0.0, 5))
    ]
    before = calls_of(client)
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(lambda body: drawn(client, **body), asked))
    folder = Path(section.base_models["blocks"].folder)
    for body, image in zip(asked, found, strict=True):
        alone = by_hand(folder, seed=body["seed"], guidance_scale=body["guidance_scale"],
                        steps=body["num_inference_steps"])  # fmt: skip
        assert np.abs(image.astype(int) - alone.astype(int)).max() <= 1
    assert calls_of(client) - before < sum(body["num_inference_steps"] for body in asked)


def test_its_loras_act(client: TestClient, section: ImagesSection, tmp_path: Path) -> None:
    """In the model that steps and in its text encoder: as in a model that `plait models merge` writes."""
    folder = Path(section.base_models["blocks"].folder)
    file = section.loras.folder / "pale.safetensors"
    write_merged(folder, [LoraFile(name="pale", path=file, scale=0.5)], tmp_path / "merged")
    changed = drawn(client, loras=[{"name": "pale", "scale": 0.5}])
    assert np.abs(changed.astype(int) - by_hand(tmp_path / "merged").astype(int)).max() <= 1
    assert np.abs(changed.astype(int) - drawn(client).astype(int)).max() > 8


def test_an_edit_is_refused_by_its_image(client: TestClient) -> None:
    """It starts from noise only."""
    image = client.post("/v1/images/generations", json={**ASKED, "seed": 3}).json()["data"][0]["b64_json"]
    answer = client.post("/v1/images/edits", json={**ASKED, "image": image})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")
