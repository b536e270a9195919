"""The application behind a real uvicorn and a real socket: what in-process clients cannot show."""

from __future__ import annotations

import http.client
import json
import socket

import openai
import pytest

from fakes.images import FakeImageService
from plait_serving.http.context import HttpSettings
from support.app_server import AppServer
from support.http_app import make_app
from support.waiting import wait_for


class Server(AppServer):
    """The image API over a fake service."""

    def __init__(self):
        self.service = FakeImageService()
        super().__init__(make_app(self.service, HttpSettings(max_body_bytes=100_000)))


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.stop()


def connect(server, body):
    """Sends a request and leaves the connection open."""
    raw = json.dumps(body).encode()
    headers = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
    head = f"POST /v1/images/generations HTTP/1.1\r\n{headers}"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    client.sendall(head.encode() + b"\r\n\r\n" + raw)
    return client


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_socket_cancels_the_work(server, stream, monkeypatch):
    """Over a real connection a client that goes stops its image, in the middle of a step."""
    before = len(server.service.cancelled)
    start = server.service.steps_run
    monkeypatch.setattr(server.service, "step_s", 0.2)
    client = connect(server, {"prompt": "x", "num_inference_steps": 50, "stream": stream})
    wait_for(lambda: server.service.steps_run >= start + 2)
    monkeypatch.setattr(server.service, "step_s", 600.0)
    client.close()
    wait_for(lambda: len(server.service.cancelled) == before + 1)
    assert server.service.steps_run < start + 50


def test_events_arrive_while_the_picture_is_made(server, monkeypatch):
    """Nothing between the engine and the socket holds events back."""
    client = openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0)
    steps, start = [], server.service.steps_run
    monkeypatch.setattr(server.service, "step_s", 0.25)
    for event in client.images.generate(
        prompt="x", stream=True, partial_images=3, extra_body={"num_inference_steps": 8}
    ):
        steps.append(server.service.steps_run - start)
        assert event.b64_json
    assert len(steps) == 4
    assert steps[0] < steps[-1] == 8


def test_head_is_answered_as_get_without_a_body(server):
    """As load balancers ask for health, and browsers for an image; the connection goes on after it."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for path in ("/health", "/v1/models", "/metrics", "/nope", "/"):
        found = []
        for method in ("HEAD", "GET"):
            connection.request(method, path)
            answer = connection.getresponse()
            found.append((answer.status, answer.headers["content-type"], bool(answer.read())))
        head, got = found
        assert (head, got[2]) == ((*got[:2], False), True), path
    connection.close()


def test_a_large_body_gets_its_413(server):
    """The answer reaches a client whose upload is refused, and the server goes on."""
    with connect(server, {"prompt": "x" * 200_000}) as client:
        answer = client.recv(65_536)
        while b"body_too_large" not in answer and (more := client.recv(65_536)):  # the head may come first
            answer += more
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in answer
    api = openai.OpenAI(api_key="x", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0)
    assert api.images.generate(prompt="x").data
