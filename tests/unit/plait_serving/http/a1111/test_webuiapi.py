"""`webuiapi`, unchanged: the client of A1111's API that is on PyPI, over a real socket."""

from __future__ import annotations

import numpy as np
import pytest
import webuiapi
from PIL import Image

from fakes.images import FakeImageService
from plait_serving.http.context import HttpSettings
from support.app_server import AppServer
from support.http_app import make_app
from support.keys import api_key

KEY = "sk:with:colons"


@pytest.fixture(scope="module")
def client():
    """It, of the API over a fake service, with a key."""
    settings = HttpSettings(a1111_api=True, api_keys=(api_key(KEY, tenant="a"),))
    running = AppServer(make_app(FakeImageService(), settings))
    yield webuiapi.WebUIApi(host="127.0.0.1", port=running.port, username="me", password=KEY)
    running.stop()


def test_it_makes_images(client):
    """With its defaults, which ask for nothing that is not there; LoRAs by name; of a seed the same image again."""
    made = client.txt2img(prompt="sunflower <lora:noto:0.5>", seed=7, width=16, height=16, n_iter=2, steps=3)
    assert made.info["all_seeds"] == [7, 8]
    assert [image.size for image in made.images] == [(16, 16)] * 2
    again = client.txt2img(prompt="sunflower <lora:noto:0.5>", seed=8, width=16, height=16, steps=3)
    assert np.array_equal(np.asarray(again.image), np.asarray(made.images[1]))
    assert client.png_info(made.image).info == made.info["infotexts"][0]


def test_it_makes_images_of_images(client):
    """Inpainting and ControlNets as its own classes ask for them."""
    mask = Image.new("L", (16, 16))
    mask.paste(255, (0, 0, 8, 16))
    unit = webuiapi.ControlNetUnit(image=Image.new("RGB", (16, 16), "red"), module="edges", model="edges")
    made = client.img2img(
        images=[Image.new("RGB", (16, 16), "blue")], mask_image=mask, prompt="x", width=16, height=16,
        denoising_strength=0.5, controlnet_units=[unit], sampler_name="DPM++ 2M Karras",
    )  # fmt: skip
    assert made.image.size == (16, 16)
    assert made.info["sampler_name"] == "DPM++ 2M"


def test_its_helpers_find_what_they_look_for(client):
    """Lists, options, and waiting until nothing runs."""
    assert client.util_get_model_names() == ["emoji"]
    client.util_set_model("emojis")
    assert client.util_get_current_model() == "emoji"
    assert "Euler a" in client.util_get_sampler_names()
    assert "karras" in client.util_get_scheduler_names()
    client.util_wait_for_ready()
    assert [lora["name"] for lora in client.get_loras()] == ["noto", "sketch"]
    assert client.get_upscalers()[0]["name"] == webuiapi.Upscaler.none
    asked = "cmd_flags embeddings face_restorers hypernetworks latent_upscale_modes memory prompt_styles sd_vae scripts"
    for ask in (client.interrupt, client.refresh_checkpoints, *(getattr(client, f"get_{it}") for it in asked.split())):
        assert "error" not in ask()
