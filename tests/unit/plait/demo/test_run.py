"""The demo: scenes that are asked for as they say, films ranked for two people, and a tuning job told in two lines."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from plait.demo import run as demo
from plait.errors import PlaitError, ServeError
from plait.errors import told as raised_as_told
from plait.tuning.job import local_run
from plait_autoconfig.errors import JobBroken, NothingValid, TunerError
from plait_autoconfig.jobs.job_file import parse_job
from plait_autoconfig.jobs.reporting import state_of
from plait_autoconfig.jobs.spec import JobSpec
from plait_autoconfig.jobs.state import JobState
from plait_serving.http.images.schemas import EditBody, GenerationBody
from plait_serving.http.ranking.recommend import RecommendBody, arrays_of
from plait_serving.ranking.inputs import Binder
from plait_serving.starter.ranking.picks import INPUTS
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


def test_the_demo_ranks_for_people_of_different_tastes():
    """Each body is valid, and binds to the starter's user-side inputs; each of them hears five names with scores, and
    the time it took."""
    bodies, said = [], []

    def ask(body):
        bodies.append(body)
        items = [{"id": i, "score": 1 - i / 10, "name": f"Film {i}"} for i in range(body["top_k"])]
        return {"items": items, "timings": {"queued_ms": 0.1, "lookup_ms": 0.25, "dense_ms": 1.5, "total_ms": 2.0}}

    demo.rank_for_everybody(ask, say=said.append)
    user_side = [item for item in INPUTS if item.side == "user"]
    for body in bodies:
        parsed = RecommendBody.model_validate(body)
        tensors = Binder(user_side).bind(arrays_of(user_side, [parsed.user], "user"))
        assert tensors["liked_genres"].tolist() == body["user"]["liked_genres"]
    for person in demo.PEOPLE:
        (place,) = [i for i, line in enumerate(said) if person.who in line]
        assert "dense 1.5" in said[place]
        assert " ms (in the server 2.0" in said[place]
        assert [line.split() for line in said[place + 1 : place + 6]] == [
            [f"{1 - i / 10:.3f}", "Film", str(i)] for i in range(5)
        ]


def test_cli_demo_asks_its_own_server_past_any_proxy(monkeypatch):
    """Where the environment names one, as in a company's network: it would look for the server on its own machine. A
    server without the recommender is no fault."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    served = ["emoji"]

    async def answer(request):
        return JSONResponse({"data": [{"id": name} for name in served], "method": request.method})

    server = AppServer(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]))
    url = f"http://127.0.0.1:{server.port}"
    try:
        with demo.own_client() as client:
            assert not demo.offers_ranking(client, url)
            served.append("picks")
            assert demo.offers_ranking(client, url)
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


def test_cli_demo_tunes_three_trials_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier demo left is taken away, the job has three trials, and the report's place is told."""
    (tmp_path / "job.sqlite").touch()
    ran: list[JobSpec] = []

    def run(job: Path, *, folder: Path) -> tuple[JobState, Path]:
        assert not folder.exists()
        ran.append(parse_job(job.read_text(), folder=job.parent))
        return state_of(ran[0], []), folder

    monkeypatch.setattr(local_run, "run", run)
    told = demo.tune_ranking(tmp_path)
    assert ran[0].budget.trials == 3
    assert str(tmp_path / "report.html") in told


def test_cli_demo_keeps_its_hands_off_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds no job is not removed."""
    (tmp_path / "mine.txt").write_text("x")
    job = local_run.EXAMPLES / "demo.yaml"
    spec = parse_job(job.read_text(), folder=job.parent)
    monkeypatch.setattr(local_run, "run", lambda job, folder: (state_of(spec, []), folder))
    demo.tune_ranking(tmp_path)
    assert (tmp_path / "mine.txt").exists()


def test_cli_demo_goes_on_where_the_host_is_too_busy_to_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images are made; what is broken ends it all the same."""

    def fails(error: Exception) -> None:
        def run(job: Path, *, folder: Path) -> None:
            with raised_as_told(TunerError):
                raise error

        monkeypatch.setattr(local_run, "run", run)

    fails(NothingValid("requests left late"))
    assert "NOTHING TUNED: requests left late" in demo.tune_ranking(tmp_path)
    fails(JobBroken("the child died"))
    with pytest.raises(PlaitError, match="the child died"):
        demo.tune_ranking(tmp_path)
