"""POST /v1/images/generations over the fake service: defaults, refusals that name the field, formats, cancellation."""

from __future__ import annotations

import base64
import gc
import json
import math
import threading
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from starlette.testclient import TestClient

from fakes.images import FAKE_CATALOG, FakeImageService, fake_image
from fakes.ranking import fake_rankers
from plait_serving.diffusion.errors import EngineStopped
from plait_serving.diffusion.request_fields import MAX_PROMPT_CHARS
from plait_serving.diffusion.request_terms import RequestTerms
from plait_serving.diffusion.values import MAX_SEED, LoraPolicy, LoraRef, Scheduler
from plait_serving.http.app import app_from_context, create_app
from plait_serving.http.context import HttpSettings, RouteContext
from plait_serving.http.edge import json_body
from plait_serving.http.edge.errors import ErrorBody
from plait_serving.http.images import routes
from plait_serving.http.images.schemas import IGNORED_FIELDS, GenerationBody, GenerationResponse
from plait_serving.images import codec
from plait_serving.images.infotext import read_parameters
from plait_serving.ranking.local import LocalRankingService
from support.http_app import FIXED_SEED, FIXED_TIME_S, AsgiCall, b64, make_client, pixels, png, saved
from support.http_rank import INFER
from support.keys import api_key

URL = "/v1/images/generations"
JSON = {"content-type": "application/json"}


def post(client, **body):
    """JSON as Python writes it, NaN and lone surrogates included."""
    return client.post(URL, content=json.dumps({"prompt": "red apple", **body}), headers=JSON)


def test_a_bare_prompt_gets_the_models_defaults(client, service):
    """What is left out comes from the catalog, and the seed that was drawn is told."""
    answer = post(client)
    assert answer.status_code == 200
    (request,) = service.submitted
    assert (request.prompt, request.negative_prompt, request.n) == ("red apple", None, 1)
    assert (request.width, request.height, request.steps, request.guidance_scale) == (16, 16, 4, 7.5)
    assert (request.scheduler, request.seed) == (Scheduler.EULER, FIXED_SEED)
    assert request.loras == request.controlnets == ()
    assert (request.lora_policy, request.lora_free_steps) == (LoraPolicy.EXACT, 0)
    assert (request.deadline_s, request.partial_images) == (None, 0)
    assert answer.json()["seed"] == FIXED_SEED


def test_seed_minus_one_draws_another_seed_each_time():
    """A1111's way to ask for a random one: two requests get two images, each with the seed that makes it again."""
    service = FakeImageService()
    drawn = iter((5, 70))
    context = RouteContext(images=service, settings=HttpSettings(), random_seed=lambda: next(drawn))
    client = TestClient(app_from_context(context))
    for seed in (5, 70):
        body = post(client, seed=-1, n=2).json()
        assert [body["seed"], *(item["seed"] for item in body["data"])] == [seed, seed, seed + 1]
        for item in body["data"]:
            assert np.array_equal(pixels(item["b64_json"]), fake_image(service.submitted[-1], item["seed"]))


@pytest.mark.parametrize("syntax", ["plain", "a1111"])
def test_an_empty_prompt_is_a_prompt(client, service, syntax):
    """It reaches the engine as it is; no prompt at all is still an error."""
    assert post(client, prompt="", prompt_syntax=syntax).status_code == 200
    assert (service.submitted[0].prompt, service.submitted[0].negative_prompt) == ("", None)
    answer = client.post(URL, json={"prompt_syntax": syntax})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_null_means_left_out(client, service):
    """Clients that send every field as null get the defaults."""
    assert post(client, **dict.fromkeys(GenerationBody.model_fields.keys() - {"prompt"})).json()["ignored"] == []
    assert service.submitted[0].steps == 4


def test_every_field_reaches_the_request(client, service):
    """Nothing that a client sets is lost or changed on the way."""
    answer = post(
        client,
        model="emoji", negative_prompt="blue", n=3, size="24x32", num_inference_steps=10, guidance_scale=3, seed=7,
        scheduler="dpmpp_2m", loras=[{"name": "noto", "scale": -0.5}, {"name": "sketch"}], lora_policy="bounded_async",
        lora_free_steps=2, deadline_ms=1500,
        controlnets=[{"name": "plain", "image": b64(png(24, 32)), "scale": 2, "start": 0.25, "end": 0.5}],
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    (request,) = service.submitted
    assert (request.negative_prompt, request.n, request.width, request.height) == ("blue", 3, 24, 32)
    assert (request.steps, request.guidance_scale, request.seed) == (10, 3.0, 7)
    assert request.scheduler is Scheduler.DPMPP_2M
    assert request.loras == (LoraRef(name="noto", scale=-0.5), LoraRef(name="sketch", scale=1.0))
    assert (request.lora_policy, request.lora_free_steps) == (LoraPolicy.BOUNDED_ASYNC, 2)
    assert request.deadline_s == 1.5
    (control,) = request.controlnets
    assert (control.name, control.scale, control.start, control.end) == ("plain", 2.0, 0.25, 0.5)
    assert control.image.shape == (32, 24, 3)
    assert control.image[0, 0].tolist() == [200, 10, 30]


def test_the_answer_holds_the_pictures_and_how_to_make_them_again(client, service):
    """The body matches its published schema, and each image is the one of its seed."""
    answer = post(client, n=2, seed=40, quality="hd", user="u")
    body = GenerationResponse.model_validate(answer.json(), strict=True)
    (request,) = service.submitted
    assert [item.seed for item in body.data] == [40, 41]
    for item in body.data:
        assert np.array_equal(pixels(item.b64_json), fake_image(request, item.seed))
    assert (body.model, body.size, body.output_format, body.created) == ("emoji", "16x16", "png", int(FIXED_TIME_S))
    assert body.timings.model_dump() == {
        "queue": 0.125, "lora": 0.25, "encode": 0.5, "denoise": 1.0, "decode": 0.0625, "total": 1.9375,
    }  # fmt: skip
    assert body.ignored == ["quality", "user"]
    assert body.id == answer.headers["x-request-id"]


@pytest.mark.parametrize(("output_format", "begins"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8"), ("webp", b"RIFF")])
def test_each_output_format_with_its_parameters(client, output_format, begins):
    """The bytes are of the format that was asked for, and carry the parameters as A1111 does."""
    loras = [{"name": "noto", "scale": 0.8}, {"name": "sketch", "scale": -0.0}]
    body = post(client, output_format=output_format, seed=9, loras=loras).json()
    raw = base64.b64decode(body["data"][0]["b64_json"])
    assert raw.startswith(begins)
    assert body["output_format"] == output_format
    assert read_parameters(raw) == (
        "red apple <lora:noto:0.8> <lora:sketch:0>\n"
        "Steps: 4, Sampler: Euler, CFG scale: 7.5, Seed: 9, Size: 16x16, Model: emoji"
    )


def test_output_compression_is_jpegs_quality_and_ignored_for_png(client):
    """A lower quality is a smaller JPEG; a PNG names the field as ignored."""
    sizes = [len(post(client, output_format="jpeg", seed=1, output_compression=q).content) for q in (5, 100)]
    assert sizes[0] < sizes[1]
    assert post(client, output_compression=5).json()["ignored"] == ["output_compression"]
    assert post(client, output_compression=5, output_format="webp").json()["ignored"] == []


def test_all_of_openais_own_fields_are_accepted_and_named(client):
    """Fields that do not apply are no error, whatever they hold, but they are not swallowed either."""
    fields = {name: {"any": ["thing", None]} for name in IGNORED_FIELDS}
    assert post(client, **fields).json()["ignored"] == list(IGNORED_FIELDS)


def test_preprocess_runs_the_controlnets_own_preprocessor_on_the_resized_picture(client, service):
    """`preprocess: true` turns an ordinary image into the control map; a name chooses another one."""
    picture = b64(png(40, 40, (255, 255, 255)))
    for wanted, name in ((True, "edges"), ("edges", "plain")):
        assert post(client, controlnets=[{"name": name, "image": picture, "preprocess": wanted}]).status_code == 200
        image = service.submitted[-1].controlnets[0].image
        assert image.shape == (16, 16, 3)
        assert (image == 0).all()


def test_transparency_means_nothing_in_a_map_and_white_in_a_picture(client, service):
    """A map's clear pixels are black; an ordinary image's are white (inverted: black) before its map is made."""
    clear = b64(saved(Image.new("RGBA", (16, 16), (9, 9, 9, 0))))
    for preprocess in (False, True):
        post(client, controlnets=[{"name": "edges", "image": clear, "preprocess": preprocess}])
        assert (service.submitted[-1].controlnets[0].image == 0).all()


CONTROL = {"name": "edges", "image": b64(png())}
LORA = {"name": "noto"}
NAN = math.nan
BAD = [
    ({"prompt": None}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": "x" * (MAX_PROMPT_CHARS + 1)}, "prompt"),
    ({"negative_prompt": "a\x00"}, "negative_prompt"),
    ({"model": "a\x00"}, "model"),
    ({"model": "m" * 1025}, "model"),
    ({"n": 0}, "n"),
    ({"n": 11}, "n"),
    ({"n": True}, "n"),
    ({"n": 2, "stream": True}, "n"),
    ({"size": "１６x16"}, "size"),
    ({"size": "17x16"}, "size"),
    ({"size": "136x8"}, "size"),
    ({"size": "128x64"}, "size"),
    ({"output_format": "svg"}, "output_format"),
    ({"partial_images": 1}, "partial_images"),
    ({"partial_images": 4, "stream": True}, "partial_images"),
    ({"num_inference_steps": 0}, "num_inference_steps"),
    ({"num_inference_steps": 51}, "num_inference_steps"),
    ({"guidance_scale": NAN}, "guidance_scale"),
    ({"guidance_scale": 101}, "guidance_scale"),
    ({"guidance_scale": 10**400}, "guidance_scale"),
    ({"seed": -2}, "seed"),
    ({"seed": MAX_SEED + 1}, "seed"),
    ({"seed": MAX_SEED, "n": 2}, "seed"),
    ({"scheduler": "euler_b"}, "scheduler"),
    ({"deadline_ms": 0}, "deadline_ms"),
    ({"loras": [LORA] * 65}, "loras"),
    ({"loras": [{"name": f"l{i}"} for i in range(9)]}, "loras"),
    ({"loras": ["noto"]}, "loras.0"),
    ({"loras": [LORA, LORA]}, "loras.1.name"),
    ({"controlnets": [{"name": "my edges", "image": "AAAA"}]}, "controlnets.0.name"),
    ({"loras": [LORA, {"name": "sketch", "scale": NAN}]}, "loras.1.scale"),
    ({"loras": [{"name": "noto", "scale": 1e30}]}, "loras.0.scale"),
    ({"lora_policy": "eventually"}, "lora_policy"),
    ({"lora_free_steps": 1}, "lora_free_steps"),
    ({"lora_free_steps": 4, "lora_policy": "bounded_async"}, "lora_free_steps"),
    ({"controlnets": [CONTROL] * 5}, "controlnets"),
    ({"controlnets": [{**CONTROL, "image": b64(b"no picture")}]}, "controlnets.0.image"),
    ({"controlnets": [CONTROL, {**CONTROL, "image": b64(png(200, 200))}]}, "controlnets.1.image"),
    ({"controlnets": [{**CONTROL, "start": 0.5, "end": 0.5}]}, "controlnets.0.end"),
    ({"controlnets": [{**CONTROL, "preprocess": 1}]}, "controlnets.0.preprocess"),
    ({"controlnets": [{**CONTROL, "name": "plain", "preprocess": True}]}, "controlnets.0.preprocess"),
    ({"scheduler": "ddim", "sigmas": "karras"}, "sigmas"),
    ({"scheduler": "euler", "eta": 0.5}, "eta"),
    ({"crop": [1, -1]}, "crop.1"),
    ({"": 1}, ""),
    ({"tried_again_s": 1.0}, "tried_again_s"),
    ({"x\ud800": 1}, None),
    ({"loras": [{**LORA, "\udfff": 1}]}, "loras.0"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:60])
def test_wrong_input_is_a_400_that_names_the_field(fields, param, monkeypatch):
    """Each mistake is told with its dotted place, and nothing reaches the engine."""
    service = FakeImageService()
    monkeypatch.setattr(codec, "MAX_PIXELS", 64 * 64)
    client = make_client(service)
    answer = post(client, **fields)
    assert answer.status_code == 400, answer.text
    error = ErrorBody.model_validate(answer.json()).error
    assert error.param == param
    assert error.type == "invalid_request_error"
    assert error.message
    assert service.submitted == []


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": "gpt-image-2"}, "model", "model_not_found"),
        ({"model": ""}, "model", "model_not_found"),
        ({"loras": [LORA, {"name": "nobody"}]}, "loras.1.name", "lora_not_found"),
        ({"controlnets": [{**CONTROL, "name": "depth"}]}, "controlnets.0.name", "controlnet_not_found"),
    ],
)
def test_what_does_not_exist_is_a_404(client, service, fields, param, code):
    """A model, LoRA or ControlNet of that name does not exist: 404 with a code of its own."""
    answer = post(client, **fields)
    assert answer.status_code == 404
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)
    assert service.submitted == []


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"\xff\xfe{}", b"{" * 50_000, b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"],
)
def test_a_body_that_is_no_json_object_is_a_400(client, service, content):
    """Empty, foreign, deep or endless JSON is told as such."""
    answer = client.post(URL, content=content, headers=JSON)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in {"invalid_json", "invalid_body", "invalid_value"}
    assert service.submitted == []


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_body_is_parsed_beside_the_event_loop(client, service, monkeypatch, is_long):
    """By one thread for all of them, without the collector, which would look at all values again and again."""
    seen = []
    parse = json_body.parse_json

    def watched(body):
        seen.append((threading.current_thread().name.startswith("plait-read"), gc.isenabled()))
        return parse(body)

    monkeypatch.setattr(json_body, "parse_json", watched)
    padding = "A" * (70_000 if is_long else 0)
    assert post(client, prompt="x", user=padding).status_code == 200
    twice = b'{"prompt": "x", "prompt": "y", "user": "' + padding.encode() + b'"}'
    for content, code in ((twice, "duplicate_field"), (b"{" + padding.encode(), "invalid_json")):
        answer = client.post(URL, content=content, headers=JSON)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert seen == [(is_long, not is_long)] * 3
    assert gc.isenabled()
    assert len(service.submitted) == 1


def test_what_is_read_for_long_is_read_by_tenants_in_turn(service, monkeypatch):
    """One that sends long bodies all day, or prompts full of marks, keeps nobody's from being read. What is short is
    read at once."""
    asked = []

    class Reading:
        async def run(self, tenant, work):
            asked.append(tenant)
            return work()

    for module in (json_body, routes):
        monkeypatch.setattr(module, "READING", Reading())
    keys = tuple(api_key(f"sk-{name}", tenant=name) for name in ("acme", "blue"))
    client = make_client(service, HttpSettings(api_keys=keys))
    for name, padding, syntax in (("acme", 70_000, "a1111"), ("blue", 0, "plain"), ("blue", 0, "a1111")):
        headers = {"authorization": f"Bearer sk-{name}"}
        body = {"prompt": "a (red) cat", "prompt_syntax": syntax, "user": "A" * padding}
        assert client.post(URL, json=body, headers=headers).status_code == 200
    assert asked == ["acme", "acme", "blue"]


def test_of_very_many_unknown_fields_a_few_are_told(client, service):
    """Each is an error of its own to pydantic, and all of them together would take seconds on the event loop."""
    many = {f"{number:x}": 0 for number in range(20_000)}
    for body, param in (
        ({"prompt": "x", **many}, "0"),
        ({"prompt": "x", "loras": [{"name": "noto", **many}]}, "loras.0.0"),
    ):
        answer = client.post(URL, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_field", param)
        assert error["message"].endswith("unknown field (and 15 more)")
        with pytest.raises(ValidationError) as refused:
            GenerationBody.model_validate(body)
        assert refused.value.error_count() == 16
    assert service.submitted == []


@pytest.mark.parametrize(
    ("text", "position"),
    [("\x00", 0), ("\t\n\r\x0b", 3), ("\x7f", 0), ("\xa0 \u200b é\x80", 5)],
)
def test_a_control_character_is_told_with_its_place(client, text, position):
    """Those of Unicode's category Cc but tabs and line breaks."""
    error = post(client, prompt=text).json()["error"]
    assert error["message"] == f"prompt: control character U+{ord(text[position]):04X} at position {position}"
    allowed = "".join(map(chr, range(0x3000)))
    controls = {char for char in allowed if unicodedata.category(char) == "Cc"} - set("\t\n\r")
    assert post(client, prompt="".join(char for char in allowed if char not in controls)).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}], ids=["none", "text"])
def test_a_body_of_another_type_is_refused(client, service, headers):
    """A page of another origin can post text without asking first, so only JSON is read."""
    answer = client.post(URL, content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
    assert service.submitted == []


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"prompt": "cat <lora:nobody:1>"}, 404, "prompt"),
        ({"prompt": "cat <lora:noto:1>", "loras": [{"name": "noto"}]}, 400, "prompt"),
        ({"negative_prompt": "<lora:noto:1>"}, 400, "negative_prompt"),
        ({"prompt_2": "a AND b"}, 400, "prompt_2"),
        ({"prompt": "".join(f"<lora:l{i}:1>" for i in range(17))}, 400, "prompt"),
        ({"prompt": "<lora:noto:1>", "loras": [{"name": f"l{i}"} for i in range(17)]}, 400, "loras"),
    ],
)
def test_wrong_marks_are_refused_with_the_field(client, service, fields, status, param):
    """A mark that cannot be meant is refused before the engine sees it."""
    answer = post(client, **{"prompt": "cat", "prompt_syntax": "a1111", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert answer.json()["error"]["code"] == ("lora_not_found" if status == 404 else "invalid_value")
    assert service.submitted == []


def test_plain_prompts_with_marks_get_a_hint(client, service):
    """The image is made of the letters as they stand; the response says what they may have been."""
    answer = post(client, prompt="a (red:1.2) cat", negative_prompt="<lora:noto:1>")
    (request,) = service.submitted
    assert (request.prompt, request.prompt_syntax, request.loras) == ("a (red:1.2) cat", "plain", ())
    first, second = answer.json()["hints"]
    assert first.startswith("prompt: '(red:1.2)' was read to the letter")
    assert second.startswith("negative_prompt:")
    assert post(client, prompt="a (red:1.2) cat", prompt_syntax="plain").json()["hints"] == []
    service.offers = replace(FAKE_CATALOG, models=(replace(FAKE_CATALOG.model, terms=RequestTerms()),))
    (hint,) = post(client, prompt="a <lora:noto:1> cat").json()["hints"]
    assert hint.endswith("this model knows no marks, and LoRAs go into loras"), "it would refuse prompt_syntax"


def test_a_bug_in_the_routes_is_a_500_without_its_text(caplog):
    """The last line of defence: OpenAI's form, the request id, the traceback in the log only."""

    class Broken(FakeImageService):
        async def catalog(self):
            raise ZeroDivisionError("secret")

    answer = post(make_client(Broken()))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-request-id"]
    assert "secret" not in answer.text
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize("path", [URL, "/v1/images/edits", INFER])
async def test_a_client_that_goes_while_it_sends_hurts_nobody(path, caplog):
    """Its body never ended: that is no failure, and no mistake of anybody's."""
    app = create_app(FakeImageService(), HttpSettings(), ranking=LocalRankingService(fake_rankers()))
    call = AsgiCall(app, b"", path=path)
    call.requests[:] = [{"type": "http.request", "body": b"{", "more_body": True}]
    call.disconnect()
    await call.done()
    assert call.status == 499
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize(
    ("error", "status", "code"), [(None, 503, EngineStopped.code), (ValueError("secret"), 500, "internal_error")]
)
def test_a_service_that_ends_without_a_result_or_raises_is_told_as_that(error, status, code):
    """As a stopped engine and as a bug, not as a hang."""

    class Silent(FakeImageService):
        async def generate(self, request):
            if error is not None:
                raise error
            return
            yield

    answer = post(make_client(Silent()))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 3}, "did you mean num_inference_steps?"),
        ({"negativ_prompt": 3}, "did you mean negative_prompt?"),
        ({"prompt_3": 3}, "did you mean prompt?"),
        ({"n": 0, "promt": "x"}, "promt: unknown field; did you mean prompt? (and 1 more)"),
        ({"loras": "noto"}, 'loras: write [{"name": "noto", "scale": 1.0}], a list'),
        ({"controlnets": ["edges"]}, 'controlnets.0: write {"name": "edges", "image": "BASE64"}, an object'),
        ({"loras": [{"name": "notto"}]}, "there is no LoRA 'notto'; did you mean noto?"),
        ({"loras": [{"name": "noto", "scal": 1}]}, "loras.0.scal: unknown field; did you mean scale?"),
        ({"body": {}}, "body: unknown field"),
        ({"controlnets": [{**CONTROL, "name": "egdes"}]}, "there is no ControlNet 'egdes'; did you mean edges?"),
        ({"sigmas": "karas"}, "did you mean karras?"),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_a_name_spelled_wrong_gets_the_nearest_one(client, fields, said):
    """At any depth, and in our own words; what users of other servers type is answered with our name for it."""
    message = post(client, **fields).json()["error"]["message"]
    assert said in message
    assert "dictionary" not in message
