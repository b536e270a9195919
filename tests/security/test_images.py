"""Images that clients send: what media loaders of other servers fetched, decoded or ran."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from fakes.images import FakeImageService
from fakes.trap import Trap
from support.http_app import b64, make_client, png, png_chunk, saved

URL = "/v1/images/generations"


@pytest.fixture
def trap() -> Iterator[Trap]:
    made = Trap()
    assert not made.was_called()
    with socket.create_connection(("127.0.0.1", made.port)):
        assert made.was_called()
    yield made
    made.close()


@pytest.fixture
def service() -> FakeImageService:
    return FakeImageService()


@pytest.fixture
def client(service: FakeImageService) -> TestClient:
    return make_client(service)


def ask(client: TestClient, *images: Any, **more: Any) -> Any:
    """A request with control images."""
    names = ("edges", "plain", "edges", "plain", "edges")
    controlnets = [{"name": names[i % 5], "image": image} for i, image in enumerate(images)]
    return client.post(URL, json={"prompt": "x", "controlnets": controlnets, **more})


def header_only(width: int, height: int) -> bytes:
    """A PNG that says that it is so large, and has next to nothing in it."""
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", size), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*part) for part in parts)


def sixteen_megapixels() -> str:
    return b64(saved(Image.new("RGB", (4000, 4000))))


BOMBS = [(60_000, 60_000), (8193, 8), (2**31 - 1, 2**31 - 1), (4001, 4000)]

GREW = """
import json, re
from pathlib import Path
from security.test_images import (
    BOMBS, FakeImageService, ask, b64, header_only, make_client, png, sixteen_megapixels
)

def peak():  # not `ru_maxrss`: that begins with what the parent had
    return int(re.search("VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

def grew(*requests):
    before = peak()
    assert [ask(client, *images).status_code for images, _ in requests] == [status for _, status in requests]
    return peak() - before

client = make_client(FakeImageService())
grew(([b64(png())], 200), ([b64(b"no image")], 400))  # whatever is loaded for the first time
bombs = grew(*(([b64(header_only(*size))], 400) for size in BOMBS))
large = sixteen_megapixels()
grew(([large], 200))
print(json.dumps({"bombs": bombs, "four": grew(([large] * 4, 200))}))
"""


@pytest.fixture(scope="module")
def grew() -> dict[str, int]:
    """By how many bytes the peak of a process grew that did nothing else: by the bombs, and by four images where one
    had been decoded before."""
    done = subprocess.run(
        [sys.executable, "-c", GREW], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a.png",
        "HTTP://127.0.0.1:{port}/a.png",
        " \thttp://127.0.0.1:{port}/a.png",
        "http://user@127.0.0.1:{port}/a.png",
        "http:\\\\127.0.0.1:{port}\\a.png",
        "//127.0.0.1:{port}/a.png",
        "127.0.0.1:{port}/a.png",
        "http://[::ffff:127.0.0.1]:{port}/a.png",
        "data:image/png,http://127.0.0.1:{port}/a.png",
        "data:text/html;base64,aHR0cDovLzEyNy4wLjAuMQ==",
        "ftp://127.0.0.1:{port}/a.png",
        "s3://bucket/a.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "../../../etc/passwd",
    ],
)
def test_cve_2026_24779_and_cve_2026_25960_ssrf_through_an_image(
    client: TestClient, service: FakeImageService, trap: Trap, url: str
) -> None:
    """vLLM's MediaConnector fetched what an image field named, and its allow-list could be got round: here there is
    neither, an image is its bytes."""
    answer = ask(client, url.format(port=trap.port))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "controlnets.0.image"
    assert "root:" not in answer.text
    assert not trap.was_called()
    assert service.submitted == []


@pytest.mark.parametrize("field", ["model", "prompt", "user"])
def test_cve_2026_24779_other_fields_are_no_addresses_either(client: TestClient, trap: Trap, field: str) -> None:
    """A URL anywhere else is text."""
    client.post(URL, json={"prompt": "x", field: f"http://127.0.0.1:{trap.port}/"})
    assert not trap.was_called()


def test_cve_2026_116176_ssrf_through_the_request_id(client: TestClient, trap: Trap) -> None:
    """vLLM took a proxy's address from `X-Request-Id`: an id that is more than an id is replaced, not passed on."""
    url = f"http://127.0.0.1:{trap.port}/"
    answer = client.post(URL, json={"prompt": "x"}, headers={"x-request-id": url})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("req_")
    assert url not in answer.text
    assert not trap.was_called()


@pytest.mark.parametrize(("width", "height"), BOMBS)
def test_cve_2026_109229_decompression_bomb(client: TestClient, grew: dict[str, int], width: int, height: int) -> None:
    """SGLang had switched Pillow's limit off: here the size is read from the header, and a large one is refused before
    its pixels take any memory."""
    assert Image.MAX_IMAGE_PIXELS is not None
    answer = ask(client, b64(header_only(width, height)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "controlnets.0.image")
    assert grew["bombs"] < 128 << 20
    assert Image.MAX_IMAGE_PIXELS is not None


def test_cve_2026_100650_media_are_decoded_after_the_limits(client: TestClient) -> None:
    """vLLM decoded before it counted: a request that is refused anyway costs no decoding, or the first image, which is
    none, would be what is complained of."""
    broken = b64(b"no image")
    error = ask(client, *[broken] * 5).json()["error"]
    assert (error["param"], "at most 4 ControlNets" in error["message"]) == ("controlnets", True)
    error = ask(client, broken, num_inference_steps=10**6).json()["error"]
    assert error["param"] == "num_inference_steps"
    error = ask(client, broken, loras=[{"name": "nobody"}]).json()["error"]
    assert error["param"] == "loras.0.name"
    assert ask(client, broken).json()["error"]["param"] == "controlnets.0.image"


def test_cve_2026_130686_many_images_in_one_request(client: TestClient, grew: dict[str, int]) -> None:
    """vLLM bounded each image but not all of a request: here their number is bounded, and of those that are allowed
    only one is decoded at a time. Each of these is 16 MP, the most that is allowed, and 48 KB."""
    large = sixteen_megapixels()
    assert ask(client, *[large] * 64).status_code == 400
    assert ask(client, *[large] * 65).status_code == 400
    assert grew["four"] < 96 << 20  # all four would be 192 MB


@pytest.mark.parametrize("kind", ["audio/wav", "video/mp4", "application/octet-stream", "image/gif", "image/tiff"])
def test_cve_2026_54233_audio_bomb(client: TestClient, kind: str) -> None:
    """vLLM unpacked what clients called audio: nothing but PNG, JPEG and WebP has a decoder here, whatever it is
    called."""
    assert ask(client, f"data:{kind};base64,{b64(png())}").status_code == 400
    riff = b"RIFF" + struct.pack("<I", 2**31) + b"WAVEfmt " + bytes(64)
    for label in ("", "data:image/png;base64,", "data:image/webp;base64,"):
        assert ask(client, label + b64(riff)).status_code == 400


@pytest.mark.parametrize(
    "content",
    [
        b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>',
        b"<html><script>alert(1)</script></html>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n(%pipe%id) (r) file",
        b"GIF89a<script>alert(1)</script>",
    ],
)
def test_cve_2024_10099_stored_xss(client: TestClient, content: bytes) -> None:
    """ComfyUI served uploads back as what a browser made of them: here nothing that is sent is kept, and no answer is a
    page, even where it quotes its request."""
    assert ask(client, b64(content)).status_code == 400
    script = "<script>alert(1)</script>"
    quoted = [
        client.post(URL, json={"prompt": "x", script: 1}),
        client.post(URL, json={"prompt": "x", "model": script}),
        client.get(f"/v1/models/{script}"),
        client.get(f"/{script}"),
        client.post(URL, content=script, headers={"content-type": "text/html"}),
        client.post(URL, json={"prompt": script}),
    ]
    for answer in quoted:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-content-type-options"] == "nosniff"
