"""The demo's scenes: each is asked for as it says, guides are earlier images, and the sheet shows them all."""

from __future__ import annotations

import json
import subprocess
import threading

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from plait.demo import run as demo
from plait.demo.ranking import offers_ranking
from plait.errors import ServeError
from plait_serving.http.images.schemas import EditBody, GenerationBody
from support import loadtest_records
from support.app_server import AppServer
from support.http_app import b64, pixels, png


class Asked:
    """Answers with an image per prompt; keeps the bodies."""

    def __init__(self):
        self.bodies = []
        self.at_once = 0
        self.max_at_once = 0
        self.together = threading.Barrier(len(demo.TOGETHER), timeout=60)

    def __call__(self, body):
        self.bodies.append(body)
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        if body["prompt"] in {scene.prompt for scene in demo.TOGETHER}:
            self.together.wait()
        self.at_once -= 1
        colour = (len(self.bodies) * 20, 10, 10)
        timings = {"queue": 0.0, "denoise": 0.5, "total": 0.5}
        return {"data": [{"b64_json": b64(png(colour=colour))}], "timings": timings}


def test_cli_demo_asks_in_words_that_the_server_understands(tmp_path):
    """Every body is valid for the image API, scenes with a ControlNet carry their guide's image, the second model makes
    an image and edits one, the last scenes run together, and the contact sheet has each image's colour."""
    ask, said = Asked(), []
    images = demo.make_scenes(ask, tmp_path, say=said.append)
    for body in ask.bodies:
        (EditBody if "image" in body else GenerationBody).model_validate_json(json.dumps(body))
    guide = b64((tmp_path / "guide.png").read_bytes())
    controlled = [body for body in ask.bodies if "controlnets" in body]
    assert controlled
    assert all(body["controlnets"][0]["image"] == guide for body in controlled)
    edits = [body for body in ask.bodies if "image" in body]
    assert {edit["image"] for edit in edits} == {guide}
    (masked,) = [edit["mask"] for edit in edits if "mask" in edit]
    assert pixels(masked)[[0, 11, 12, 15], 0, 0].tolist() == [255, 255, 0, 0]  # of 16 lines
    assert len(images) == len(demo.ALONE) + len(demo.TOGETHER)
    assert all(image.path.is_file() for image in images)
    assert all(any(str(image.path) in line for line in said) for image in images)
    assert ["image" in body for body in ask.bodies if body.get("model") == demo.SECOND] == [False, True]
    assert ask.max_at_once == len(demo.TOGETHER) >= 2
    colours = {colour for _, colour in demo.contact_sheet(images).getcolors(maxcolors=1 << 20)}
    assert {Image.open(image.path).getpixel((0, 0)) for image in images} <= colours


def test_cli_demo_asks_its_own_server_past_any_proxy(monkeypatch):
    """Where the environment names one, as in a company's network: it would look for the server on its own machine."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def answer(request):
        return JSONResponse({"data": [{"id": "picks"}], "method": request.method})

    server = AppServer(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
    url = f"http://127.0.0.1:{server.port}"
    try:
        assert offers_ranking(url)
        with demo.own_client() as client:
            assert demo.post(client, f"{url}/v1/recommend", {})["method"] == "POST"
    finally:
        server.stop()


def test_cli_demo_makes_a_second_model(tmp_path, monkeypatch):
    """Anew by the command."""
    commands = []
    (tmp_path / demo.SECOND).mkdir()
    (tmp_path / demo.SECOND / "model_index.json").write_text("{}")

    def run(command, **_):
        commands.append(command)
        assert not (tmp_path / demo.SECOND).exists()
        return subprocess.CompletedProcess(command, len(commands) - 1)

    monkeypatch.setattr(demo.subprocess, "run", run)
    assert demo.second_model(tmp_path) == tmp_path / demo.SECOND
    assert commands[0][-6:] == ["merge", "emoji", "--lora", "sketch", "--out", str(tmp_path / demo.SECOND)]
    with pytest.raises(ServeError, match="ended with exit code 1"):
        demo.second_model(tmp_path)


def test_cli_demo_leaves_a_load_report(tmp_path, monkeypatch):
    """The smoke scenario goes to the demo's server; its page lies in the out folder, and one line says how it went."""
    asked = []

    def run_scenario(scenario):
        asked.append(scenario)
        rows = loadtest_records.records([second / 2.0 for second in range(40)], 20.0)
        return loadtest_records.session(rows, scenario)

    monkeypatch.setattr("plait_loadtest.session.run_scenario", run_scenario)
    told = demo.smoke("http://127.0.0.1:4321", tmp_path / "load.html")
    (scenario,) = asked
    assert (scenario.name, scenario.target.url, scenario.duration_s) == ("smoke", "http://127.0.0.1:4321", 20.0)
    assert "SLO met: 40 requests, median 20.0 ms" in told
    assert "SLO met" in (tmp_path / "load.html").read_text()
