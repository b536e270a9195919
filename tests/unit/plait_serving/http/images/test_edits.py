"""POST /v1/images/edits over the fake service: as JSON and as a form, what is edited, refusals that name the field."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import numpy as np
import openai
import pytest
from PIL import Image

from fakes.images import FAKE_CATALOG, fake_image
from fakes.terms import ALL_TERMS
from plait_serving.diffusion.request_terms import RequestTerms, SamplerChoice
from plait_serving.diffusion.values import Scheduler
from plait_serving.http.images import edit_body
from plait_serving.http.images.schemas import EditResponse
from plait_serving.images import codec
from plait_serving.images.infotext import read_parameters
from support.http_app import b64, make_client, pixels, png, saved

URL = "/v1/images/edits"
LEFT = np.repeat([[255] * 8 + [0] * 8], 16, axis=0).astype(np.uint8)


def post(client, **body):
    """An edit as JSON."""
    return client.post(URL, json={"prompt": "red apple", "image": b64(png()), **body})


def form(client, files=None, **fields):
    """An edit as a form."""
    files = files or {"image": ("cat.png", png(), "image/png")}
    return client.post(URL, files=files, data={"prompt": "red apple", **fields})


def picture(array, kind="PNG"):
    """An array as a file."""
    return saved(Image.fromarray(array), kind)


def half_clear(width=16):
    """An image whose left half is transparent."""
    array = np.full((16, width, 4), 255, np.uint8)
    array[..., 0] = 10
    array[:, : width // 2, 3] = 0
    return picture(array)


def half_white():
    """A mask without transparency whose left half is white."""
    return picture(LEFT)


BMP = picture(np.zeros((16, 16, 3), np.uint8), "BMP")
"""A file of a format that is not taken."""


def test_an_image_alone_is_edited_as_a_whole(client, service):
    """Without a mask the strength is 0.8 and all of the image is made anew, at its own size."""
    answer = post(client, image=b64(png(24, 32)))
    assert answer.status_code == 200, answer.text
    (request,) = service.submitted
    assert (request.width, request.height) == (24, 32)
    assert (request.edit.mask, request.edit.strength, request.edit.overlay) == (None, 0.8, True)
    assert request.edit.image.shape == (32, 24, 3)
    assert tuple(request.edit.image[0, 0]) == (200, 10, 30)
    assert (request.steps, request.run_steps) == (4, 3)
    body = EditResponse.model_validate(answer.json())
    assert (body.strength, body.num_inference_steps, body.size) == (0.8, 4, "24x32")
    assert np.array_equal(pixels(body.data[0].b64_json), fake_image(request, request.seed))


@pytest.mark.parametrize(
    "fields",
    [
        {"mask": b64(half_clear())},
        {"mask": b64(half_white())},
        {"image": b64(half_clear())},
        {"image": b64(half_clear()), "mask": b64(half_white())},
    ],
    ids=["transparent-mask", "white-mask", "transparent-image", "mask-before-image"],
)
def test_a_mask_says_what_is_made_anew(client, service, fields):
    """Transparent pixels of the mask, white ones if it has none; without a mask the image's own transparent ones: so a
    canvas is painted beyond the image in it. The file says the strength where A1111 has it."""
    answer = post(client, **fields)
    assert answer.status_code == 200
    edit = service.submitted[0].edit
    assert np.array_equal(edit.mask, LEFT)
    assert (edit.image[:, 8:] == ((10, 255, 255) if "image" in fields else (200, 10, 30))).all()
    assert edit.strength == 1.0
    assert "Denoising strength: 1" in read_parameters(base64.b64decode(answer.json()["data"][0]["b64_json"]))


def test_a_form_is_read_like_json_and_its_fields_are_a_generations(client, service):
    """Everything that a generation takes an edit takes, too. Numbers, booleans and nested fields of a form become what
    they are in JSON; text stays text."""
    files = {"image": ("a.png", png(), "image/png"), "mask": ("m.png", half_clear(), "image/png")}
    answer = form(
        client, files=files, n="2", size="24x32", num_inference_steps="10", seed="5", strength="0.5", overlay="false",
        guidance_scale="3", user="12", input_fidelity="high", negative_prompt="true", lora_policy="bounded_async",
        loras=json.dumps([{"name": "noto", "scale": 0.5}, {"name": "sketch"}]),
        **{"controlnets[0][name]": "edges", "controlnets[0][image]": b64(png()), "controlnets[0][preprocess]": "true",
           "controlnets[1][name]": "plain", "controlnets[1][image]": b64(png()), "controlnets[1][scale]": "0.5"},
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    (request,) = service.submitted
    assert (request.n, request.width, request.height, request.steps, request.run_steps) == (2, 24, 32, 10, 5)
    assert (request.seed, request.edit.strength, request.guidance_scale) == (5, 0.5, 3.0)
    assert (request.negative_prompt, request.edit.overlay) == ("true", False)
    assert [(ref.name, ref.scale) for ref in request.loras] == [("noto", 0.5), ("sketch", 1.0)]
    assert request.lora_free_steps == 1, "a fifth of the steps that run"
    assert [(ref.name, ref.scale) for ref in request.controlnets] == [("edges", 1.0), ("plain", 0.5)]
    for image in (request.edit.image, request.controlnets[0].image):
        assert image.shape == (32, 24, 3)
    assert (request.edit.mask[:, :8] == 255).all()
    assert answer.json()["ignored"] == ["user", "input_fidelity"]


def openai_client(service):
    """It, around the application in this process."""
    made = make_client(service)
    return openai.OpenAI(api_key="any", base_url="http://testserver/v1", http_client=made, max_retries=0)


def test_the_openai_client_works_unchanged(service):
    """`images.edit` with files, our fields in `extra_body`; and with `stream` its own events."""
    client = openai_client(service)
    result = client.images.edit(
        image=("cat.png", png()), mask=("mask.png", half_clear()), prompt="red apple", n=2, size="16x16",
        extra_body={"strength": 0.5, "seed": 9, "num_inference_steps": 8, "overlay": True,
                    "loras": [{"name": "noto", "scale": 0.8}, {"name": "sketch", "scale": -1}]},
    )  # fmt: skip
    (request,) = service.submitted
    assert len(result.data) == 2
    assert (request.run_steps, request.seed, request.edit.overlay) == (4, 9, True)
    assert [(ref.name, ref.scale) for ref in request.loras] == [("noto", 0.8), ("sketch", -1.0)]
    assert np.array_equal(pixels(result.data[1].b64_json), fake_image(request, 10))
    client.images.edit(image=[half_clear()], prompt="one in a list, its transparency the mask")
    assert np.array_equal(service.submitted[-1].edit.mask, LEFT)
    events = list(client.images.edit(image=png(), prompt="red apple", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    with pytest.raises(openai.BadRequestError, match="one image is edited at a time") as caught:
        client.images.edit(image=[png(), png()], prompt="two")
    error = caught.value
    assert (error.param, error.code, error.type) == ("image", "duplicate_field", "invalid_request_error")


def test_a_default_sampler_that_starts_from_no_image_is_not_an_edits(service):
    """Of what the server has as a default some samplers take generations only: an edit that names none has another."""
    samplers = SamplerChoice(default=Scheduler.EULER, starts=(Scheduler.EULER, Scheduler.HEUN))
    card = replace(FAKE_CATALOG.model, terms=replace(ALL_TERMS, samplers=samplers), default_scheduler=Scheduler.UNIPC)
    service.offers = replace(FAKE_CATALOG, models=(card,))
    client = make_client(service)
    assert post(client).json()["scheduler"] == "euler"
    assert post(client, scheduler="heun").json()["scheduler"] == "heun"
    error = post(client, scheduler="unipc").json()["error"]
    assert (error["param"], "euler, heun can" in error["message"]) == ("scheduler", True)
    assert client.post("/v1/images/generations", json={"prompt": "x"}).json()["scheduler"] == "unipc"


READS = RequestTerms(edits=False, reads_images=True)
"""Of FLUX.1 Kontext."""


def test_an_edit_by_a_model_that_reads_the_image(service):
    """It answers as any edit does, without what says where steps start; transparent pixels are read as white."""
    service.offers = replace(FAKE_CATALOG, models=(replace(FAKE_CATALOG.model, terms=READS),))
    client = make_client(service)
    answer = post(client, image=b64(half_clear()))
    assert answer.status_code == 200, answer.text
    (request,) = service.submitted
    assert (request.edit, request.reference.shape) == (None, (16, 16, 3))
    assert (request.reference[:, :8] == 255).all()
    assert EditResponse.model_validate(answer.json()).strength is None
    events = list(openai_client(service).images.edit(image=png(), prompt="red apple", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    for field, value in (("strength", 1), ("overlay", True), ("mask", b64(half_white()))):
        answer = post(client, **{field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"strength": 0}, "strength", "greater than 0"),
        ({"strength": 1.1}, "strength", "must be at most 1"),
        ({"strength": 0.2}, "strength", "0.2 of 4 steps is not a whole step"),
        ({"image": None}, "image", "a file, or in JSON its base64"),
        ({"image": [b64(png())] * 2}, "image", "one image is edited at a time"),
        ({"image": b64(BMP)}, "image", "not a readable PNG, JPEG or WebP"),
        ({"image": "https://example.com/cat.png"}, "image", "never opened"),
        ({"image": b64(png(4, 16))}, "size", "the image is 4x16"),
        ({"image": b64(png(17, 200))}, "size", "edges go from 8 to 128"),
        ({"mask": b64(BMP)}, "mask", "not a readable PNG, JPEG or WebP"),
        ({"mask": b64(half_clear(24))}, "mask", "the mask is 24x16, the image 16x16"),
        ({"mask": b64(png(colour=(0, 0, 0)))}, "mask", "nothing is to be made anew"),
        ({"lora_policy": "bounded_async", "lora_free_steps": 3, "loras": [{"name": "noto"}]}, "lora_free_steps",
         "with 3 steps"),
    ],
)  # fmt: skip
def test_what_cannot_be_edited_is_refused_by_field(client, service, fields, param, message):
    """Each mistake is a 400 that names the field, before anything is submitted."""
    answer = post(client, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert message in error["message"]
    assert service.submitted == []


@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", "multipart/form-data", "text/plain", "application/json"]
)
def test_what_is_no_edit_is_refused(client, service, kind):
    """A form that is cut off or names no boundary, another type of body, broken JSON."""
    assert client.post(URL, content=b"--x\r\nnonsense", headers={"content-type": kind}).status_code == 400
    assert service.submitted == []


@pytest.mark.parametrize(
    ("files", "fields", "param"),
    [
        (None, {"seed": ["1", "2"]}, "seed"),
        ({"image": png(), "seed": b"1"}, {}, "seed"),
        (None, {"loras[][name]": ["noto", "sketch"], "loras[][scale]": "1"}, "loras"),
        (None, {"n": "two"}, "n"),
        ({"mask": png()}, {}, "image"),
    ],
    ids=["twice", "a file for a number", "entries of a list that cannot be told apart", "words", "no image"],
)
def test_wrong_fields_of_a_form_are_named(client, service, files, fields, param):
    """As those of JSON."""
    answer = form(client, files=files, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.submitted == []


def test_uploads_are_bounded(service, monkeypatch):
    """A file above the limit is refused by its field; one whose bytes look like JSON of many values is not."""
    client = make_client(service)
    monkeypatch.setattr(codec, "MAX_BYTES", 500)
    noise = picture(np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8))
    answer = form(client, files={"image": noise})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "image")
    monkeypatch.undo()
    padded = png() + b"," * 400_000
    assert form(make_client(service), files={"image": padded}).status_code == 200
    commas = form(make_client(service), loras="," * 400_000)
    assert (commas.status_code, commas.json()["error"]["param"]) == (413, "loras")


def test_the_values_of_a_form_are_bounded_together(service, monkeypatch):
    """Not each of its hundreds of parts on its own: they are parsed on the event loop, one after the other."""
    parsed = []
    monkeypatch.setattr(edit_body, "parse_json", parsed.append)
    half = "[" + "{}," * 40_000 + "{}]"  # 80,002 values: the fourth is too many
    for fields in (
        {f"loras[{index}][scale]": half for index in range(100)},
        {"loras[][scale]": [half] * 100},
        {"seed": half, "n": half, "crop": half, "eta": half},
    ):
        parsed.clear()
        answer = form(make_client(service), **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert len(parsed) <= 3
    assert service.submitted == []


def test_what_looks_like_parts_of_a_form_is_bounded(client, service):
    """The parser takes a step of Python for each line break with two dashes; files have hardly any."""
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    for line in (b"\r\n--xZ", b"\r\n--", b"\r\n--x\r"):
        for count, status in ((16_000, 400), (16_385, 413)):
            body = head + line * count + b"\r\n--x--\r\n"
            answer = client.post(URL, content=body, headers={"content-type": "multipart/form-data; boundary=x"})
            assert answer.status_code == status, answer.text
    assert service.submitted == []


@pytest.mark.parametrize("charset", ["punycode", "idna", "utf-7", "made-up", "utf-16"])
def test_a_form_is_utf_8(client, service, charset):
    """Its sender does not choose how its texts are decoded: Python knows encodings that take time with the square of
    the text."""
    boundary = "multipart/form-data; boundary=x"
    body = b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na-b\r\n--x--\r\n'
    answer = client.post(URL, content=body, headers={"content-type": f"{boundary}; charset={charset}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    answer = client.post(URL, content=body, headers={"content-type": boundary + ';a="' + ";a" * 1_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
    for spelled in ("utf-8", '"UTF-8"', "utf8"):
        answer = client.post(URL, content=body, headers={"content-type": f"{boundary}; charset={spelled}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_field")
    assert service.submitted == []
