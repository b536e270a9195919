"""Quality drift: answers of a configuration against those of the default, over HTTP to a server of the test's own."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from plait.tuning.measure.quality import NoAnswer, quality_drift
from plait_loadtest.load import load_scenario
from plait_loadtest.scenario import Scenario
from support.app_server import AppServer
from support.http_app import b64, png

Answer = Callable[[dict[str, Any]], tuple[dict[str, str], bytes]]


class Server(AppServer):
    """Answers a POST with what ``answer`` makes of the JSON of its body, a GET with one of ``files``."""

    answer: Answer
    status = 200

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

        async def app(request: Request) -> Response:
            if request.method == "GET":
                return Response(self.files[request.url.path])
            headers, body = self.answer(await request.json())
            return Response(body, self.status, headers)

        super().__init__(Starlette(routes=[Route("/{path:path}", app, methods=["GET", "POST"])]))
        self.url = f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.stop()


def ranking(url: str) -> Scenario:
    target = {"url": url, "api": "infer", "model": "m"}
    mix = [{"candidates": {"3": 1}, "binary": False, "inputs": [{"name": "item", "ids": 9}]}]
    return load_scenario({"name": "rank", "target": target, "mix": mix, "duration_s": 5}, {})


def images(server: Server) -> Scenario:
    mix = [{"prompts": ["a", "b"], "size": {"8x8": 1}, "steps": {"2": 1}}]
    return load_scenario({"name": "draw", "target": {"url": server.url, "api": "images"}, "mix": mix}, {})


def scores(offset: float, *, binary: bool = False) -> Answer:
    def answer(asked: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        values = np.asarray(asked["inputs"][0]["data"], np.float32) / 10 + np.float32([0, 0, offset])
        output: dict[str, Any] = {"name": "score", "datatype": "FP32", "shape": [3]}
        if not binary:
            return {}, json.dumps({"outputs": [{**output, "data": values.tolist()}]}).encode()
        head = json.dumps({"outputs": [{**output, "parameters": {"binary_data_size": 12}}]}).encode()
        return {"Inference-Header-Content-Length": str(len(head))}, head + values.tobytes()

    return answer


@pytest.mark.parametrize("binary", [False, True])
def test_scores_drift_by_their_largest_difference(server, tmp_path, monkeypatch, binary):
    """The default's first answers count; the same scores again are no drift, in whatever form they come. No proxy is
    asked, as for the load."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # what it knows of proxies
    server.answer = scores(0.0)
    assert quality_drift([ranking(server.url)], tmp_path, is_default=True) == 0.0
    server.answer = scores(0.25, binary=binary)
    assert quality_drift([ranking(server.url)], tmp_path, is_default=False) == pytest.approx(0.25, abs=1e-6)
    assert quality_drift([ranking(server.url)], tmp_path, is_default=True) == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("kept", [False, True])
def test_pictures_drift_by_their_mean_difference(server: Server, tmp_path: Path, kept: bool):
    """Of the image that drifts most; the requests of both are the same. Images that are kept are fetched from the
    service, whatever host their address has."""
    shade, asked = 0, []

    def answer(body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        asked.append((body["prompt"], body["seed"]))
        file = png(8, 8, (shade if len(asked) % 4 == 2 else 0, 0, 0))
        server.files[f"/v1/images/results/{len(asked)}.png"] = file
        address = {"url": f"https://images.example/v1/images/results/{len(asked)}.png"}
        image = address if kept else {"b64_json": b64(file)}
        return {}, json.dumps({"data": [image]}).encode()

    server.answer = answer
    assert quality_drift([images(server)], tmp_path, is_default=True) == 0.0
    shade = 51
    assert quality_drift([images(server)], tmp_path, is_default=False) == pytest.approx(51 / 255 / 3, rel=1e-4)
    assert asked[:4] == asked[4:]
    assert len(set(asked)) == 4


def test_what_can_not_be_compared_is_a_failure(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No default yet, an error, another form, nobody there."""
    server.answer = scores(0.0)
    with pytest.raises(NoAnswer, match="the default has not answered"):
        quality_drift([ranking(server.url)], tmp_path, is_default=False)
    quality_drift([ranking(server.url)], tmp_path, is_default=True)
    server.answer = lambda _: ({}, json.dumps({"outputs": [{"name": "score", "data": [1.0]}]}).encode())
    with pytest.raises(NoAnswer, match="another form"):
        quality_drift([ranking(server.url)], tmp_path, is_default=False)
    server.answer = lambda _: ({}, b"busy")
    monkeypatch.setattr(server, "status", 503)
    with pytest.raises(NoAnswer, match="503: busy"):
        quality_drift([ranking(server.url)], tmp_path, is_default=False)
    with pytest.raises(NoAnswer, match="not answered"):
        quality_drift([ranking("http://127.0.0.1:9")], tmp_path, is_default=False)
