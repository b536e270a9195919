"""The real `openai` client, unchanged, against the application in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import openai
import pytest

from fakes.images import FAKE_CATALOG, FakeImageService
from plait_serving.diffusion import errors as engine
from plait_serving.diffusion.admission import ImageLimits
from plait_serving.http.context import HttpSettings
from plait_serving.images.config import ResultsSection
from plait_serving.images.service import AliasCard
from support.http_app import make_client


def make_openai(service, *, settings=None, max_retries=0):
    made = make_client(service, settings)
    return openai.OpenAI(api_key="any", base_url="http://testserver/v1", http_client=made, max_retries=max_retries)


@pytest.mark.parametrize(
    ("sent", "member"),
    [
        # langchain_community/utilities/dalle_image_generator.py, `DallEAPIWrapper.run` with its defaults
        ({"n": 1, "size": "1024x1024", "model": "dall-e-2"}, "url"),
        # llama_index/tools/openai/image_generation/base.py, `image_generation` with its defaults but for `download`
        ({"n": 1, "model": "dall-e-3", "quality": "standard", "size": "1024x1024", "response_format": "b64_json",
          "style": "vivid", "timeout": None}, "b64_json"),
    ],
    ids=["LangChain", "LlamaIndex"],
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


def test_an_error_after_the_stream_began_is_raised_by_the_sdk():
    """Once the status line is gone the error comes as an event, and the SDK raises it."""
    service = FakeImageService(failures={"x": engine.NumericalError("image turned NaN")}, fail_at_step=2)
    with pytest.raises(openai.APIError, match="image turned NaN") as caught:
        list(make_openai(service).images.generate(prompt="x", stream=True, partial_images=3))
    assert caught.value.code == "numerical_error"


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (engine.DeadlineMissed("m"), 1),
        (engine.NumericalError("m"), 1),
        (engine.LoraError("m"), 1),
        (engine.Overloaded("m", retry_after_s=1.0), 2),
    ],
    ids=repr,
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
