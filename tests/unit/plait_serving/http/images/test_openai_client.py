"""The real `openai` client, unchanged, against the application in this process."""

from __future__ import annotations

import base64
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import openai
import pytest

from fakes.images import FAKE_CATALOG, FakeImageService, fake_image
from plait_serving.diffusion import errors as engine
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge.auth import ApiKey, Role
from plait_serving.images.config import ResultsSection
from plait_serving.images.service import AliasCard
from support.http_app import b64, make_client, pixels, png


def make_openai(service, *, settings=None, api_key="any", max_retries=0):
    return openai.OpenAI(
        api_key=api_key,
        base_url="http://testserver/v1",
        http_client=make_client(service, settings),
        max_retries=max_retries,
    )


@pytest.fixture
def service():
    return FakeImageService()


@pytest.fixture
def client(service):
    return make_openai(service)


def test_generate_returns_pictures(client, service):
    """`images.generate` gives the images, and our own fields are found on the result."""
    result = client.images.generate(model="emoji", prompt="red apple", n=2, size="24x16", quality="high")
    (request,) = service.submitted
    assert len(result.data) == 2
    for image, seed in zip(result.data, request.seeds, strict=True):
        assert np.array_equal(pixels(image.b64_json), fake_image(request, seed))
        assert image.seed == seed
    assert (result.size, result.output_format) == ("24x16", "png")
    assert result.created > 0
    assert result.seed == request.seed
    assert result.timings["total"] > 0
    assert result.ignored == ["quality"]
    assert result._request_id == result.id


def test_extra_body_reaches_the_top_level(client, service):
    """LoRAs and ControlNets are sent with `extra_body`, as users of the SDK do."""
    client.images.generate(
        prompt="red apple",
        extra_body={
            "loras": [{"name": "noto", "scale": 0.8}],
            "controlnets": [{"name": "edges", "image": b64(png()), "preprocess": True}],
            "num_inference_steps": 3,
            "seed": 5,
        },
    )
    (request,) = service.submitted
    assert [(ref.name, ref.scale) for ref in request.loras] == [("noto", 0.8)]
    assert [ref.name for ref in request.controlnets] == ["edges"]
    assert (request.steps, request.seed) == (3, 5)


@pytest.mark.parametrize(
    ("sent", "member"),
    [
        # langchain_community/utilities/dalle_image_generator.py, `DallEAPIWrapper.run` with its defaults
        ({"n": 1, "size": "1024x1024", "model": "dall-e-2"}, "url"),
        # llama_index/tools/openai/image_generation/base.py, `image_generation` with its defaults, and with `download`
        ({"n": 1, "model": "dall-e-3", "quality": "standard", "size": "1024x1024", "response_format": "url",
          "style": "vivid", "timeout": None}, "url"),
        ({"n": 1, "model": "dall-e-3", "quality": "standard", "size": "1024x1024", "response_format": "b64_json",
          "style": "vivid", "timeout": None}, "b64_json"),
    ],
    ids=["LangChain", "LlamaIndex", "LlamaIndex, download"],
)  # fmt: skip
def test_tools_with_their_default_names(tmp_path, sent, member):
    """They know OpenAI's models, and read what they expect of an answer: aliases and a default form serve them."""
    large = replace(FAKE_CATALOG.model, limits=ImageLimits())
    aliases = tuple(AliasCard(name=name, model="emoji", loras={}) for name in ("dall-e-2", "dall-e-3"))
    service = FakeImageService(catalog=replace(FAKE_CATALOG, models=(large,), aliases=aliases))
    kept = HttpSettings(results=ResultsSection(folder=tmp_path, response_format="url"))
    answer = make_openai(service, settings=kept).images.generate(prompt="red apple", **sent)
    assert getattr(answer.data[0], member)
    (request,) = service.submitted
    assert (request.model, request.width, request.height) == ("emoji", 1024, 1024)


def test_streaming_gives_partial_images_and_then_the_picture(client, service):
    """The SDK's typed events arrive in order, with indices from 0 and the finished image last."""
    with client.images.generate(prompt="red apple", stream=True, partial_images=3, output_format="webp") as stream:
        events = list(stream)
    assert [event.type for event in events] == ["image_generation.partial_image"] * 3 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:3]] == [0, 1, 2]
    assert all(base64.b64decode(event.b64_json).startswith(b"RIFF") for event in events)
    assert all((event.size, event.output_format, event.background) == ("16x16", "webp", "opaque") for event in events)
    assert all(isinstance(event.created_at, int) for event in events)
    assert events[-1].seed == service.submitted[0].seed
    assert events[-1].id


def test_streaming_without_partial_images_gives_one_event(client):
    """`partial_images: 0` is one event with the finished image."""
    (event,) = client.images.generate(prompt="red apple", stream=True, partial_images=0)
    assert isinstance(event, openai.types.ImageGenCompletedEvent)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (engine.RequestError("m", param="size"), openai.BadRequestError),
        (engine.NotFound("m", param="loras.0.name"), openai.NotFoundError),
        (engine.Overloaded("m"), openai.RateLimitError),
        (engine.DeadlineMissed("m"), openai.InternalServerError),
        (engine.LoraError("m"), openai.UnprocessableEntityError),
        (engine.OutOfMemory("m"), openai.UnprocessableEntityError),
        (engine.ControlNetUnavailable("m"), openai.InternalServerError),
        (engine.NumericalError("m"), openai.InternalServerError),
        (engine.EngineStopped("m"), openai.InternalServerError),
    ],
    ids=lambda value: getattr(value, "code", getattr(value, "__name__", "")),
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_become_the_sdks_own_classes(error, kind, stream):
    """Each error of the engine is the SDK exception that its users catch, with message, param and code."""
    client = make_openai(FakeImageService(failures={"x": error}))
    with pytest.raises(kind) as caught:
        client.images.generate(prompt="x", stream=stream)
    assert caught.value.code in {error.code, "lora_not_found"}
    assert caught.value.body["message"] == "m"
    if error.param:
        assert caught.value.param == error.param


def test_an_error_after_the_stream_began_is_raised_by_the_sdk():
    """Once the status line is gone the error comes as an event, and the SDK raises it."""
    service = FakeImageService(failures={"x": engine.NumericalError("image turned NaN")}, fail_at_step=2)
    seen = []
    with pytest.raises(openai.APIError, match="image turned NaN") as caught:
        seen += list(make_openai(service).images.generate(prompt="x", stream=True, partial_images=3))
    assert caught.value.code == "numerical_error"


def test_validation_errors_name_the_field(client):
    """`param` and `code` are filled, as with OpenAI."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="x", n=11)
    assert (caught.value.param, caught.value.code, caught.value.type) == ("n", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(prompt="x", response_format="url")
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="n=1") as caught:
        client.images.generate(prompt="x", n=2, stream=True)
    assert caught.value.param == "n"


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (engine.DeadlineMissed("m"), 1),
        (engine.NumericalError("m"), 1),
        (engine.LoraError("m"), 1),
        (engine.Overloaded("m", retry_after_s=1.0), 2),
    ],
    ids=lambda value: getattr(value, "code", str(value)),
)
def test_the_sdk_repeats_only_what_can_succeed_later(error, attempts, monkeypatch):
    """A missed deadline or a NaN is not tried again; overload is, after the wait that we name."""
    waits = []
    monkeypatch.setattr("plait_serving.http.edge.refusals.HELD_S", 0.0)  # that moment is over when the SDK comes back
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(sleep=waits.append, time=time.time))
    service = FakeImageService(failures={"x": error})
    with pytest.raises(openai.APIStatusError):
        make_openai(service, max_retries=1).images.generate(prompt="x")
    assert len(service.submitted) == attempts
    assert waits == [1.0] * (attempts - 1)


def test_models_are_listed_and_retrieved(client):
    """`models.list` and `models.retrieve` work; an unknown model is NotFoundError."""
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("emoji", "model", "plait")
    assert client.models.retrieve("emoji").default_size == "16x16"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error():
    """Configured keys are enforced in the form that the SDK understands."""
    settings = HttpSettings(api_keys=(ApiKey.from_secret("sk-right", tenant="a", role=Role.USER),))
    with pytest.raises(openai.AuthenticationError) as caught:
        make_openai(FakeImageService(), settings=settings, api_key="sk-wrong").images.generate(prompt="x")
    assert caught.value.code == "invalid_api_key"
    assert make_openai(FakeImageService(), settings=settings, api_key="sk-right").images.generate(prompt="x").data
