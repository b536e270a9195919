"""Server-sent events: their bytes, pings, errors before and after the stream began, and the disconnect."""

from __future__ import annotations

import asyncio
import base64

import pytest

from fakes.images import FakeImageService, fake_image
from plait_serving.diffusion.errors import Overloaded
from plait_serving.diffusion.values import Progress
from plait_serving.http.context import HttpSettings
from plait_serving.http.edge import sse
from plait_serving.http.edge.feed import EventFeed
from plait_serving.images.codec import OutputFormat, encode_image
from plait_serving.images.infotext import infotext
from support.http_app import AsgiCall, make_app, make_client

URL = "/v1/images/generations"


def stream(service, **fields):
    body = {"prompt": "x", "stream": True, "seed": 3, **fields}
    return make_client(service).post(URL, json=body, headers={"x-request-id": "golden-1"})


def test_golden_bytes():
    """The stream is exactly this: comments for progress, named events, one completed event, nothing after it."""
    service = FakeImageService()
    answer = stream(service, num_inference_steps=2, partial_images=1, quality="low")
    (request,) = service.submitted
    preview = encode_image(fake_image(request, 4), OutputFormat.PNG)
    final = encode_image(fake_image(request, 3), OutputFormat.PNG, parameters=infotext(request, model="emoji", index=0))
    fields = (
        '"created_at": 1790000000, "size": "16x16", "quality": "auto", "background": "opaque", "output_format": "png"'
    )
    expected = (
        ": step 1/2\n\n"
        "event: image_generation.partial_image\n"
        'data: {"type": "image_generation.partial_image", '
        f'"b64_json": "{base64.b64encode(preview).decode()}", "partial_image_index": 0, {fields}}}\n\n'
        ": step 2/2\n\n"
        "event: image_generation.completed\n"
        'data: {"type": "image_generation.completed", '
        f'"b64_json": "{base64.b64encode(final).decode()}", "flagged": false, {fields}, '
        '"model": "emoji", "dtype": "float32", "seed": 3, "scheduler": "euler", "sigmas": null, "eta": 0.0, '
        '"num_inference_steps": 2, "guidance_scale": 7.5, "guidance_rescale": 0.0, "true_cfg_scale": 1.0, '
        '"clip_skip": 0, "max_sequence_length": null, '
        '"lora_policy": "exact", "lora_free_steps": 0, '
        '"timings": {"queue": 0.125, "lora": 0.25, "encode": 0.5, "denoise": 1.0, "decode": 0.0625, "total": 1.9375}, '
        '"ignored": ["quality"], "hints": [], "id": "golden-1"}\n\n'
    )
    assert answer.content.decode() == expected
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-request-id"] == "golden-1"


def test_a_refusal_keeps_its_status():
    """An error that is there at once is a proper answer, not a stream that began with 200."""
    answer = stream(FakeImageService(failures={"x": Overloaded("full")}))
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "overloaded"


async def test_pings_keep_an_idle_stream_alive():
    """While a request waits in the queue, comments go out so that no proxy closes the connection."""
    settings = HttpSettings(first_event_wait_s=0.01, ping_interval_s=0.01)
    call = AsgiCall(make_app(FakeImageService(step_s=3_600.0), settings), b'{"prompt": "x", "stream": true}')
    await call.wait_chunk()
    assert call.chunks[0] == sse.PING
    call.disconnect()
    await call.done()


STEP = Progress(step=1, steps=2)


class Events:
    """A service's events: the second one never comes."""

    def __init__(self):
        self.closed = 0
        self.first = asyncio.Event()

    async def __call__(self):
        try:
            await self.first.wait()
            yield STEP
            await asyncio.Event().wait()
        finally:
            self.closed += 1


@pytest.mark.parametrize("reads", [False, True])
async def test_a_read_that_times_out_loses_nothing_and_closing_ends_the_generator(reads):
    """What came after the timeout is returned by the next read. The generator's clean-up has run, once, when `aclose`
    returns, in the middle of a read or between two."""
    events = Events()
    feed = EventFeed(events())
    assert await feed.next(0.001) is None
    events.first.set()
    assert await feed.next() == STEP
    if reads:
        assert await feed.next(0.001) is None
    for _ in range(2):
        await feed.aclose()
        assert events.closed == 1


async def test_who_leaves_before_the_first_byte_ends_what_would_be_streamed():
    """A client that reads nothing, so that not even the status can be sent, and then hangs up."""
    closed = []

    async def chunks():
        try:
            yield sse.PING
        finally:
            closed.append(True)

    async def nothing_is_read(_):
        await asyncio.Event().wait()

    async def hung_up():
        return {"type": "http.disconnect"}

    await sse.EventStream(chunks())({"type": "http"}, hung_up, nothing_is_read)
    assert closed == [True]
