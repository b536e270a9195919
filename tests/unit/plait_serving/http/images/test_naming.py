"""What `model` in a request may be: a base model, an alias, or a base model with LoRAs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait_serving.diffusion.errors import NotFound, RequestError
from plait_serving.http.images.naming import chosen_model
from plait_serving.http.images.resolve import resolve
from plait_serving.http.images.schemas import GenerationBody
from plait_serving.images.codec import DecodeLimits
from plait_serving.images.service import AliasCard
from plait_serving.images.testing import FAKE_CATALOG

LARGE = replace(FAKE_CATALOG.model, name="large", family="sdxl", default_width=64, controlnets=())
CATALOG = replace(
    FAKE_CATALOG,
    models=(FAKE_CATALOG.model, LARGE),
    aliases=(AliasCard(name="large-noto", model="large", loras={"noto": 0.5}),),
)


def request(model, **more):
    body = GenerationBody.model_validate({"prompt": "x", "model": model, **more})
    return resolve(
        body, CATALOG, request_id="r", random_seed=1, preprocessors={}, decode_limits=DecodeLimits()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "model", "loras"),
    [
        (None, "emoji", {}),
        ("large", "large", {}),
        ("large-noto", "large", {"noto": 0.5}),
        ("emoji+noto", "emoji", {"noto": 1.0}),
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
        ("nothing", NotFound, "this server has 'emoji', 'large', 'large-noto'"),
        ("large-not", NotFound, "did you mean large-noto?"),
        ("emojy+noto", NotFound, "did you mean emoji?"),
        ("emoji+notto", NotFound, "no LoRA 'notto'; did you mean noto?"),
        ("emoji+", RequestError, "'' is not NAME or NAME:SCALE"),
        ("emoji+noto:much", RequestError, "'noto:much' is not NAME or NAME:SCALE"),
        ("emoji+noto:nan", RequestError, "is not NAME or NAME:SCALE"),
        ("emoji+noto:1+noto:2", RequestError, "given twice"),
    ],
)
def test_a_wrong_name_is_refused_as_what_it_is(text, kind, says):
    """Unknown names are 404 and get the nearest one that exists."""
    with pytest.raises(kind, match=None) as refused:
        request(text)
    assert says in refused.value.message
    assert refused.value.param == "model"


def test_a_controlnet_of_another_family_is_refused_by_name():
    """The sentence says which ones the model takes."""
    control = {"name": "edges", "image": "aGk="}
    with pytest.raises(RequestError, match="'edges' is for sd1 models; 'large' takes none"):
        request("large", controlnets=[control])


def test_without_a_model_the_first_is_meant():
    """As on a server that has one."""
    assert chosen_model(None, CATALOG) == (CATALOG.models[0], [])
