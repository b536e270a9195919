"""`POST /v1/images/control_maps`: the map that a generation would use, to look at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fakes.images import FAKE_CATALOG, FakeImageService
from plait_serving.http.context import HttpSettings
from plait_serving.sections import TenantLimits
from support.http_app import b64, make_client, pixels, png
from support.keys import api_key

URL = "/v1/images/control_maps"
IMAGE = b64(png(20, 10, (200, 10, 30)))


@pytest.mark.parametrize("more", [{}, {"preprocess": False}, {"preprocess": "edges"}, {"size": "24x32"}])
def test_it_is_what_the_engine_gets(service, client, more):
    """To the byte, with and without a preprocessor and a size."""
    answer = client.post(URL, json={"name": "edges", "image": IMAGE, **more})
    assert answer.status_code == 200, answer.text
    size = {"size": more["size"]} if "size" in more else {}
    control = {"name": "edges", "image": IMAGE, "preprocess": more.get("preprocess", True)}
    client.post("/v1/images/generations", json={"prompt": "x", "controlnets": [control], **size})
    (submitted,) = service.submitted  # the map itself asked nothing of the engine
    np.testing.assert_array_equal(pixels(answer.json()["b64_json"]), submitted.controlnets[0].image)
    assert answer.json()["size"] == more.get("size", "16x16")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"name": "edgy", "image": IMAGE}, 404, "name"),
        ({"name": "plain", "image": IMAGE}, 400, "preprocess"),
        ({"name": "edges", "image": "aGVsbG8="}, 400, "image"),
        ({"name": "edges", "image": IMAGE, "size": "7x7"}, 400, "size"),
        ({"name": "edges", "image": IMAGE, "scale": 1.0}, 400, "scale"),
    ],
)
def test_a_mistake_is_named_by_its_field(client, body, status, param):
    """Of this body, not of an entry of `controlnets`."""
    answer = client.post(URL, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_tenant_has_its_bounds_here_too():
    """A map is made at the output's size, and without a step."""
    key = api_key("sk", tenant="acme")
    limits = TenantLimits(max_pixels=300, max_steps=1)
    client = make_client(FakeImageService(), HttpSettings(api_keys=(key,), tenants={"acme": limits}))
    headers = {"authorization": "Bearer sk"}
    answer = client.post(URL, json={"name": "edges", "image": IMAGE, "size": "32x32"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "size")
    assert client.post(URL, json={"name": "edges", "image": IMAGE}, headers=headers).status_code == 200


def test_a_controlnet_of_another_model_than_the_first_has_a_map():
    """Of that model's size, within its bounds."""
    first = replace(FAKE_CATALOG.model, controlnets=("plain",))
    limits = replace(first.limits, max_pixels=2 * first.limits.max_pixels)
    large = replace(first, name="large", controlnets=("edges",), default_width=64, limits=limits)
    client = make_client(FakeImageService(catalog=replace(FAKE_CATALOG, models=(first, large))))
    for more, size in (({}, "64x16"), ({"size": "128x64"}, "128x64")):
        answer = client.post(URL, json={"name": "edges", "image": IMAGE, **more})
        assert (answer.status_code, answer.json().get("size")) == (200, size), answer.text
