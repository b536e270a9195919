"""Images that clients send are decoded on threads of their own, which belong to the work."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fastapi import FastAPI

from fakes.images import FakeImageService
from plait_serving.diffusion.values import RgbImage
from plait_serving.http.app import app_from_context
from plait_serving.http.context import HttpSettings, RouteContext
from support.http_app import AsgiCall, b64, make_client, png
from support.waiting import until

PLAIN = json.dumps({"prompt": "x"}).encode()
CONTROL = {"name": "edges", "image": b64(png()), "preprocess": True}
CONTROLLED = json.dumps({"prompt": "x", "controlnets": [CONTROL]}).encode()


class SlowPreprocessor:
    """Counts how often it began, and ends when it is let go."""

    def __init__(self) -> None:
        self.began = 0
        self.go = threading.Event()

    def __call__(self, image: RgbImage) -> RgbImage:
        self.began += 1
        assert self.go.wait(60)
        return image


@pytest.fixture
def slow() -> Any:
    made = SlowPreprocessor()
    yield made
    made.go.set()


@pytest.fixture
def app(slow: SlowPreprocessor, service: FakeImageService) -> FastAPI:
    """With one thread that encodes."""
    settings = HttpSettings(codec_threads=1, preprocessors={"edges": slow})
    return app_from_context(RouteContext(images=service, settings=settings))


async def plain_image(app: FastAPI) -> int | None:
    """The status of a request that sends no image."""
    call = AsgiCall(app, PLAIN)
    await call.done()
    return call.status


async def test_a_client_that_leaves_frees_no_place(
    app: FastAPI, slow: SlowPreprocessor, service: FakeImageService
) -> None:
    """Six of them filled every thread of the process: work counts until it ends, and what nobody waits for any more is
    never begun. One file is decoded at a time, and nothing else waits for it: images are made and encoded."""
    calls = [AsgiCall(app, CONTROLLED)]
    await until(lambda: slow.began == 1)
    calls += [AsgiCall(app, CONTROLLED) for _ in range(6)]
    assert await plain_image(app) == 200
    for call in calls:
        call.disconnect()
        await call.done()
    last = AsgiCall(app, CONTROLLED)
    assert await plain_image(app) == 200
    assert slow.began == 1
    slow.go.set()
    await last.done()
    assert (last.status, slow.began, len(service.submitted)) == (200, 2, 3)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("generations", {"controlnets": [{"name": "edges", "image": "FILE"}]}, "controlnets.0.image"),
        ("edits", {"image": "FILE"}, "image"),
        ("edits", {"image": b64(png()), "mask": "FILE"}, "mask"),
        ("control_maps", {"name": "edges", "image": "FILE"}, "image"),
    ],
)
def test_a_file_of_too_much_work_is_a_400(
    path: str, body: dict[str, Any], param: str, service: FakeImageService
) -> None:
    """Wherever it is sent."""
    raw = b"\xff\xd8" + b"\xff\xda\0\2" * 1000 + b"\xff\xd9"
    text = json.dumps({"prompt": "x", **body} if path != "control_maps" else body).replace("FILE", b64(raw))
    headers = {"content-type": "application/json"}
    answer = make_client(service).post(f"/v1/images/{path}", content=text, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], "scans" in error["message"]) == (400, param, True)
    assert service.submitted == []
