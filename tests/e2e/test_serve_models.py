"""A server with several base models on two replicas that each have memory for one. In the end it is killed, and nobody
starts the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest

from plait.server import processes
from plait_serving.diffusion.assemble import EngineSettings, build_engine
from plait_serving.diffusion.knobs import EngineKnobs
from plait_serving.diffusion.values import Scheduler
from support.denoise import make_request
from support.http_app import pixels
from support.server import REAL, PlaitServer, free_port
from support.tiny import tiny_lora, tiny_sd
from support.waiting import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CONFIG = """
server: {drain_s: 30}
recommend: null
images:
  models: {one: ./one, two: ./two}
  models_folder: ./more
  aliases: {two-noto: {model: two, loras: {noto: 0.5}}}
  memory_bytes: %d
  dtype: float32
  executor: torch
  loras: {folder: loras}
  replicas: 2
  defaults: {steps: 4}
  knobs: {threads: 1}
"""
WAIT_S = 120.0


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The folder of the models and of the server."""
    root = tmp_path_factory.mktemp("models")
    one = tiny_sd(root / "one", seed=1)
    tiny_sd(root / "two", seed=2)
    tiny_sd(root / "late", seed=4)
    tiny_lora(root / "loras" / "noto.safetensors", one, seed=3)
    (root / "more" / "broken").mkdir(parents=True)
    (root / "more" / "broken" / "model_index.json").write_text("{}")
    return root


@pytest.fixture(scope="module")
def server(root) -> Iterator[PlaitServer]:
    """The server, which leaves nothing when it is killed: neither Ray's agents nor its folder."""
    config, port = root / "plait.yaml", free_port()
    bytes_of_one = sum(path.stat().st_size for path in (root / "one").rglob("*.safetensors"))
    config.write_text(CONFIG % int(1.5 * bytes_of_one))
    server = PlaitServer.launch(REAL, [str(config), "--port", str(port)], port=port, root=root)
    try:
        yield server.wait_ready()
        left, folder = server.members(), Path(server.record().ray_folder or "")
        assert folder.exists()
        server.process.kill()
        server.wait()
        assert processes.wait_until_gone(left, timeout_s=WAIT_S) == []
        wait_for(lambda: not folder.exists())
    finally:
        server.kill_and_clean()


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    """OpenAI's client, which knows no field for LoRAs."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def drawn(client, model: str) -> np.ndarray:
    answer = client.images.generate(model=model, prompt="red apple", extra_body={"seed": 7})
    return pixels(answer.data[0].b64_json).astype(int)


def alone(root: Path, model: str) -> np.ndarray:
    """The image of an engine that has this model only."""
    engine = build_engine(
        EngineSettings(model=root / model, dtype="float32", knobs=EngineKnobs(threads=1), converts=False)
    )
    try:
        request = make_request(prompt="red apple", guidance_scale=7.5, seed=7, scheduler=Scheduler.EULER)
        return engine.generate(request, timeout_s=WAIT_S).images[0].astype(int)
    finally:
        engine.stop(drain_s=0)


def test_what_is_not_loaded_stands_in_the_line_that_it_is_ready(server, root):
    """With the reason."""
    wait_for(lambda: "plait serves" in server.errors())
    (line,) = [line for line in server.errors().splitlines() if line.startswith("plait serves")]
    assert line.startswith(f"plait serves one, two at {server.url} (ready after ")
    assert f"; not loaded: broken ({root / 'more' / 'broken' / 'model_index.json'}: " in line


def test_a_model_comes_and_goes_on_both_replicas(client, server, root):
    """Without a restart: all who ask at once get its images, also from a replica that starts later; what was accepted
    before it left is finished, and then there is no such model."""
    wanted = alone(root, "late")
    assert np.abs(wanted - alone(root, "one")).max() > 10
    (root / "more").mkdir(exist_ok=True)
    (root / "late").rename(root / "more" / "late")
    assert "late" in [model.id for model in client.models.list()]
    with ThreadPoolExecutor(8) as threads:
        for ours in threads.map(lambda _: drawn(client, "late"), range(16)):
            assert np.abs(ours - wanted).max() <= 1
    victim, other = server.replica_pids("engine")
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len({*server.replica_pids("engine")} - {victim}) == 2)
    os.kill(other, signal.SIGKILL)  # so that the new one has to know of it
    assert np.abs(drawn(client, "late") - wanted).max() <= 1
    with ThreadPoolExecutor(1) as threads:
        begun = threads.submit(streamed, client, "late", 300, (root / "more" / "late", root / "late"))
        assert begun.result(WAIT_S) == "image_generation.completed"
    with pytest.raises(openai.NotFoundError, match="no model 'late'"):
        drawn(client, "late")
    assert np.abs(drawn(client, "one") - alone(root, "one")).max() <= 1


def streamed(client, model: str, steps: int, move: tuple[Path, Path]) -> str:
    """Ask for an image with previews, move the model's folder away at the first one; return the last event's type."""
    last = ""
    events = client.images.generate(
        model=model, prompt="red apple", stream=True, partial_images=3, extra_body={"num_inference_steps": steps}
    )
    for event in events:
        if not last:
            move[0].rename(move[1])
            assert model not in [each.id for each in client.models.list()]
        last = event.type
    return last


def test_all_replicas_sleep_and_wake(client, server):
    """No replica holds a model that an administrator put to sleep; a request wakes it, and so does `wake`."""
    before = drawn(client, "one")
    assert told(server, "one", "sleep") == (200, True)
    resident(server, lambda models: "one" not in models)
    assert np.abs(drawn(client, "one") - before).max() <= 1
    assert told(server, "one", "sleep") == (200, True)
    resident(server, lambda models: "one" not in models)
    assert told(server, "one", "wake") == (200, False)
    resident(server, lambda models: "one" in models)
    assert told(server, "two-noto", "sleep")[0] == 404


def told(server, model: str, what: str) -> tuple[int, bool | None]:
    status, answer, _ = server.post(f"/v1/models/{model}/{what}")
    return status, answer.get("asleep")


def resident(server, wanted) -> None:
    """Wait until the models in memory are as wanted."""
    wait_for(lambda: wanted(server.get("/v1/status")[1]["resident"]["models"]))
