"""The page in a real browser, around services that answer as a test wants them to."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fakes.images import FAKE_CATALOG, FakeImageService
from fakes.ranking import fake_rankers
from plait_serving.diffusion.errors import Overloaded
from plait_serving.diffusion.request_terms import RequestTerms, SamplerChoice
from plait_serving.diffusion.values import Scheduler
from plait_serving.http.app import create_app
from plait_serving.http.context import HttpSettings
from plait_serving.images.config import ResultsSection
from plait_serving.images.service import LoraCard
from plait_serving.ranking.local import LocalRankingService
from plait_serving.replica_metrics import ReplicaMetrics, family
from plait_serving.sections import TenantLimits
from plait_serving.starter.preprocess import PREPROCESSORS
from plait_serving.starter.words import image_words
from support.app_server import AppServer
from support.browser import needs_browser, window
from support.http_app import b64, png
from support.http_rank import arrays, as_json
from support.keys import api_key
from support.names import ODD_NAMES
from support.waiting import wait_for

__all__ = ["window"]

pytestmark = needs_browser

DOWN, ENTER, ESCAPE, RIGHT, SPACE = "\ue015", "\ue007", "\ue00c", "\ue014", " "
SECRET = "sk-page"
READY = "return document.body.dataset.ready"
MADE = "return document.querySelectorAll('#grid li').length >= args[0]"
VALUE = "return document.querySelector(args[0]).value"


class Desk:
    """A server with both workloads, and a window with its page."""

    def __init__(self, open_window, service=None, *, settings=None, ranking=True, path="", **how):
        self.service = service or FakeImageService()
        settings = settings or HttpSettings()
        words = {"emoji": image_words(), **settings.words}
        settings = replace(settings, preprocessors=PREPROCESSORS, words=words)
        rankers = LocalRankingService(fake_rankers()) if ranking else None
        self.server = AppServer(create_app(self.service, settings, ranking=rankers))
        self.url = f"http://127.0.0.1:{self.server.port}/"
        self.page = open_window(**how)
        self.page.open(self.url + path)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.page.close()
        self.server.stop()

    def ready(self):
        assert self.page.wait(READY) == "true"
        return self.page

    def make(self, prompt, count=1):
        self.page.fill("#prompt", prompt)
        self.page.keys(ESCAPE)
        self.page.click("#generate")
        self.page.wait(MADE, count)
        return self.service.submitted[-1]


def test_a_prompt_is_completed_and_what_was_chosen_is_made(window):
    """By keys alone: a concept, a LoRA with its scale, a seed, two images; the same in the gallery after a reload."""
    with Desk(window) as desk:
        page = desk.ready()
        page.type("#prompt", "red ap")
        assert page.text("#completions") == "red apple"
        page.keys(DOWN, ENTER)
        assert page.run(VALUE, "#prompt") == "red apple"
        page.click("#loras .chip")
        page.fill("#lora-noto", "0.6")
        page.fill("#seed", "41")
        page.fill("#n", "2")
        page.click("#generate")
        page.wait(MADE, 2)
        made = {request.seed: request for request in desk.service.submitted}
        assert made.keys() == {41, 42}
        assert (made[41].prompt, made[41].loras[0].name, made[41].loras[0].scale) == ("red apple", "noto", 0.6)
        page.open(desk.url)
        desk.ready()
        assert page.run("return document.querySelectorAll('#grid li').length") == 2
        assert page.run(VALUE, "#prompt") == "red apple"  # the form, too
        page.fill("#seed", "-1")  # A1111's way to ask for any
        page.fill("#n", "2")
        page.click("#generate")
        page.wait(MADE, 4)
        seeds = {request.seed for request in desk.service.submitted}
        assert len(seeds) == 4
        assert min(seeds) >= 0
        assert page.complaints() == []


def test_fields_that_the_server_declares_have_controls(window):
    """Drawn from what its model says; a number may be left to the model, and be taken back; what is left alone is not
    sent, and a reload keeps the rest."""
    with Desk(window) as desk:
        page = desk.ready()
        page.click("#finer summary")
        assert "CFG rescale" in page.text("#fields")
        made = desk.make("red apple")
        assert (made.guidance_rescale, made.max_sequence_length) == (0.0, None)
        page.fill("#field-guidance_rescale", "0.5")
        page.fill("#field-max_sequence_length", "128")
        made = desk.make("red apple", 2)
        assert (made.guidance_rescale, made.max_sequence_length) == (0.5, 128)
        page.open(desk.url)
        desk.ready()
        assert [page.run(VALUE, f"#field-{name}") for name in ("guidance_rescale", "max_sequence_length")] == [
            "0.5", "128",
        ]  # fmt: skip
        page.fill("#field-max_sequence_length", "513")
        page.click("#generate")
        assert page.run("return document.querySelector('#field-max_sequence_length').validity.rangeOverflow")
        page.fill("#field-max_sequence_length", "")
        assert desk.make("red apple", 3).max_sequence_length is None
        assert page.complaints() == []


def test_what_a_model_has_no_use_for_is_neither_shown_nor_sent(window):
    """Guidance, the negative prompt, declared fields, and for one that reads an image strength and mask; with the other
    model they are there again."""
    (emoji,) = FAKE_CATALOG.models
    terms = RequestTerms(guidance_scale=0.0, edits=False)
    bare = replace(emoji, name="bare", default_guidance_scale=0.0, terms=terms)
    reads = replace(bare, name="reads", terms=replace(terms, reads_images=True))
    shown = "return args.map((each) => document.querySelector(each).checkVisibility())"
    choose = """const model = document.querySelector("#model");
      model.value = args[0]; model.dispatchEvent(new Event("change"))"""
    parts = "#guidance", "#more", "#source-part"
    with Desk(window, FakeImageService(catalog=replace(FAKE_CATALOG, models=(emoji, bare, reads)))) as desk:
        page = desk.ready()
        page.click("#more summary")
        page.fill("#negative", "blur")
        made = desk.make("red apple")
        assert (made.negative_prompt, made.guidance_scale) == ("blur", 7.5)
        page.run(choose, "bare")
        assert page.run(shown, *parts) == [False, False, False]
        assert page.text("#fields") == ""
        made = desk.make("red apple", 2)
        assert (made.model, made.negative_prompt, made.guidance_scale) == ("bare", None, 0.0)
        assert "CFG" not in page.text("#details .facts")
        page.run(choose, "reads")
        assert page.run(shown, *parts) == [False, False, True]
        page.click("[title^='Start an edit']")
        page.wait("return document.querySelector('.source img') !== null")
        assert page.run(shown, "#strength", "[title='Paint a mask']") == [False, False]
        made = desk.make("frog face", 3)
        assert (made.edit, made.reference.shape) == (None, (16, 16, 3))
        page.run(choose, "emoji")
        assert page.run(shown, *parts) == [True, True, True]
        assert page.complaints() == []


def test_words_that_the_model_does_not_know_get_a_hint(window):
    """And those that it knows do not; an idea is one press away."""
    with Desk(window) as desk:
        page = desk.ready()
        page.type("#prompt", "quux")
        page.click("#negative, #more summary")
        assert "320 things" in page.text("#prompt-hint")
        page.click("#ideas button")
        assert page.text("#prompt-hint") == ""
        assert page.run(VALUE, "#prompt") in image_words()["concepts"]
        page.fill("#prompt", "a shiny apple")
        assert page.text("#prompt-hint") == ""


def test_steps_are_seen_and_a_cancelled_request_stops(window):
    """Within a step, on the server, too; the page says so and goes on."""
    with Desk(window, FakeImageService(step_s=0.25)) as desk:
        page = desk.ready()
        page.fill("#steps", "40")
        page.fill("#prompt", "frog face")
        page.keys(ESCAPE)
        page.click("#generate")
        page.wait("return /step [2-9]/.test(document.querySelector('.tile-text').textContent)")
        page.wait("return document.querySelector('.tile img').alt === 'a preview'")
        assert int(page.run("return document.querySelector('.bar').getAttribute('aria-valuenow')")) >= 2
        page.click(".tile-foot button")
        page.wait("return document.querySelector('.tile-text').textContent === 'cancelled'")
        wait_for(lambda: len(desk.service.cancelled) == 1)
        assert desk.service.steps_run < 40
        assert page.run("return document.querySelectorAll('#grid li').length") == 0


class Waiting(FakeImageService):
    """Whose request waits until it is let go, in a queue of three."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    async def counts(self):
        return [ReplicaMetrics(replica="engine", families=[family("plait_engine_requests_waiting", "Waiting", 3)])]

    async def generate(self, request):
        await asyncio.to_thread(self.go.wait, 60)
        async for event in super().generate(request):
            yield event


def test_who_waits_sees_where(window):
    """In the queue, until the first step."""
    with Desk(window, Waiting()) as desk:
        page = desk.ready()
        page.fill("#prompt", "frog face")
        page.keys(ESCAPE)
        page.click("#generate")
        page.wait("return document.querySelector('.tile-text').textContent === 'in the queue: at place 3 or before'")
        desk.service.go.set()
        page.wait(MADE, 1)


def test_a_refusal_is_told_in_the_servers_words(window):
    """In the card of the image that is not there, and in a message; so is a server that has gone."""
    failures = {"too much": Overloaded("the queue is full", retry_after_s=2.0)}
    with Desk(window, FakeImageService(failures=failures), width=390, height=800) as desk:
        page = desk.ready()
        page.fill("#prompt", "too much")
        page.keys(ESCAPE)
        page.click("#generate")
        page.wait("return document.querySelector('.tile.failed .canvas')?.innerText === 'the queue is full'")
        assert "the queue is full" in page.text("#messages")
        assert page.barriers() == []
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        desk.server.stop()
        page.click("#generate")
        page.wait("return document.querySelector('.tile.failed .canvas')?.innerText === 'the server does not answer'")
        page.complaints()  # the browser says so, too


def test_an_image_is_shown_at_full_size(window):
    """A press on it; small ones larger by a whole factor. Another press puts it away."""
    with Desk(window, width=390, height=800) as desk:
        page = desk.ready()
        desk.make("frog face")
        page.click(".tile button.canvas")
        page.wait("return document.querySelector('#large').open")
        shown = "const { width } = document.querySelector('#large img').getBoundingClientRect(); return width"
        page.wait("return document.querySelector('#large img').complete")
        assert page.run(shown) == 16 * int(0.9 * 390 / 16)
        assert "frog face" in page.run("return document.querySelector('#large').getAttribute('aria-label')")
        assert page.barriers() == []
        page.click("#large button")
        page.wait("return !document.querySelector('#large').open")
        page.fill("#size", "128x24")
        desk.make("frog face", 2)
        page.run("document.querySelector('#large').style.maxWidth = '100px'")  # a phone's
        page.click(".tile button.canvas")
        page.wait("return document.querySelector('#large').scrollWidth > document.querySelector('#large').clientWidth")
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def of_limits(**limits):
    """A service whose model makes images of 64x64 by default, within these limits."""
    model = replace(FAKE_CATALOG.model, default_width=64, default_height=64)
    model = replace(model, limits=replace(model.limits, max_edge_px=80, **limits))
    return FakeImageService(catalog=replace(FAKE_CATALOG, models=(model,)))


SHAPES = "return [...document.querySelectorAll('#shapes button')].map((b) => [b.innerText, b.title])"


def test_shapes_are_sizes_of_the_model(window, tmp_path):
    """As many pixels as it was trained for, in multiples that it takes, and within its limits. An image that is given
    decides the shape, as it would be stretched; a square one leaves a square size."""
    with Desk(window, of_limits(max_pixels=64 * 72)) as desk:
        page = desk.ready()
        assert dict(page.run(SHAPES)) == {
            "1:1": "64x64", "3:2": "80x56", "2:3": "56x80", "4:3": "72x56", "3:4": "56x72",
        }  # fmt: skip
        page.click("#shapes [title='56x80']")
        made = desk.make("frog face")
        assert (made.width, made.height) == (56, 80)
        assert page.run("return document.querySelectorAll('#shapes [aria-pressed=true]').length") == 1
        page.click("#shapes [title='64x64']")
        for number, (size, wanted) in enumerate([((40, 41), (64, 64)), ((30, 44), (56, 80)), ((100, 70), (80, 56))]):
            Image.new("RGB", size).save(tmp_path / f"{number}.png")
            page.type("#source input[type=file]", str(tmp_path / f"{number}.png"))
            page.wait("return document.querySelector('.source img') !== null")
            edit = desk.make("frog face", number + 2)
            assert (edit.width, edit.height) == wanted
            page.click("#source [title='Remove the image']")


@pytest.mark.parametrize(
    ("sizes", "offered"),
    [
        (("64x64", "40x80", "48x60"), {"64x64": "64x64", "40x80": "40x80"}),
        (("48x48-72x64",), {"1:1": "64x64", "4:3": "72x56"}),
        (("16x16",), {"16x16": "16x16"}),
    ],
    ids=["listed", "a range", "another"],
)
def test_only_sizes_that_are_allowed_are_offered(window, sizes, offered):
    """Those that are listed, or shapes within a range."""
    with Desk(window, of_limits(sizes=sizes)) as desk:
        assert dict(desk.ready().run(SHAPES)) == offered


def test_marks_and_samplers_options_are_on_the_page(window):
    """What a hint says can be done about it is there; a reload keeps it."""
    with Desk(window) as desk:
        page = desk.ready()
        desk.make("(frog:1.2) face")
        page.wait("return document.querySelector('#details .warning') !== null")
        assert "with prompt_syntax: a1111 it is a mark" in page.text("#details .warning")
        page.click("#finer summary")
        page.run(
            """for (const [name, value] of args[0]) {
              const field = document.getElementById(`field-${name}`);
              field.value = value;
              field.dispatchEvent(new Event("input", { bubbles: true }));
            }""",
            [["prompt_syntax", "a1111"], ["sigmas", "karras"], ["clip_skip", "1"]],
        )
        made = desk.make("(frog:1.2) face", 2)
        assert (made.prompt_syntax, made.sigmas, made.clip_skip, made.eta) == ("a1111", "karras", 1, 0.0)
        assert page.text("#details .warning") == ""
        page.open(desk.url)
        desk.ready()
        assert page.run("return document.querySelector('#finer').open")
        page.run("document.querySelector('#scheduler').value = 'ddim'")
        page.fill("#field-eta", "0.5")
        page.run("document.querySelector('#field-sigmas').value = ''")
        made = desk.make("frog face", 3)
        assert (made.scheduler, made.eta, made.sigmas) == ("ddim", 0.5, None)


def test_the_settings_of_a_file_are_restored(window, tmp_path):
    """Everything that the server writes into a PNG, odd characters included; what it cannot hold is named."""
    body = {
        "prompt": "a \u201cred\u201d apple, 50: 50", "negative_prompt": "blur, noise\nand more",
        "seed": 2**40 + 1, "size": "24x16",
        "num_inference_steps": 7, "guidance_scale": 4.5, "scheduler": "dpmpp_2m", "output_format": "png",
        "guidance_rescale": 0.7,
        "loras": [{"name": "sketch", "scale": 0.35}, {"name": "noto", "scale": -1.0}],
    }  # fmt: skip
    with Desk(window) as desk:
        page = desk.ready()
        kept = page.run(
            """const { asked, image } = args[0];
            const post = (body) => fetch("v1/images/generations", { method: "POST", body: JSON.stringify(body),
              headers: { "content-type": "application/json" } }).then((answer) => answer.json());
            const plain = await post(asked);
            const guided = await post({ ...asked, controlnets: [{ name: "edges", image }] });
            return [plain.data[0].b64_json, guided.data[0].b64_json];""",
            {"asked": body, "image": b64(png())},
        )
        for name, encoded in zip(("plain.png", "guided.png"), kept, strict=True):
            (tmp_path / name).write_bytes(base64.b64decode(encoded))
        page.type("#restore", str(tmp_path / "plain.png"))
        page.wait("return document.querySelector('#messages').innerText.includes('are restored')")
        made = _submit(desk)
        assert (made.prompt, made.negative_prompt, made.seed) == (body["prompt"], body["negative_prompt"], body["seed"])
        assert (made.width, made.height, made.steps, made.guidance_scale) == (24, 16, 7, 4.5)
        assert (made.scheduler, made.guidance_rescale) == ("dpmpp_2m", 0.7)
        assert [(ref.name, ref.scale) for ref in made.loras] == [("sketch", 0.35), ("noto", -1.0)]
        page.type("#restore", str(tmp_path / "guided.png"))
        page.wait("return document.querySelector('#messages').innerText.includes('but for the control image')")
        (tmp_path / "none.png").write_bytes(png())
        page.type("#restore", str(tmp_path / "none.png"))
        page.wait("return document.querySelector('#messages').innerText.includes('carries no settings')")


def test_what_a1111_was_asked_for_and_is_not_done_here_is_said(window, tmp_path):
    """Its marks, clip skip and schedule are taken over, by what the model takes that it names."""
    text = (
        "(frog:1.2) face <lora:noto:0.8> <lora:sketch:1:0.5> <hypernet:old:1>\nNegative prompt: blur\n"
        "Steps: 9, Sampler: DPM++ 2M Karras, CFG scale: 6, Seed: 5, Size: 24x16, Model hash: 6ce0161689, Model: emoji, "
        "Denoising strength: 0.4, Clip skip: 2, Hires upscale: 2, Hires upscaler: Latent, Face restoration: GFPGAN, "
        'Lora hashes: "noto: 1, sketch: 2", Version: v1.10.1'
    )
    info = PngInfo()
    info.add_text("parameters", text)
    Image.new("RGB", (24, 16)).save(tmp_path / "theirs.png", pnginfo=info)
    terms = RequestTerms(samplers=SamplerChoice(among=(Scheduler.EULER,)))
    bare = replace(FAKE_CATALOG.model, name="bare", terms=terms)
    with Desk(window, FakeImageService(catalog=replace(FAKE_CATALOG, models=(bare, FAKE_CATALOG.model)))) as desk:
        page = desk.ready()
        page.type("#restore", str(tmp_path / "theirs.png"))
        page.wait("return document.querySelector('#messages').innerText.includes('restored, but for')")
        said = page.text("#messages")
        for lost in ("<lora:sketch:1:0.5>", "<hypernet:old:1>", "Hires upscale (2)", "Face restoration (GFPGAN)"):
            assert lost in said
        assert not any(taken in said for taken in ("hash", "Version", "Karras", "started from", "noto"))
        made = _submit(desk)
        assert (made.prompt.strip(), made.negative_prompt, made.clip_skip) == ("(frog:1.2) face", "blur", 1)
        assert (made.prompt_syntax, made.scheduler, made.sigmas) == ("a1111", "dpmpp_2m", "karras")
        assert [(ref.name, ref.scale) for ref in made.loras] == [("noto", 0.8)]


def test_numbers_keep_all_their_digits(window, tmp_path):
    """JavaScript's own end at 2**53. A longer seed is not restored, and none is counted up to; a ranking's request is
    sent as it was typed."""
    info = PngInfo()
    info.add_text("parameters", f"frog\nSteps: 9, Sampler: Euler, CFG scale: 6, Seed: {2**53 + 1}, Size: 24x16")
    Image.new("RGB", (24, 16)).save(tmp_path / "long.png", pnginfo=info)
    with Desk(window) as desk:
        page = desk.ready()
        page.fill("#seed", "7")
        page.type("#restore", str(tmp_path / "long.png"))
        page.wait(f"return document.querySelector('#messages').innerText.includes('but for Seed ({2**53 + 1})')")
        assert (page.run(VALUE, "#seed"), page.run(VALUE, "#steps")) == ("7", "9")
        most = int(page.run("return document.querySelector('#n').max"))
        page.fill("#n", str(most))
        page.fill("#seed", str(2**53 - most + 1))
        page.click("#generate")
        assert page.run("return document.querySelector('#seed').validity.rangeOverflow")
        assert desk.service.submitted == []
        page.fill("#seed", str(2**53 - most))
        page.click("#generate")
        page.wait(MADE, most)
        assert {request.seed for request in desk.service.submitted} == set(range(2**53 - most, 2**53))
        page.click("#tab-rank")
        page.wait("return document.querySelector('#rank-raw')?.value")
        asked = as_json({**arrays(), "person": [2**53 + 3]})
        page.run("document.querySelector('#rank-raw').value = args[0]", json.dumps(asked))
        page.click("#rank-inputs .primary")
        page.wait(f"return document.querySelector('#messages').innerText.includes('person: id {2**53 + 3} at')")


def test_names_of_files_are_chosen_and_restored_as_they_are(window, tmp_path):
    """Models and LoRAs of any script, with marks of URLs and markup, and as long as names may be: shown, asked for, and
    read back from the image's text. Nothing of the page is wider than it."""
    names = [*ODD_NAMES, "&amp;" + "w" * 190]
    model = replace(FAKE_CATALOG.model, name=names[-1], limits=replace(FAKE_CATALOG.model.limits, max_loras=16))
    odd = tuple(LoraCard(name=name, family="sd1", format="peft") for name in names)
    catalog = replace(FAKE_CATALOG, models=(model, *(replace(model, name=name) for name in ODD_NAMES)), loras=odd)
    with Desk(window, FakeImageService(catalog=catalog), width=390, height=800) as desk:
        page = desk.ready()
        assert (
            page.run("return [...document.querySelectorAll('#loras .chip')].map((chip) => chip.textContent)") == names
        )
        for i in range(len(names)):
            page.click(f"#loras .chip:nth-child({i + 1})")
        labels = "return [...document.querySelectorAll('#loras .slider label')].map((label) => label.control.value)"
        assert page.run(labels) == ["1"] * len(names)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        page.run("document.querySelector('#model').value = args[0]", ODD_NAMES[0])
        made = desk.make("red apple")
        assert (made.model, [ref.name for ref in made.loras]) == (ODD_NAMES[0], names)
        kept = page.run(
            """const answer = await fetch("v1/images/generations", { method: "POST", body: JSON.stringify(args[0]),
              headers: { "content-type": "application/json" } });
            return (await answer.json()).data[0].b64_json;""",
            {"prompt": "x", "model": ODD_NAMES[1], "loras": [{"name": name, "scale": 0.5} for name in names]},
        )
        (tmp_path / "odd.png").write_bytes(base64.b64decode(kept))
        page.type("#restore", str(tmp_path / "odd.png"))
        page.wait("return document.querySelector('#messages').innerText.includes('are restored')")
        made = _submit(desk)
        assert (made.model, made.prompt) == (ODD_NAMES[1], "x")
        assert [(ref.name, ref.scale) for ref in made.loras] == [(name, 0.5) for name in names]
        assert page.complaints() == []


def _submit(desk):
    before = len(desk.service.submitted)
    desk.page.click("#generate")
    wait_for(lambda: len(desk.service.submitted) == before + 1)
    desk.page.wait(MADE, 1)
    return desk.service.submitted[-1]


def test_a_map_is_detected_or_drawn(window, tmp_path):
    """A dropped image shows the map that the server makes of it; a drawn one is the map itself, drawn by keys."""
    (tmp_path / "image.png").write_bytes(png(32, 32))
    with Desk(window) as desk:
        page = desk.ready()
        page.click("#controlnets .chip")
        page.type("#controlnets input[type=file]", str(tmp_path / "image.png"))
        page.wait("return document.querySelectorAll('#controlnets .pair img').length === 2")
        first = desk.make("frog face").controlnets[0].image
        assert int(first.max()) == 0  # one colour has no edges
        page.click("#controlnets [title^=Draw]")
        page.wait("return document.querySelector('#paint').open")
        page.keys(SPACE, RIGHT, RIGHT, RIGHT, RIGHT, ESCAPE)
        page.wait("return !document.querySelector('#paint').open")
        assert page.run("return document.querySelector('#control-1-detect').checked")
        page.click("#controlnets [title^=Draw]")  # what was drawn is there still
        page.wait("return document.querySelector('#paint').open")
        page.keys(ENTER)
        page.wait("return !document.querySelector('#control-1-detect').checked")
        second = desk.make("frog face", 2).controlnets[0].image
        assert int(second.max()) == 255
        assert 0 < int((second[..., 0] > 128).sum()) < second[..., 0].size / 2


def test_an_edit_starts_from_what_was_made_with_a_mask_painted_over_it(window):
    """The brush paints what is made anew; strength is 1 with a mask, as the server's own."""
    with Desk(window) as desk:
        page = desk.ready()
        desk.make("frog face")
        page.click("[title^='Start an edit']")
        page.wait("return !document.querySelector('.source img') ? false : true")
        without = desk.make("frog face", 2)
        assert without.edit is not None
        assert without.edit.mask is None
        assert without.edit.strength == 0.8
        page.click("[title='Paint a mask']")
        page.wait("return document.querySelector('#paint').open")
        page.drag("#paint canvas", [(-100, -100), (-60, -100), (-60, -60)])
        page.click("#paint .primary")
        page.wait("return document.querySelector('.source .mask') !== null")
        edit = desk.make("frog face", 3).edit
        assert edit.strength == 1.0
        assert int(edit.mask[4, 4]) == 255
        assert int(edit.mask[-1, -1]) == 0


def test_a_tenant_that_may_ask_little_sees_the_page_all_the_same(window):
    """The page comes back when it is told to: two requests a second are enough to load it and to make images."""
    settings = HttpSettings(tenants={"default": TenantLimits(requests_per_s=2.0)})
    with Desk(window, settings=settings) as desk:
        page = desk.ready()
        page.fill("#n", "3")
        desk.make("frog face", 3)
        assert len(desk.service.submitted) == 3
        assert page.run("return document.querySelectorAll('.note.error, .tile.failed').length") == 0


def test_what_is_copied_makes_the_same_image_again(window, tmp_path):
    """The program that the page gives for an edit with a LoRA and a ControlNet runs as it is, with the files that it
    names beside it, and so does the command: also with a large file, and on a server that answers with URLs."""
    kept = ResultsSection(folder=tmp_path / "kept", response_format="url")
    with Desk(window, settings=HttpSettings(results=kept)) as desk:
        page = desk.ready()
        desk.make('it\'s a "frog" face')
        page.click("[title^='Start an edit']")
        page.click("#loras .chip")
        page.click("#controlnets .chip")
        noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "dropped.png")
        page.type("#controlnets input[type=file]", str(tmp_path / "dropped.png"))
        page.wait("return document.querySelectorAll('#controlnets .pair img').length === 2")
        first = desk.make('it\'s a "frog" face', 2)
        shown, body, python, curl = page.run(
            """const [store, bytes, snippets] = await Promise.all(["store", "bytes", "snippets"].map((name) =>
              import(new URL(`ui/js/${name}.js`, document.baseURI))));
            const [{ blob, path, body }] = await store.kept();
            return [await bytes.base64Of(blob), body, snippets.asPython(path, body), snippets.asCurl(path, body)];"""
        )
        for name, encoded in {"image": body["image"], "control-1": body["controlnets"][0]["image"]}.items():
            (tmp_path / f"{name}.png").write_bytes(base64.b64decode(encoded))
        subprocess.run([sys.executable, "-c", python], cwd=tmp_path, check=True, timeout=120)
        assert (tmp_path / "image.png").read_bytes() == base64.b64decode(shown)
        again = desk.service.submitted[-1]
        assert again is not first
        assert (again.loras, again.seed, again.edit.strength) == (first.loras, first.seed, first.edit.strength)
        if shutil.which("curl") is None:
            return
        (tmp_path / "image.png").write_bytes(base64.b64decode(body["image"]))
        subprocess.run(["bash", "-c", curl], cwd=tmp_path, check=True, timeout=120)
        answer = json.loads((tmp_path / "answer.json").read_text())
        assert answer["data"][0]["b64_json"] == shown


def test_what_cannot_be_done_is_said(window):
    """A model that takes no ControlNet, an image that the browser does not keep, which can be deleted all the same, and
    a person that the recommender refuses."""
    bare = replace(FAKE_CATALOG.model, controlnets=())
    levels = ["none", "a little", "much"]
    words = {"picks": {"inputs": {"person": levels, "mood": levels}}}
    service = FakeImageService(catalog=replace(FAKE_CATALOG, models=(bare,)))
    with Desk(window, service, settings=HttpSettings(words=words)) as desk:
        page = desk.ready()
        page.run("IDBObjectStore.prototype.add = () => { throw new Error('full'); }")
        desk.make("frog face")
        page.click("[title='Use this image for a ControlNet']")
        page.click("[title='Delete this image']")
        page.wait("return document.querySelectorAll('#grid li').length === 0")
        page.click("#tab-rank")
        for said in ("the browser keeps no more images", "this model takes no ControlNet", "user.mood: "):
            page.wait("return document.querySelector('#messages').innerText.includes(args[0])", said)


def test_a_server_with_keys_asks_for_one(window):
    """Once for all questions, and again if it is wrong; it is kept for the tab and never shown in a snippet."""
    settings = HttpSettings(api_keys=(api_key(SECRET, tenant="acme"),))
    with Desk(window, settings=settings) as desk:
        page = desk.page
        page.wait("return document.querySelector('#key-dialog').open")
        for key in ("sk-wrong", SECRET):
            page.type("#key", key)
            page.keys(ENTER)
            page.wait("return sessionStorage.getItem('plait.key') === args[0]", key)
        desk.ready()
        assert desk.make("frog face").tenant.name == "acme"
        curl = page.run(
            "const { asCurl } = await import('./ui/js/snippets.js'); return asCurl('v1/x', {prompt: 'it\\'s'});"
        )
        assert SECRET not in curl
        assert "$PLAIT_KEY" in curl
        page.open(desk.url)
        desk.ready()  # the tab has it still


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_nothing_stands_in_the_way_of_anybody(window, width, dark):
    """axe-core finds nothing in any section or dialog, light or dark; nothing is wider than a phone."""
    with Desk(window, width=width, dark=dark) as desk:
        page = desk.ready()
        desk.make("frog face")
        page.click("#controlnets .chip")
        page.click("#loras .chip")
        page.run("for (const part of document.querySelectorAll('details')) part.open = true")
        found = {"images": page.barriers()}
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        page.click("#controlnets [title^=Draw]")
        page.wait("return document.querySelector('#paint').open")
        found["paint"] = page.barriers()
        page.keys(ESCAPE)
        page.click("#key-button")
        found["key"] = page.barriers()
        page.keys(ESCAPE)
        for tab in ("rank", "status"):
            page.click(f"#tab-{tab}")
            page.wait("return document.querySelector(args[0])?.checkVisibility()", f"#{tab}")
            page.wait(
                "return document.querySelector(args[0]) !== null",
                {"rank": "#rank-raw", "status": "#status-models td"}[tab],
            )
            found[tab] = page.barriers()
            assert page.run("return document.documentElement.scrollWidth <= window.innerWidth"), tab
        assert {name: problems for name, problems in found.items() if problems} == {}
        assert page.complaints() == []


def test_the_form_is_made_of_what_the_server_says(window):
    """Steps and size, and no part for what is not there."""
    model = replace(FAKE_CATALOG.model, default_steps=9, default_width=32, default_height=24)
    service = FakeImageService(catalog=replace(FAKE_CATALOG, models=(model,), loras=()))
    with Desk(window, service, ranking=False) as desk:
        page = desk.ready()
        assert (page.run(VALUE, "#size"), page.run(VALUE, "#steps")) == ("32x24", "9")
        for part in ("#loras-part", "#tab-rank"):
            assert page.run("return document.querySelector(args[0]).hidden", part)


def test_a_page_of_another_port_changes_nothing(window):
    """By script or by form, the model stays awake; the server's own page may put it to sleep."""
    script = "return fetch(args[0], {method: 'POST', mode: 'no-cors'}).then(() => true)"
    form = "document.body.innerHTML = `<form method=post action=${args[0]}>`; document.forms[0].submit(); return true"
    with Desk(window, path="version") as desk:
        other = AppServer(create_app(FakeImageService(), HttpSettings()))
        try:
            sleep = f"{desk.url}v1/models/emoji/sleep"
            for host in ("127.0.0.1", "localhost"):
                desk.page.open(f"http://{host}:{other.port}/version")
                assert desk.page.run(script, sleep)
                assert desk.page.run(form, sleep)
                desk.page.wait("return document.body.innerText.includes('origin_not_allowed')")
            assert desk.service.asleep == set()
            desk.page.open(f"{desk.url}version")
            assert desk.page.run(script, sleep)
            assert desk.service.asleep == {"emoji"}
        finally:
            other.stop()
