"""What `model` in a request may be: a base model, an alias, or a base model with LoRAs."""

from __future__ import annotations

import base64
import unicodedata
import urllib.parse
from dataclasses import replace

import pytest

from fakes.images import FAKE_CATALOG, FakeImageService
from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.diffusion.request_terms import SamplerChoice
from plait_serving.diffusion.values import Scheduler
from plait_serving.http.images.resolve import chosen_model, resolve
from plait_serving.http.images.schemas import GenerationBody
from plait_serving.images.infotext import read_parameters
from plait_serving.images.service import AliasCard, LoraCard
from support.http_app import make_client
from support.names import ODD_NAMES

LARGE = replace(FAKE_CATALOG.model, name="large", family="sdxl", default_width=64, controlnets=())
CATALOG = replace(
    FAKE_CATALOG,
    models=(FAKE_CATALOG.model, LARGE),
    aliases=(
        AliasCard(name="large-noto", model="large", loras={"noto": 0.5}),
        AliasCard(name="dall-e-3", model="large", loras={}),
    ),
)


def request(model, catalog=CATALOG, **more):
    body = GenerationBody.model_validate({"prompt": "x", "model": model, **more})
    return resolve(body, catalog, request_id="r", random_seed=1, preprocessors={})


@pytest.mark.parametrize(
    ("text", "model", "loras"),
    [
        (None, "emoji", {}),
        ("large-noto", "large", {"noto": 0.5}),
        ("dall-e-3", "large", {}),
        ("dall-e-3+noto:2", "large", {"noto": 2.0}),
        ("emoji+noto:0.8+sketch:-1", "emoji", {"noto": 0.8, "sketch": -1.0}),
    ],
)
def test_a_name_means_a_model_and_its_loras(text, model, loras):
    """Any client of OpenAI's API reaches them; the model's own defaults apply."""
    found = request(text)
    assert (found.model, found.width) == (model, 64 if model == "large" else 16)
    assert {lora.name: lora.scale for lora in found.loras} == loras


def test_the_loras_of_the_field_come_on_top():
    """In this order: the name's, the field's; one in both is refused as given twice."""
    assert [lora.name for lora in request("emoji+noto", loras=[{"name": "sketch"}]).loras] == ["noto", "sketch"]
    with pytest.raises(RequestError, match="given twice") as twice:
        request("emoji+noto", loras=[{"name": "noto"}])
    assert twice.value.param == "loras.0.name"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("emojy", NotFound, "no model 'emojy'; did you mean emoji?"),
        ("nothing", NotFound, "this server has 'emoji', 'large', 'large-noto', 'dall-e-3'"),
        ("gpt-image-1.5", NotFound, "images.aliases may give a model that name"),
        ("emoji+notto", NotFound, "no LoRA 'notto'; did you mean noto?"),
        ("emoji+", RequestError, "'' is not NAME or NAME:SCALE"),
        ("emoji+noto:much", RequestError, "'noto:much' is not NAME or NAME:SCALE"),
        ("emoji+noto:1+noto:2", RequestError, "given twice"),
        ("large-noto+sketch", RequestError, "'large-noto' is an alias, which takes no more LoRAs"),
    ],
)
def test_a_wrong_name_is_refused_as_what_it_is(text, kind, says):
    """Unknown names are 404 and get the nearest one that exists."""
    with pytest.raises(kind) as refused:
        request(text)
    assert says in refused.value.message
    assert refused.value.param == "model"


def test_a_controlnet_of_another_family_is_refused_by_name():
    """The sentence says which ones the model takes."""
    control = {"name": "edges", "image": "aGk="}
    with pytest.raises(RequestError, match="'edges' is for sd1 models; 'large' takes none"):
        request("large", controlnets=[control])


# ---- names from files ------------------------------------------------------------------------------------------------

ODD = replace(
    FAKE_CATALOG,
    models=tuple(replace(FAKE_CATALOG.model, name=name) for name in ("emoji", *ODD_NAMES, "m+n")),
    loras=tuple(LoraCard(name=name, family="sd1", format="peft") for name in (*ODD_NAMES, "n", "n+o")),
)


AS_TYPED = {(unicodedata.normalize(form, name), name) for form in ("NFC", "NFD") for name in ODD_NAMES}


@pytest.mark.parametrize(("typed", "name"), sorted(AS_TYPED))
def test_a_name_from_a_file_is_understood_wherever_a_request_may_have_it(typed, name):
    """As a LoRA, in a tag, as the model, behind the model, in a path; also as macOS spells it. The image's text has
    it."""
    service = FakeImageService(catalog=ODD)
    client = make_client(service)
    for body in (
        {"loras": [{"name": typed, "scale": 0.5}]},
        {"prompt": f"x <lora:{typed}:0.5>", "prompt_syntax": "a1111"},
        {"model": f"{typed}+{typed}:0.5"},
    ):
        answer = client.post("/v1/images/generations", json={"prompt": "x", **body})
        assert answer.status_code == 200, answer.text
        assert [(lora.name, lora.scale) for lora in service.submitted[-1].loras] == [(name, 0.5)]
        text = read_parameters(base64.b64decode(answer.json()["data"][0]["b64_json"]))
        assert f"<lora:{name}:0.5>" in text
    assert service.submitted[-1].model == name
    path = f"/v1/models/{urllib.parse.quote(typed, safe='')}"
    assert client.get(path).json()["id"] == name
    assert client.post(f"{path}/sleep").json() == {"id": name, "object": "model", "asleep": True}
    assert service.asleep == {name}
    assert name in {item["id"] for item in client.get("/v1/loras").json()["data"]}


@pytest.mark.parametrize(
    ("text", "model", "loras"),
    [
        ("m+n", "m+n", {}),
        ("m+n+n", "m+n", {"n": 1.0}),
        ("emoji+n", "emoji", {"n": 1.0}),
        ("emoji+n+o", "emoji", {"n+o": 1.0}),
        ("emoji+n+o:0.5+n:2", "emoji", {"n+o": 0.5, "n": 2.0}),
        ('emoji+n:2+a"b#c?d%e+f:0.5', "emoji", {"n": 2.0, 'a"b#c?d%e+f': 0.5}),
    ],
)
def test_a_plus_in_a_name(text, model, loras):
    """The longest name that there is counts."""
    base, found = chosen_model(text, ODD)
    assert (base.name, {lora.name: lora.scale for lora in found}) == (model, loras)


def test_more_parts_than_a_set_may_have_are_not_taken_apart(client):
    """Each is compared with all names that have a +, of which a folder may have thousands."""
    text = "emoji+" + "+".join(f"l{number}" for number in range(200))
    _, found = chosen_model(text, ODD)
    assert len(found) == 65
    answer = client.post("/v1/images/generations", json={"prompt": "x", "model": text})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "at most" in answer.json()["error"]["message"]


def test_a_sampler_or_a_spacing_that_the_model_does_not_take_is_refused():
    """By the name of the field, before anything is decoded or sent to an engine."""
    terms = replace(LARGE.terms, samplers=SamplerChoice(among=(Scheduler.EULER, Scheduler.DPMPP_2M)))
    catalog = replace(CATALOG, models=(replace(LARGE, terms=terms),))
    for fields, param in (({"scheduler": "heun"}, "scheduler"), ({"sigmas": "karras"}, "sigmas")):
        with pytest.raises(RequestError) as refused:
            request(None, catalog, **fields)
        assert refused.value.param == param
