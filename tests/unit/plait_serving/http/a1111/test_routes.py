"""A1111's API, as clients of stable-diffusion-webui speak it. Requests are those of their public sources."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import httpx2
import numpy as np
import pytest
from PIL import Image

from fakes.images import FAKE_CATALOG, FakeImageService, fake_image
from plait_serving.diffusion.errors import RequestError
from plait_serving.diffusion.request_terms import RequestTerms, SamplerChoice
from plait_serving.diffusion.values import Scheduler, Sigmas
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge.hosts import LOOPBACK_HOSTS
from plait_serving.images.service import AliasCard
from support.http_app import AsgiCall, b64, make_app, make_client, pixels, png, saved
from support.keys import api_key
from support.waiting import until

ON = HttpSettings(a1111_api=True)
KEYS = tuple(api_key(f"sk:{name}", tenant=name) for name in ("a", "b"))
KEYED = HttpSettings(a1111_api=True, api_keys=KEYS)
MODEL = replace(
    FAKE_CATALOG.model,
    terms=replace(FAKE_CATALOG.model.terms, takes=FAKE_CATALOG.model.terms.takes - {"true_cfg_scale"}),
)
TWO_MODELS = replace(
    FAKE_CATALOG,
    models=(MODEL, replace(MODEL, name="other")),
    aliases=(AliasCard(name="soft", model="other", loras={"noto": 0.5}),),
)
SDAPI = "/sdapi/v1"


@pytest.fixture
def service():
    error = RequestError("76 tokens are too many", param="negative_prompt")
    return FakeImageService(catalog=TWO_MODELS, failures={"long": error})


@pytest.fixture
def client(service):
    return make_client(service, ON)


def basic(password, name="me"):
    return {"authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def told(answer):
    """The `info` of an answer."""
    assert answer.status_code == 200, answer.text
    return json.loads(answer.json()["info"])


def test_it_is_off_unless_one_key_turns_it_on(service):
    """Nothing below /sdapi is known then."""
    off = make_client(service).get(f"{SDAPI}/options")
    assert (off.status_code, "server.a1111_api: true turns it on" in off.json()["errors"]) == (404, True)
    assert make_client(service, ON).get(f"{SDAPI}/options").status_code == 200


def test_open_webuis_requests(client, service):
    """backend/open_webui/routers/images.py: it reads the options, chooses a model by sending all of them back, and
    makes images; without a password it sends an empty header."""
    headers = {"authorization": ""}
    options = client.get(f"{SDAPI}/options", headers=headers).json()
    assert options["sd_model_checkpoint"] == "emoji"
    models = [(each["title"], each["model_name"]) for each in client.get(f"{SDAPI}/sd-models", headers=headers).json()]
    assert models == [("emoji", "emoji"), ("other", "other"), ("soft", "soft")]
    options["sd_model_checkpoint"] = "other"
    assert client.post(f"{SDAPI}/options", json=options, headers=headers).is_success
    assert client.get(f"{SDAPI}/options").json()["sd_model_checkpoint"] == "other"
    body = {"prompt": "red apple", "batch_size": 2, "width": 24, "height": 16, "steps": 3, "negative_prompt": "blue"}
    answer = client.post(f"{SDAPI}/txt2img", json=body, headers=headers)
    (request,) = service.submitted
    info = told(answer)
    assert (request.model, request.n, request.width, request.height, request.steps) == ("other", 2, 24, 16, 3)
    assert (request.prompt, request.negative_prompt, request.guidance_scale) == ("red apple", "blue", 7.5)
    assert info["all_seeds"] == list(request.seeds)
    for encoded, seed in zip(answer.json()["images"], request.seeds, strict=True):
        assert np.array_equal(pixels(encoded), fake_image(request, seed))


SILLYTAVERN = {
    "url": "http://localhost:7860", "auth": "", "prompt": "best quality, <lora:noto:0.5> sunflower",
    "negative_prompt": "lowres", "sampler_name": "DDIM", "scheduler": "normal", "steps": 20, "cfg_scale": 7,
    "width": 64, "height": 64, "restore_faces": False, "enable_hr": False, "hr_upscaler": "Latent", "hr_scale": 1.0,
    "hr_additional_modules": [], "denoising_strength": 0.7, "hr_second_pass_steps": 0,
    "override_settings": {"CLIP_stop_at_last_layers": 2}, "override_settings_restore_afterwards": True, "clip_skip": 2,
    "save_images": True, "send_images": True, "do_not_save_grid": False, "do_not_save_samples": False,
}  # fmt: skip
"""public/scripts/extensions/stable-diffusion/index.js, with its default settings, and a clip skip."""


def test_sillytaverns_requests(client, service):
    """src/endpoints/stable-diffusion.js: what it asks for when it connects, beside what `webuiapi` does, and what it
    then sends on as its page made it. It always names a spacing, which a sampler with one of its own does without."""
    for path, name in (("samplers", "DDIM"), ("schedulers", "normal")):
        assert name in {each["name"] for each in client.get(f"{SDAPI}/{path}").json()}
    assert "forge_preset" not in client.get(f"{SDAPI}/options").json()
    assert client.post(f"{SDAPI}/options", json={"sd_model_checkpoint": "other"}).is_success
    answer = client.post(f"{SDAPI}/txt2img", json=SILLYTAVERN)
    (request,) = service.submitted
    assert (request.scheduler, request.sigmas, request.clip_skip, request.model) == (Scheduler.DDIM, None, 1, "other")
    assert [(lora.name, lora.scale) for lora in request.loras] == [("noto", 0.5)]
    assert told(answer)["sampler_name"] == "DDIM"
    assert pixels(answer.json()["images"][0]).shape == (64, 64, 3)


def test_a_model_is_chosen_per_request_or_per_tenant(service):
    """`override_settings` is the request's alone; what a tenant chose is no other tenant's, and nothing on plait's own
    API."""
    client = make_client(service, KEYED)
    client.post(f"{SDAPI}/options", json={"sd_model_checkpoint": "soft"}, headers=basic("sk:a"))
    body = {"prompt": "x", "width": 16, "height": 16}
    asked = (
        (basic("sk:a"), body, ("other", ["noto"])),
        (basic("sk:b"), body, ("emoji", [])),
        (basic("sk:a"), {**body, "override_settings": {"sd_model_checkpoint": "emoji"}}, ("emoji", [])),
        (basic("sk:a"), body, ("other", ["noto"])),
    )
    for headers, sent, expected in asked:
        assert client.post(f"{SDAPI}/txt2img", json=sent, headers=headers).is_success
        request = service.submitted[-1]
        assert (request.model, [lora.name for lora in request.loras]) == expected
    key = {"authorization": "Bearer sk:a"}
    assert client.post("/v1/images/generations", json={"prompt": "x"}, headers=key).json()["model"] == "emoji"


def test_other_options_stay_as_they_are(client):
    """All that `GET options` says may come back unchanged; what is to change is refused by name, and then nothing
    changes."""
    options = client.get(f"{SDAPI}/options").json()
    assert client.post(f"{SDAPI}/options", json=options).is_success
    for name, value in (("sd_vae", "kl-f8"), ("CLIP_stop_at_last_layers", 2), ("grid_save", True)):
        answer = client.post(f"{SDAPI}/options", json={**options, "sd_model_checkpoint": "other", name: value})
        assert answer.status_code == 400
        assert answer.json()["detail"].startswith(f"{name}: ")
        answer = client.post(f"{SDAPI}/txt2img", json={"prompt": "x", "override_settings": {"grid_save": True}})
        assert answer.json()["detail"].startswith("override_settings.grid_save: ")
    for model, status in (("emo", 404), (5, 400), ("emoji+noto:1." + "0" * 2**20, 400)):
        answer = client.post(f"{SDAPI}/options", json={"sd_model_checkpoint": model})
        assert (answer.status_code, "sd_model_checkpoint" in answer.json()["detail"]) == (status, True)
    assert client.get(f"{SDAPI}/options").json() == options


def of_unit(**unit):
    """A request with a ControlNet."""
    return {"alwayson_scripts": {"controlnet": {"args": [{"model": "edges", "image": b64(png()), **unit}]}}}


@pytest.mark.parametrize(
    ("sent", "status", "named"),
    [
        ({"prompt": "long"}, 400, "negative_prompt: 76 tokens are too many"),
        ({"enable_hr": True}, 400, "enable_hr"),
        ({"alwayson_scripts": {"ADetailer": {"args": [True, {}]}}}, 400, "ADetailer"),
        ({"alwayson_scripts": {"ADetailer": {"args": [{"ad_model": "face"}]}}}, 400, "ADetailer"),
        ({"alwayson_scripts": {"Seed": {"args": [7, False]}, "Refiner": {"args": [False, "", 0.8]}}}, 400, "Seed"),
        ({"alwayson_scripts": {"ReActor": {"args": [None, True, "0"]}}}, 400, "ReActor"),
        ({"alwayson_scripts": {"ReActor": {"args": [b64(png()), True, "0"]}}}, 400, "ReActor"),
        ({"alwayson_scripts": {"Modes": {"args": ["iVory", False]}}}, 400, "Modes"),
        ({"sampler_name": "DPM2"}, 400, "sampler_name"),
        ({"scheduler": "sgm_uniform"}, 400, "scheduler"),
        ({"sampler_name": "Euler a", "eta": 0.5}, 400, "eta"),
        ({"batch_size": 4, "n_iter": 3}, 400, "batch_size"),
        ({"width": 17}, 400, "width: both edges must be multiples of 8"),
        ({"negative_prompt": "(a:1000)"}, 400, "negative_prompt: "),
        ({"prompt": "<lora:unknown:1>"}, 404, "prompt: there is no LoRA 'unknown'"),
        ({"override_settings": {"sd_model_checkpoint": "sdxl"}}, 404, "sd_model_checkpoint: there is no model 'sdxl'"),
        ({"override_settings": {"sd_model_checkpoint": "emoji" + "+" * 2**20}}, 400, "at most 1024"),
        ({"override_settings": {"CLIP_stop_at_last_layers": "2"}}, 400, "CLIP_stop_at_last_layers"),
        (of_unit(model="depth"), 404, "alwayson_scripts.controlnet.0.model: "),
        (of_unit(guidance_start=0.5, guidance_end=0.5), 400, "alwayson_scripts.controlnet.0.guidance_end: "),
    ],
)
def test_what_cannot_be_done_is_refused_in_its_words(client, service, sent, status, named):
    """By A1111's name of the field, in the form of errors that its clients read; by the engine too, which counts a
    text's tokens."""
    answer = client.post(f"{SDAPI}/txt2img", json={"prompt": "x", "width": 16, "height": 16, **sent})
    assert answer.status_code == status
    assert named in answer.json()["detail"]
    assert isinstance(answer.json()["error"], str)
    assert (service.submitted == []) == ("long" not in sent.values())


@pytest.mark.parametrize("value", ['"\\ud800"', "[" * 400 + "]" * 400, "NaN"], ids=["surrogate", "deep", "nan"])
def test_fields_of_others_come_back_whatever_they_are(client, value):
    """What A1111 does not know is no reason for a failure after the image was made."""
    body = f'{{"prompt": "x", "theirs": {value}, "width": 16, "height": 16}}'
    answer = client.post(f"{SDAPI}/txt2img", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert json.dumps(answer.json()["parameters"]["theirs"]) == value


def test_a_samplers_name_may_hold_its_spacing(client, service):
    """As before A1111 told the two apart; names are A1111's or plait's, in any case, and `sampler_index` is one too."""
    for sent, expected in (
        ({"sampler_name": "DPM++ 2M Karras"}, (Scheduler.DPMPP_2M, Sigmas.KARRAS)),
        ({"sampler_name": "dpm++ 2m", "scheduler": "Beta"}, (Scheduler.DPMPP_2M, Sigmas.BETA)),
        ({"sampler_index": "Euler a", "scheduler": "automatic"}, (Scheduler.EULER_A, None)),
        ({"sampler_name": "unipc"}, (Scheduler.UNIPC, None)),
        ({}, (Scheduler.EULER, None)),
    ):
        assert client.post(f"{SDAPI}/txt2img", json={"prompt": "x", **sent}).is_success
        assert (service.submitted[-1].scheduler, service.submitted[-1].sigmas) == expected


def test_a_model_without_a_use_for_them_does_without(service):
    """Clients send a guidance scale and a negative prompt to whatever there is; the answer says so. LoRAs are found in
    a prompt that is read to the letter."""
    terms = RequestTerms(samplers=SamplerChoice(among=(Scheduler.EULER,)), guidance_scale=1.0)
    plain = replace(FAKE_CATALOG.model, terms=terms, default_guidance_scale=1.0)
    service.offers = replace(FAKE_CATALOG, models=(plain,))
    body = {"prompt": "<lora:noto:2>(red:1.3) apple", "negative_prompt": "blue", "cfg_scale": 7}
    answer = make_client(service, ON).post(f"{SDAPI}/txt2img", json=body)
    (request,) = service.submitted
    assert (request.prompt, request.guidance_scale, request.negative_prompt) == ("(red:1.3) apple", 1.0, None)
    assert [(lora.name, lora.scale) for lora in request.loras] == [("noto", 2.0)]
    named = {hint.partition(":")[0] for hint in told(answer)["hints"]}
    assert named == {"guidance_scale", "negative_prompt", "prompt"}
    takes = frozenset(("guidance_scale", "negative_prompt", "true_cfg_scale"))
    terms = replace(terms, takes=takes, edits=False, reads_images=True)  # FLUX.1 Kontext, which A1111 does not know
    service.offers = replace(FAKE_CATALOG, models=(replace(plain, terms=terms),))
    answer = make_client(service, ON).post(f"{SDAPI}/img2img", json={**body, "init_images": [b64(png())]})
    request = service.submitted[-1]
    assert (request.guidance_scale, request.negative_prompt, request.edit) == (7.0, None, None)
    assert request.reference is not None
    named = {hint.partition(":")[0] for hint in told(answer)["hints"]}
    assert named == {"negative_prompt", "denoising_strength", "prompt"}


def test_an_image_is_started_from(client, service):
    """White in a mask is made anew, its edge is soft, and it may be turned round; the answer holds neither again."""
    mask = Image.new("L", (16, 16))
    mask.paste(255, (0, 0, 8, 16))
    body = masked(mask, init_images=["data:image/png;base64," + b64(png())], width=16, denoising_strength=0.5)
    answer = client.post(f"{SDAPI}/img2img", json=body)
    assert told(answer)["denoising_strength"] == 0.5
    assert not {"init_images", "mask"} & answer.json()["parameters"].keys()
    assert np.array_equal(service.submitted[-1].edit.mask, np.asarray(mask))
    client.post(f"{SDAPI}/img2img", json={**body, "inpainting_mask_invert": 1})
    assert np.array_equal(service.submitted[-1].edit.mask, 255 - np.asarray(mask))
    client.post(f"{SDAPI}/img2img", json={**body, "mask_blur": 4})
    assert 0 < service.submitted[-1].edit.mask[8, 7] < 255
    answer = client.post(f"{SDAPI}/img2img", json={**body, "inpaint_full_res": True})
    assert told(answer)["hints"][0].startswith("inpaint_full_res")
    for wrong in ({"init_images": []}, {"init_images": [b64(png())] * 2}, {"init_images": None}, {"resize_mode": 1}):
        answer = client.post(f"{SDAPI}/img2img", json={**body, **wrong})
        assert (answer.status_code, next(iter(wrong)) in answer.json()["detail"]) == (400, True)
    answer = client.post(f"{SDAPI}/img2img", json={**body, "init_images": [0] * 1000})
    assert "(and 999 more)" not in answer.json()["detail"]  # each is an error that takes its time


def masked(mask, **more):
    """A request for an edit within a mask."""
    return {"init_images": [b64(png())], "mask": b64(saved(mask)), "mask_blur": 0, "prompt": "x", **more}


@pytest.mark.parametrize(
    ("mode", "size", "colour"), [("RGBA", (16, 16), (0, 0, 0, 255)), ("L", (64, 32), 255)], ids=["clear", "large"]
)
def test_a_mask_is_read_as_a1111_does(client, service, mode, size, colour):
    """What is painted is made anew, whatever its colour: not what is transparent, which is OpenAI's rule. One of
    another size is stretched, once it is blurred; one of which that leaves nothing is refused by the blur's name."""
    mask = Image.new(mode, size)
    mask.paste(colour, (0, 0, size[0] // 2, size[1]))
    assert client.post(f"{SDAPI}/img2img", json=masked(mask)).is_success
    assert np.array_equal(service.submitted[-1].edit.mask > 127, np.repeat([[True] * 8 + [False] * 8], 16, axis=0))
    line = Image.new("L", (64, 64))
    line.paste(255, (31, 0, 33, 64))
    answer = client.post(f"{SDAPI}/img2img", json=masked(line, mask_blur=8))
    assert (answer.status_code, answer.json()["detail"].startswith("mask_blur: ")) == (400, True)


def test_controlnets_come_as_an_always_on_script(client, service):
    """Units of sd-webui-controlnet; those that are off are not there, and one without an image has the one that is
    started from."""
    unit = {"model": "edges", "module": "edges", "weight": 0.5, "guidance_end": 0.8, "image": b64(png())}
    bare = {"model": "plain", "module": "none", "image": {"image": b64(png()), "mask": None}}
    units = [unit, bare, {**unit, "enabled": False}, False]
    body = {"prompt": "x", "alwayson_scripts": {"ControlNet": {"args": units}, "ADetailer": {"args": [False]}}}
    assert client.post(f"{SDAPI}/txt2img", json=body).is_success
    first, second = service.submitted[-1].controlnets
    assert (first.name, first.scale, first.start, first.end, second.name, second.scale) == (
        "edges", 0.5, 0.0, 0.8, "plain", 1.0,
    )  # fmt: skip
    assert np.array_equal(first.image, 255 - second.image)
    del unit["image"]
    body |= {"alwayson_scripts": {"controlnet": {"args": [unit]}}, "init_images": [b64(png())]}
    assert client.post(f"{SDAPI}/img2img", json=body).is_success
    assert np.array_equal(service.submitted[-1].controlnets[0].image, first.image)
    for wrong in ({"control_mode": "My prompt is more important"}, {"mask": b64(png())}, {"weight": 10**400}):
        body["alwayson_scripts"] = {"controlnet": {"args": [{**unit, **wrong}]}}
        assert client.post(f"{SDAPI}/img2img", json=body).status_code in (400, 404)


def test_scripts_that_are_off_change_nothing(client, service):
    """As the page of A1111 sends those that nobody turned on, and webuiapi the detailer: with all their arguments."""
    off = {
        "ADetailer": [False, False, {"ad_model": "face_yolov8n.pt"}], "Soft Inpainting": [False, 1, 0.5, 4, 0, 0.5, 2],
        "Dynamic Thresholding (CFG Scale Fix)": [False, 7, 100, "Constant"], "Refiner": [False, "", 0.8],
        "reactor": [None, False, "0", "0", "inswapper_128.onnx"], "AnimateDiff": [{"enable": False, "model": "mm"}],
        "Mine": {"enabled": False, "x": 1}, "Hypertile": [], "Extra options": None, "Comments": [None, ""],
        "ControlNet": [{"enabled": False, "model": "edges"}],
    }  # fmt: skip
    faces = {kind: b64(saved(Image.new("RGB", (8, 8)), kind)) for kind in ("PNG", "JPEG", "WEBP")}
    faces["URL"] = f"data:image/png;base64,{faces['PNG']}"
    off |= {f"reactor of {kind}": [face, *off["reactor"][1:]] for kind, face in faces.items()}
    scripts = {name: {"args": args} for name, args in off.items()}
    assert client.post(f"{SDAPI}/txt2img", json={"prompt": "x", "alwayson_scripts": scripts}).is_success
    assert service.submitted[-1].controlnets == ()


def test_what_an_image_says_of_its_making(client):
    """`png-info` reads what `txt2img` wrote; of another image it says nothing."""
    made = client.post(f"{SDAPI}/txt2img", json={"prompt": 'a "b", c: d', "negative_prompt": "e\nf", "seed": 5})
    found = client.post(f"{SDAPI}/png-info", json={"image": "data:image/png;base64," + made.json()["images"][0]}).json()
    assert found["info"] == told(made)["infotexts"][0]
    said = found["parameters"]
    assert (said["Prompt"], said["Negative prompt"], said["Seed"]) == ('a "b", c: d', "e\nf", "5")
    bare = client.post(f"{SDAPI}/png-info", json={"image": b64(png())}).json()
    assert bare == {"info": "", "items": {}, "parameters": {}}
    refused = client.post(f"{SDAPI}/png-info", json={"image": "zzz"})
    assert (refused.status_code, refused.json()["errors"]) == (400, "image: not valid base64")


async def test_progress_and_interrupt_are_of_ones_own_requests():
    """Of requests through this API and of one's tenant: another tenant's goes on, and so does one's own through
    plait's. Who was interrupted gets an answer without images."""
    service = FakeImageService(step_s=0.01)
    app = make_app(service, KEYED)
    body = json.dumps({"prompt": "x", "steps": 50, "num_inference_steps": 50}).encode()
    own = json.dumps({"prompt": "x", "num_inference_steps": 50}).encode()
    mine = AsgiCall(app, body, path=f"{SDAPI}/txt2img", key="sk:a")
    others = AsgiCall(app, body, path=f"{SDAPI}/txt2img", key="sk:b")
    plaits = AsgiCall(app, own, key="sk:a")
    await until(lambda: service.steps_run > 30)
    service.step_s = 0.2  # so that none of them ends before
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app), base_url=f"http://testserver{SDAPI}", headers=basic("sk:a")
    )
    now = (await client.get("/progress")).json()
    assert 0.0 < now["progress"] < 1.0
    assert now["eta_relative"] > 0.0
    assert (now["state"]["job_count"], now["state"]["sampling_steps"]) == (1, 50)
    assert now["state"]["sampling_step"] == pytest.approx(now["progress"] * 50)
    assert (await client.post("/interrupt")).json() == {}
    await mine.done()
    answer = json.loads(b"".join(mine.chunks))
    assert (mine.status, answer["images"], json.loads(answer["info"])["interrupted"]) == (200, [], True)
    assert len(service.cancelled) == 1
    service.step_s = 0.0
    for call in (others, plaits):
        await call.done()
        assert call.status == 200
    assert len(json.loads(b"".join(others.chunks))["images"]) == 1
    assert len(service.finished) == 2
    assert (await client.get("/progress")).json()["state"]["job_count"] == 0


@pytest.mark.parametrize(
    "settings", [KEYED, replace(KEYED, allowed_hosts=LOOPBACK_HOSTS)], ids=["any host", "own hosts"]
)
def test_a_key_may_be_a_password_here_alone(service, settings):
    """With any name, or none; elsewhere it is no key. No answer asks a browser for one."""
    client = make_client(service, settings)
    client.base_url = "http://localhost"
    for headers in (basic("sk:a"), basic("sk:a", name=""), {"authorization": "Bearer sk:a"}):
        assert client.get(f"{SDAPI}/options", headers=headers).status_code == 200
    assert client.get("/v1/models", headers=basic("sk:a")).status_code == 401
    for headers in (basic("wrong"), basic(""), {"authorization": "Basic !"}, {"authorization": "Basic"}, {}):
        answer = client.get(f"{SDAPI}/options", headers=headers)
        assert answer.status_code == 401
        assert "www-authenticate" not in answer.headers
        assert answer.json()["detail"]


def test_a_password_proves_no_page(service):
    """A browser adds one by itself: pages of other origins change nothing with it, on a server with keys and any host
    name either. A bearer key, which it does not add, is proof."""
    client = make_client(service, KEYED)
    body, page = {"sd_model_checkpoint": "other"}, {"origin": "http://evil.example"}
    for headers in ({**basic("sk:a"), **page}, {**basic("sk:a"), "sec-fetch-site": "cross-site"}):
        assert client.post(f"{SDAPI}/options", json=body, headers=headers).status_code == 403
    assert client.get(f"{SDAPI}/options", headers=basic("sk:a")).json()["sd_model_checkpoint"] == "emoji"
    for headers in (
        basic("sk:a"),
        {**basic("sk:a"), "origin": "http://testserver"},
        {"authorization": "Bearer sk:a", **page},
    ):
        assert client.post(f"{SDAPI}/options", json=body, headers=headers).is_success
