"""The whole server, for real: the engine, ControlNets as services, LoRA files, Ray Serve and HTTP, on tiny models."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
from PIL import Image

from plait.server import processes
from support.http_app import b64, pixels, saved
from support.server import REAL, PlaitServer, free_port, write_tiny_models
from support.waiting import wait_for

pytestmark = pytest.mark.cluster
SIZE = 32


@pytest.fixture(scope="module")
def plait_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaitServer]:
    """A file's one server: tiny models, ControlNets as services, and a home directory that does not exist. At its end
    it has work for long, and a second signal waits for nobody."""
    root = tmp_path_factory.mktemp("plait-server")
    config = write_tiny_models(root)
    port = free_port()
    server = PlaitServer.launch(
        REAL, [str(config), "--port", str(port)], port=port, root=root, environ={"HOME": str(root / "no-home")}
    )
    try:
        yield server.wait_ready()
        left = server.members()
        with ThreadPoolExecutor(2) as threads:
            asked = [threads.submit(status_of, server, prompt="x", num_inference_steps=200, n=8) for _ in range(2)]
            wait_for(lambda: server.metric("plait_engine_requests_running"))
            server.signal(signal.SIGTERM)
            wait_for(lambda: "finishing what runs" in server.errors())
            assert server.stop() == 0, server.errors()
        assert processes.wait_until_gone(left, timeout_s=0) == []
        assert not all(each.result() == 200 for each in asked)
    finally:
        if server.process.poll() is None:
            server.kill_and_clean()


def status_of(server: PlaitServer, **body: object) -> int:
    """The answer's status; 0 for none."""
    try:
        return server.generate(**body)[0]  # type: ignore[arg-type]
    except OSError:
        return 0


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def control_image(seed=0):
    """A map with structure: random blocks."""
    blocks = np.random.default_rng(seed).integers(0, 2, (8, 8, 1), dtype=np.uint8) * 255
    return b64(saved(Image.fromarray(np.kron(np.repeat(blocks, 3, axis=2), np.ones((4, 4, 1), dtype=np.uint8)))))


def control(name, **fields):
    return {"name": name, "image": control_image(), **fields}


def made(server, **body):
    status, answer, _ = server.generate(**body)
    assert status == 200, answer
    return pixels(answer["data"][0]["b64_json"])


def difference(a, b):
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


def test_serve_openai_client_makes_a_picture(plait_server):
    """The openai client works unchanged: a PNG of the model's size, the same one again for the same seed."""
    client = client_of(plait_server)
    assert [model.id for model in client.models.list()] == ["tiny"]
    extra = {"seed": 7, "num_inference_steps": 4}
    first, second = (client.images.generate(model="tiny", prompt="red apple", extra_body=extra) for _ in range(2))
    assert pixels(first.data[0].b64_json).shape == (SIZE, SIZE, 3)
    assert first.data[0].b64_json == second.data[0].b64_json
    with pytest.raises(openai.NotFoundError) as caught:
        client.images.generate(model="sdxl", prompt="x")
    assert caught.value.code == "model_not_found"


def test_serve_that_told_its_address_is_ready(plait_server):
    """No half-ready server: the health check agrees, and so does the log about what must not be loaded too early."""
    assert plait_server.get("/health")[1]["ready"] is True
    assert "torch was imported before" not in plait_server.log()


def test_serve_says_what_its_host_shares(plait_server):
    """An engine and a ControlNet replica have a thread each, at least; shared if there are fewer cores."""
    wait_for(lambda: plait_server.metric("plait_host_threads_planned") >= 2)  # a replica may still be starting
    planned, cores = plait_server.metric("plait_host_threads_planned"), plait_server.metric("plait_host_cores")
    assert plait_server.metric("plait_host_shared") == (planned > cores)


def test_serve_answers_mixed_requests_at_once(plait_server):
    """LoRA sets, ControlNets, schedulers and steps: each gets its own answer, which a ControlNet or a LoRA changes, and
    the crowd does not; who is refused hears it meanwhile."""
    noto, edges = [{"name": "noto"}], control("edges")
    bodies = [
        {},
        {"loras": noto},
        {"controlnets": [edges]},
        {"controlnets": [control("edges", end=0.5, scale=0.7)], "scheduler": "unipc"},
        {"controlnets": [edges], "loras": noto, "scheduler": "dpmpp_2m", "num_inference_steps": 5},
        {"loras": [{"name": "sketch"}, {"name": "noto", "scale": 0.5}], "guidance_scale": 1.0, "scheduler": "lcm"},
        {"loras": [{"name": "spoken"}], "n": 3, "scheduler": "euler_a"},
    ]
    bodies = [{"prompt": "red apple", "seed": 3, "num_inference_steps": 4, **body} for body in bodies]
    with ThreadPoolExecutor(2 * len(bodies)) as threads:
        refused = threads.submit(plait_server.generate, prompt="x", controlnets=[control("depth")])
        answers = list(threads.map(lambda body: plait_server.generate(**body), bodies))
        status, answer, _ = refused.result()
    assert (status, answer["error"]["param"]) == (404, "controlnets.0.name")
    images = []
    for body, (status, answer, _) in zip(bodies, answers, strict=True):
        assert status == 200, (body, answer)
        assert [entry["seed"] for entry in answer["data"]] == [3 + i for i in range(body.get("n", 1))]
        images.append(pixels(answer["data"][0]["b64_json"]))
    for (i, a), (j, b) in itertools.combinations(enumerate(images), 2):
        assert difference(a, b) > 0.5, (bodies[i], bodies[j])
    for body, ours in zip(bodies, images, strict=True):
        assert difference(ours, made(plait_server, **body)) < 1.0, body


def test_serve_streams_partial_images(plait_server):
    """Server-sent events: the partial images in order, then the image that the plain call makes."""
    client = client_of(plait_server)
    extra = {"seed": 5, "num_inference_steps": 6}
    events = list(client.images.generate(model="tiny", prompt="cat", stream=True, partial_images=2, extra_body=extra))
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert difference(pixels(events[-1].b64_json), made(plait_server, prompt="cat", **extra)) <= 1


def test_serve_disconnect_cancels_the_engines_work(plait_server):
    """A client that hangs up frees the engine: a long request is given up after a step or two, not at its end."""
    connection = http.client.HTTPConnection("127.0.0.1", plait_server.port, timeout=120)
    given_up, steps = (plait_server.metric(f"plait_{name}_total") for name in ("cancelled", "engine_steps"))
    body = json.dumps({"prompt": "cat", "num_inference_steps": 200, "n": 8})
    connection.request("POST", "/v1/images/generations", body, {"content-type": "application/json"})
    wait_for(lambda: plait_server.metric("plait_engine_steps_total") > steps)
    connection.close()
    wait_for(lambda: plait_server.metric("plait_cancelled_total") > given_up)
    wait_for(lambda: plait_server.metric("plait_engine_requests_running") == 0)
    assert plait_server.metric("plait_engine_steps_total") - steps < 150


def kill_replica(server, deployment):
    os.kill(server.replica_pids(deployment)[0], signal.SIGKILL)


def test_serve_recovers_when_the_only_controlnet_replica_was_killed(plait_server):
    """With no replica left the request fails by name or waits; the server stays well and the ControlNet returns."""
    kill_replica(plait_server, "controlnet-edges")
    body = {"prompt": "cat", "num_inference_steps": 3, "seed": 1, "controlnets": [control("edges")]}
    status, answer, _ = plait_server.generate(**body)
    assert status in (200, 503), answer
    if status == 503:
        assert answer["error"]["code"] == "controlnet_unavailable"
        assert "edges" in answer["error"]["message"]
    assert plait_server.generate(prompt="cat", num_inference_steps=2)[0] == 200
    wait_for(lambda: plait_server.generate(**body)[0] == 200, timeout_s=180)


def test_serve_survives_kill_minus_9_of_the_engine_replica(plait_server):
    """The base replica dies in mid-request: the request is made again on the new one, and the server recovers."""
    body = {"prompt": "tree", "num_inference_steps": 200, "seed": 9}
    expected = made(plait_server, **body)
    steps = plait_server.metric("plait_engine_steps_total")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(plait_server.generate(**body)))
    thread.start()
    wait_for(lambda: plait_server.metric("plait_engine_steps_total") > steps)
    kill_replica(plait_server, "engine")
    thread.join(120)
    status, answer, _ = answers[0]
    assert status == 200, answer
    assert difference(pixels(answer["data"][0]["b64_json"]), expected) < 1.0
    wait_for(lambda: plait_server.get("/health")[0] == 200)
