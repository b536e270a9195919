"""The page at `/` of a whole server with the starter models: people make images and lists with it in a real browser.

`PLAIT_PICTURES=write` writes the pictures of serving/README.md anew.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.asking import ask
from support.browser import needs_browser, window
from support.http_app import pixels

__all__ = ["window"]

pytestmark = [pytest.mark.cluster, *needs_browser]

ESCAPE = "\ue00c"
FOLDER = Path(__file__).parents[2] / "serving"
PICTURES = {"desktop-light": (1280, 940, False), "desktop-dark": (1280, 940, True),
            "phone-light": (390, 844, False), "phone-dark": (390, 844, True)}  # fmt: skip
MAX_PICTURE_BYTES = 150_000
CARDS = {
    "Server", "Queue", "Replicas", "Made since the start", "Models in memory", "Resident LoRAs", "Compiled parts",
}  # fmt: skip
SCENE = (
    ("sunflower", 7, []), ("watermelon", 3, []), ("frog face", 5, ["noto"]), ("octopus", 2, []), ("honeybee", 4, []),
    ("pineapple", 1, ["sketch"]), ("rocket", 9, []), ("penguin", 6, ["noto"]),
)  # fmt: skip
"""Prompt, seed and LoRAs of what the pictures show; the first is shown large."""


@pytest.fixture(scope="module")
def url(starters):
    return starters() + "/"


def opened(window, url, **how):
    page = window(**how)
    page.open(url)
    assert page.wait("return document.body.dataset.ready") == "true"
    return page


def made(page, prompt, seed, loras=(), count=1):
    """Fills the form as a person does, and waits for the image."""
    page.run("for (const chip of document.querySelectorAll('#loras .chip[aria-pressed=true]')) chip.click()")
    page.fill("#prompt", prompt)
    page.keys(ESCAPE)
    page.fill("#seed", str(seed))
    for name in loras:
        page.run("[...document.querySelectorAll('#loras .chip')].find((c) => c.textContent === args[0]).click()", name)
    page.click("#generate")
    page.wait("return document.querySelectorAll('#grid li').length >= args[0]", count)


def asked(url, body):
    return pixels(ask(url + "v1/images/generations", body).json()["data"][0]["b64_json"]).astype(int)


def test_an_image_made_on_the_page_is_the_one_that_the_api_makes(url, window):
    """With a LoRA and a seed; its copied body, asked for again, gives it again."""
    page = opened(window, url)
    made(page, "red apple", 7, ["noto"])
    shown, body = page.run(
        """const { kept } = await import(new URL("ui/js/store.js", document.baseURI));
        const { base64Of } = await import(new URL("ui/js/bytes.js", document.baseURI));
        const [image] = await kept();
        return [await base64Of(image.blob), image.body];"""
    )
    assert body["loras"] == [{"name": "noto", "scale": 1}]
    assert np.abs(pixels(shown) - asked(url, body)).max() <= 1  # rows of others in a batch may move a level
    assert np.abs(pixels(shown) - asked(url, {**body, "loras": []})).max() > 50
    assert page.complaints() == []


def test_the_ranking_follows_the_person(url, window):
    """Ten films with their names at once; others for another taste, and a film of the history is found by its name."""
    page = opened(window, url + "#rank")
    page.wait("return document.querySelectorAll('#rank-results li').length === 10")
    names = "return [...document.querySelectorAll('#rank-results .name')].map((each) => each.textContent).join('|')"
    first = page.run(names)
    page.click("#rank-inputs [data-number='7']")
    page.wait(f"{names} !== args[0]".replace("return ", "return (", 1).replace(" !== args", ") !== args", 1), first)
    page.type("#rank-history", "the silent")
    page.keys("\ue007")
    page.wait("return document.querySelectorAll('#rank-inputs .removable').length === 4")
    assert "server" in page.text("#rank-times")
    assert page.barriers() == []
    assert page.complaints() == []


def test_the_status_tells_of_the_server(url, window):
    """One engine, one ingress, the models by name, and the tenant's images."""
    asked(url, {"prompt": "red apple", "num_inference_steps": 1})
    page = opened(window, url + "#status")
    page.wait("return document.getElementById('status-cards').innerText.includes('1 engine')")
    names = "return [...document.querySelectorAll('#status-cards section')].map((each) => each.ariaLabel)"
    assert set(page.run(names)) == CARDS
    assert "1 for HTTP" in page.text("#status-cards")
    assert {"emoji", "picks"} <= set(page.text("#status-models").split())
    page.wait("return document.querySelector('#status-tenants').innerText.includes('default')")
    # On a busy host the engine's account can be late: the page shows the rest.
    assert [each for each in page.complaints() if "v1/usage" not in each] == []


@pytest.mark.skipif(os.environ.get("PLAIT_PICTURES") != "write", reason="PLAIT_PICTURES is not write")
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_for_the_guide_are_written(url, window, name):
    """Small files, of a page with a gallery in it."""
    width, height, dark = PICTURES[name]
    page = opened(window, url, width=width, height=height, dark=dark)
    for count, scene in enumerate(reversed(SCENE), 1):
        made(page, *scene, count=count)
    page.run("document.activeElement.blur(); scrollTo(0, 0)")
    if name == "phone-dark":  # the light one shows the form
        page.run("document.getElementById('stage').scrollIntoView({ block: 'start', behavior: 'instant' })")
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = FOLDER / f"page-{name}.webp"
    picture.save(path, quality=88, method=6)
    assert path.stat().st_size < MAX_PICTURE_BYTES


def test_the_guide_shows_the_page():
    """All four pictures are there, small, and linked."""
    guide = (FOLDER / "README.md").read_text()
    for name, (width, height, _) in PICTURES.items():
        path = FOLDER / f"page-{name}.webp"
        assert f"({path.name})" in guide
        assert path.stat().st_size < MAX_PICTURE_BYTES
        assert Image.open(path).size == (width, height)
